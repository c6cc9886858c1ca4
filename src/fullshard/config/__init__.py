"""The schema of all settings, and readers for settings of other libraries. This package does not import torch."""

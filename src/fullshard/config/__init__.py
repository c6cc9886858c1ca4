"""The schema of all settings and the readers that translate other dialects into it. It does not import torch."""

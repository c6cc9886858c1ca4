"""Adapters to other libraries, each importable only if that library is there."""

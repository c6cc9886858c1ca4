"""Adapters for other libraries. Each can only be imported if its library is installed."""

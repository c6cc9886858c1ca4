"""Adapters for other libraries. An adapter can only be imported if its library is installed."""

"""Arithmetic and vocabulary that all layers share. No module in this package imports torch."""

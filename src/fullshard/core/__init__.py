"""Calculations and data types that all layers share. No module in this package imports torch."""

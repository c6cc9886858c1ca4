"""Simulate a step of any engine in virtual time, on tensors without data.

The simulation has a clock per stream and a model of an allocator.
"""

"""Simulation of a training step of any engine in virtual time, on tensors without data.

The simulation has a clock for each stream and a model of the memory allocator.
"""

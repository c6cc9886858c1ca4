"""Predicts memory, traffic and time of a run before it is paid for, and recommends what to run. Imports no torch."""

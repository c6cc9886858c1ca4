"""Optimizers that step within backward, one bucket at a time, so that all gradients never exist together."""

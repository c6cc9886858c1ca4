"""Optimizers that step during backward, one bucket at a time, so that the gradients are never all in memory at once."""

"""Optimizers that step within backward, a bucket at a time, so that the gradients of all never exist at once."""

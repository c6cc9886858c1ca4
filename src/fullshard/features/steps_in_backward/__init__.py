"""Optimizers that step within backward, a bucket at a time, so that the gradients of all never exist at once."""

from fullshard.features.steps_in_backward.stepper import StepsInBackward, step_in_backward

__all__ = ["StepsInBackward", "step_in_backward"]

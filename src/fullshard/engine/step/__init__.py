"""Everything that happens at an optimizer's step.

segments          neighbouring slices of a bucket as one tensor, while torch's optimizers run their loop
offloaded_state   optimizer state that is on the host comes and goes
in_backward       a bucket is updated within backward, as soon as its gradient is final
"""

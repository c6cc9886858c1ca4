"""Everything that happens at an optimizer's step.

hooks             before and after every step; which optimizers may work on intervals
plain_tensors     torch's element-wise optimizers update plain tensors
matrices          whole matrices for optimizers that need them
local_parameters  optimizers that want addresses see plain tensors
in_backward       a bucket is updated within backward, as soon as its gradient is final
state_dict        an optimizer's state dict is made of intervals
offloaded_state   optimizer state that is on the host comes and goes
"""

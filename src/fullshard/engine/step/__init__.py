"""Everything that happens at an optimizer's step.

hooks             before and after every step; which optimizers may work on intervals
plain_tensors     torch's element-wise optimizers update plain tensors
adapters          what other libraries' optimizers need before and after a step
state_dict        make an optimizer's state dict of intervals
"""

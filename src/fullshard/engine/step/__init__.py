"""Everything that happens at an optimizer's step.

hooks             before and after every step
plain_tensors     torch's element-wise optimizers update plain tensors
adapters          what other libraries' optimizers need before and after a step
"""

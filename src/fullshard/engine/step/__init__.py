"""The parts of the engine that run at an optimizer step.

hooks             run before and after every step
plain_tensors     lets torch's element-wise optimizers update plain tensors
adapters          what the optimizers of other libraries need before and after a step
"""

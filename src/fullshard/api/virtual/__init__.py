"""Virtual time: a step of any engine on tensors without data, with a clock per stream and a model of an allocator."""

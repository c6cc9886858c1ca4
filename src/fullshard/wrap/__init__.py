"""Decides which modules are units and which unit owns which parameter. Knows `nn.Module`, not the engine."""

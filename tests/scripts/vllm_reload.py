"""What a CPU's vLLM 0.32 needs to take new weights: in this process, or in a server's workers.

`vllm serve --worker-extension-cls vllm_reload.Reload` gives the workers of a server the method below.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from safetensors.torch import load_file
from vllm._custom_ops import cpu_prepack_moe_weight


def reload(runner: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give vLLM's model runner a whole stream of weights."""
    runner.reload_weights(weights_iterator=weights)
    for module in runner.model.modules():
        for kept in (getattr(module, name, None) for name in ("w13_weight", "w2_weight")):
            if kept is not None:  # vLLM leaves experts unpacked when it reloads them on a CPU
                kept.data.copy_(cpu_prepack_moe_weight(kept.data, "vec"))


class Reload:
    """A mixin for vLLM's worker."""

    model_runner: Any

    def reload_file(self, path: str) -> None:
        reload(self.model_runner, load_file(path).items())

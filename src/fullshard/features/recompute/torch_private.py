"""Private torch names that only this feature uses; see `comm.torch_private`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

ATTENTION_KERNELS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""The kernels that `scaled_dot_product_attention` calls if it runs as one kernel. Selective checkpointing keeps their
results; if torch renamed them, attention would be computed twice. Since torch 2.5."""


def is_compiled_function(function: Callable[..., Any]) -> bool:
    """Return whether `torch.compile` made the function, so that checkpoints cannot inspect it. Since torch 2.0."""
    return hasattr(function, "_torchdynamo_orig_callable")


NormBase = _NormBase
"""The base class of all batch norms, which stay in float32. Since torch 2.0."""

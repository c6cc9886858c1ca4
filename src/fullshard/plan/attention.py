"""Predict the time of attention from its FLOP and from the fraction of the peak that its kernels reach.

Computing the scores and multiplying them by the values each takes 2 FLOP per query, visible key and unit of the head's
width. Under a causal mask, a query sees half of the S keys on average. With a window of w keys it sees w - w²/2S.
Backward does five matrix products where forward does two, because flash attention computes the scores again
(FlashAttention-2, arXiv 2307.08691, section 3.1.2). Attention that writes its scores to memory (`eager`) is computed in
full, masked or not, and its backward only takes twice as much.

The fractions of the peak are those published for FlashAttention 2 with long sequences and heads of 128. For the A100
they are 0.73 of 312 TFLOP/s in forward and 0.63 in backward, and a tenth less with a mask (2307.08691). For the H100
they are 335 and 322 of 989 TFLOP/s, also a tenth less with a mask (FlashAttention-3, arXiv 2407.08608, figures 5 and
6). Heads of 64 and of 256 reach 0.89 of these fractions. With S keys per query, the fractions are multiplied by
S / (S + 350).

PyTorch's `sdpa` uses FlashAttention 2 if it does not have to read a mask. On Hopper and on Blackwell, the wheels of
PyTorch 2.11 and later have cuDNN's kernel (`check_prefer_cudnn_attention` in sdp_utils.cpp; huggingface/transformers,
pull request 48163). Without a mask, it is planned as the version of flash attention for the device.

Version 2 runs on Blackwell with the instructions of an A100, and hardly faster than on an H100: 354 to 362 TFLOP/s with
heads of 128 in forward (pytorch-labs/tritonbench, pull request 171). Two versions are written for one architecture:

    flash3    Hopper. 630 TFLOP/s in forward and 532 in backward with a mask and 8,192 keys
              (Dao-AILab/flash-attention, pull request 1791; 685 and 539 in meta-pytorch/tritonbench, pull request
              1267). cuDNN, which Transformer Engine runs, is as fast (arXiv 2407.08608, figure 5)
    flash4    Blackwell. 1418 TFLOP/s in forward and 1209 in backward with a mask and 8,192 keys
              (Dao-AILab/flash-attention, pull request 2280)

The following table shows the kernel that PyTorch's `sdpa` runs on an accelerator, up to version 2.13. It is based on
`can_use_flash_attention` and `can_use_mem_efficient_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
and on the arguments that Transformers passes (`use_gqa_in_sdpa`):

| | grouped heads | each head has its own keys |
|---|---|---|
| half precision, no mask | flash attention, or cuDNN's | the same |
| a mask: a window shorter than the sequence | memory-efficient, keys and values repeated before | the same |
| float32, no mask; before Ampere also float16 | **written out** | memory-efficient |
| bfloat16 before Ampere | **written out** | **written out** |
| heads above 256, values of another size | memory-efficient, repeated before | the same |

*Written out* means that several operations write the scores to memory, all of them in float32. Flash attention only
accepts half precision, and on NVIDIA devices requires compute capability 8.0. The memory-efficient kernel does not
support grouped heads (PyTorch after 2.13 supports some), and accepts bfloat16 from compute capability 8.0 on. One row
was measured: on an H200 with torch 2.11, a float32 step of a Llama with grouped heads kept its scores. The other rows
come from the source code. AMD's two kernels, from AOTriton, accept the same cases as those of an A100. The fused kernel
for CPUs accepts masks, grouped heads and every dtype, but no dropout.
"""

from typing import Literal

from fullshard.core.dtypes import itemsize
from fullshard.core.errors import ConfigError
from fullshard.plan.hardware import Device
from fullshard.plan.job import Job
from fullshard.plan.shapes import Block

Way = Literal["fused", "masked", "math", "eager"]
"""The implementation that runs: one kernel (`fused`); one kernel that reads a mask, with keys and values repeated for
each head (`masked`); several operations of torch, in float32 (`math`); or several of Transformers (`eager`). The last
two write out the scores."""

WRITTEN_OUT = ("math", "eager")

BACKWARD = 2.5
"""FLOP of backward divided by FLOP of forward, if scores are computed again."""

_HALF = 350
"""Number of keys at which a kernel reaches half of its speed."""

_OF_HEAD_SIZE = {64: 0.89, 256: 0.89}


_WRITTEN_FOR = {
    "flash3": ("Hopper", ("H100", "H200", "H800")),
    "flash4": ("Blackwell", ("B200", "B300", "GB200", "GB300")),
}
"""The architecture that a version of flash attention is written for, and how the names of its devices begin."""

_MEASURED = {"flash3": (630 / 989, 532 / 989), "flash4": (1418 / 2250, 1209 / 2250)}
"""Fractions of the peak that these versions reach in forward and in backward, with a mask, heads of 128 and 8,192
keys."""


def fractions(job: Job, device: Device, way: Way) -> tuple[float, float]:
    """Return the fractions of the peak that attention reaches for long sequences, in forward and in backward."""
    kernel: str = job.attention
    if kernel == "sdpa" and way == "fused":
        kernel = next((name for name, (_, names) in _WRITTEN_FOR.items() if device.name.startswith(names)), kernel)
    if kernel not in _MEASURED:
        return device.flash, device.flash
    forward, backward = (part * (1 + _HALF / 8192) for part in _MEASURED[kernel])
    return forward, backward


def seen_keys(block: Block, seq_len: int, *, whole: bool = False) -> float:
    """Return the number of keys that a query sees on average, or the number without a mask if `whole` is set."""
    if whole:
        return seq_len
    if not block.window or block.window >= seq_len:
        return seq_len / 2
    return block.window - block.window**2 / (2 * seq_len)


def attention_flops(block: Block, tokens: int, seq_len: int, *, whole: bool = False) -> float:
    """Return the FLOP of one layer's attention for `tokens` tokens in sequences of `seq_len`."""
    widths = block.heads * (block.head_dim + (block.value_dim or block.head_dim))
    return 2 * widths * tokens * seen_keys(block, seq_len, whole=whole)


def part_of_size(head_dim: int, keys: int, *, flash: float) -> float:
    """Return attention's fraction of the peak FLOP/s. `flash` is the fraction for long sequences and heads of 128."""
    return flash * _OF_HEAD_SIZE.get(head_dim, 1.0) * keys / (keys + _HALF)


def check_kernel(job: Job, device: Device) -> None:
    """Raise `ConfigError` if the job wants a version of flash attention that is not written for the device."""
    architecture, names = _WRITTEN_FOR.get(job.attention, ("", ("",)))
    if not device.name.startswith(names):
        raise ConfigError(
            f"attention {job.attention} runs on {architecture}, but the device is {device.name}",
            hint="use attention flash",
        )


def breaks_graph(job: Job, device: Device) -> bool:
    """Return whether flash attention keeps a compiler out of checkpointed layers.

    With a single sequence, Transformers reads on the host whether position ids start again (`_is_packed_sequence` in
    modeling_flash_attention_utils.py), where the graph ends (huggingface/transformers, issue 41803). If a graph ends
    inside a checkpoint, torch runs the checkpoint uncompiled (`_disable_dynamo` in torch/utils/checkpoint.py).
    """
    is_flash = job.attention.startswith("flash") and job.cp == 1 and not device.is_cpu
    return is_flash and job.compile and job.checkpointing != "none" and job.micro_batch == 1


def what_runs(block: Block, job: Job, device: Device) -> Way:
    """Return the kernel that PyTorch runs (see the module's table). Without the flash kernel, a job gets `sdpa`."""
    if job.attention == "eager":
        return "eager"
    has_flash = itemsize(job.compute_dtype) == 2 and device.has_bfloat16 and not device.is_cpu
    reads_mask = (job.attention == "sdpa" or not has_flash) and 0 < block.window < job.seq_len
    if device.is_cpu:
        has_kernel = not block.attention_dropout
    else:
        is_repeated = reads_mask or block.value_dim not in (0, block.head_dim) or block.head_dim > 256
        is_grouped = block.kv_heads < block.heads and not is_repeated
        is_known = device.has_bfloat16 or job.compute_dtype != "bfloat16"
        has_kernel = has_flash or (is_known and not is_grouped)
    if not has_kernel:
        return "math"
    return "masked" if reads_mask else "fused"

"""Bytes a transformer layer keeps for backward, and what it needs while it runs. Per token, derived tensor by tensor.

b is the bytes of a compute element; H, I, q and kv are the widths of the residual stream, the feed-forward part, the
queries and the keys (heads times head size). What autograd saves in a layer as Transformers writes it:

| tensor | bytes per token | why |
|---|---|---|
| each norm's input | 4 H | RMS norms compute in float32: `pow` and `mul` save that copy; LayerNorm: b H |
| each norm's output before its weight | b H | for the weight's gradient; not if the weight is frozen |
| each norm's output | b H | the input of the projections after it |
| q, k, v after rotation, and attention's output | b (2 q + 2 kv) | attention's backward, the projection after it |
| attention's scores, `eager` only | (4 + b) heads x sequence | softmax in float32, and its copy for the product |
| gated feed-forward | 4 b I | gate (SiLU), its activation and up (product), the product (down projection) |
| plain feed-forward | 2 b I | before and after the activation |
| mixture | that of each of k experts, + 2 b k H | the tokens gathered for them and their weighted outputs |

Compiled, norms and activations fuse, and the partitioner recomputes what is cheap (PyTorch's min-cut partitioner): the
norms' float32 copies and the activation's output go. Checked against what a real forward saves
(`tests/test_plan_activations.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.plan.job import Job
from fullshard.plan.shapes import Block, ModelShape, itemsize

BACKWARD_LOSS_NBYTES = 12
"""Per logit at the worst moment of the loss's backward: log-softmax's output, its gradient and that of its input, each
in float32. `cross_entropy` saves nothing else."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of one layer for one micro-batch.

    Attributes:
        kept: from its forward to its backward.
        inputs: of them, the layer's own input.
        recomputed: made again in its backward, which then holds them on top of `kept`.
        working: temporaries of its backward: gradients of the widest tensors.
    """

    kept: int
    inputs: int
    recomputed: int
    working: int


def layer_activations(block: Block, job: Job) -> LayerActivations:
    """What one layer needs."""
    width = itemsize(job.compute_dtype)
    whole = _saved_per_token(block, job, width)
    working = width * ((3 if block.gated else 2) * block.active_intermediate + 2 * block.hidden)
    tokens = job.tokens
    inputs = width * block.hidden * tokens
    if job.checkpointing == "none":
        return LayerActivations(whole * tokens, inputs, 0, working * tokens)
    if job.checkpointing == "full":
        return LayerActivations(inputs, inputs, whole * tokens, working * tokens)
    kept = min(_selected_per_token(block, width), whole)
    return LayerActivations(kept * tokens, inputs, (whole - kept) * tokens, working * tokens)


def page_nbytes(block: Block, job: Job) -> int:
    """Bytes of one layer that are in host memory between its forward and its backward, if any are.

    What selective checkpointing keeps besides the input is its own, not autograd's, and stays on the device.
    """
    layer = layer_activations(block, job)
    return layer.inputs if job.checkpointing == "selective" else layer.kept


def _saved_per_token(block: Block, job: Job, width: int) -> int:
    queries, keys = block.heads * block.head_dim, block.kv_heads * block.head_dim
    trains_norms = job.method == "full"
    if not block.rms or job.compile:
        norm = 2 * width * block.hidden
    else:
        own = max(4, width) + (width if trains_norms else 0)
        norm = (own + width) * block.hidden
    attention = width * (2 * queries + 2 * keys)
    if job.attention == "eager":
        copies = 4 if width == 4 else 4 + width
        attention += copies * block.heads * job.seq_len
        attention += width * 2 * (queries - keys)  # keys and values are repeated for every head
    if block.cross_attention:
        attention *= 2
    tensors = 4 if block.gated else 2
    if job.compile:
        tensors -= 1
    feed_forward = tensors * width * block.active_intermediate
    if block.experts:
        feed_forward += 2 * width * block.experts_per_token * block.hidden
    return block.norms * norm + attention + feed_forward


def _selected_per_token(block: Block, width: int) -> int:
    """The input, every second matrix product and attention's output, which is torchtitan's selective checkpointing.

    Of q, k, v, o, gate, up, down those are q, v, gate and down (torchtitan's `parallelize_llama.py` of 2024-12).
    """
    queries, keys = block.heads * block.head_dim, block.kv_heads * block.head_dim
    return width * (2 * block.hidden + 2 * queries + keys + block.active_intermediate)


def logits_nbytes(model: ModelShape, job: Job) -> tuple[int, int]:
    """Bytes of the logits and what the loss makes of them: (at the end of forward, at the worst in backward).

    Forward: the logits in the compute dtype and the float32 copy that Transformers' loss makes, and log-softmax's
    output. A fused loss (Liger and others) holds one chunk of a few per cent of them, which is left out.
    """
    if not model.vocab or job.loss == "fused":
        return 0, 0
    width = itemsize(job.compute_dtype)
    elements = job.tokens * model.vocab
    copy = 4 if width < 4 else 0
    # Transformers hands the logits back to the caller, so they live on in the output while backward runs.
    return elements * (width + copy + 4), elements * (width + BACKWARD_LOSS_NBYTES)

"""The memory and the work of a language model's loss.

A loss on all logits at once needs memory at three stages of a step:

    logits          the head's output in the compute dtype. The loss casts it to float32, and frees this copy afterwards
    log-softmax     float32, kept for backward
    backward        the gradients of log-softmax's output and of its input, in float32, in addition to the kept tensors

Transformers casts to float32 inside the loss, and shifts the labels instead of the logits (`loss/loss_utils.py`). With
b bytes per value in the compute dtype, forward needs at most b + 8 bytes per logit, and backward needs 12. Autograd
does not save the logits themselves, so they are freed before backward unless the training loop keeps the model's
`outputs` until backward ends. Trainer does not keep them. In float32 nothing is cast, so forward needs one copy less.
If a loss does not cast, autocast does. Without autocast, torch's own `cross_entropy` (`plain`) computes all these in
the dtype of the logits.

The fused loss is the engine's own (`wrap/chunked_loss`). It processes the tokens in chunks and saves nothing for
backward, so backward computes the logits again. This adds a fourth matrix product with the head's weight to the usual
three. A chunk of c tokens with a vocabulary of V entries takes c V (b + 8) bytes in forward. In backward it takes 12 c
V bytes, because the gradient of the previous chunk is still in memory. If the head's weight of width H is trained, its
gradient takes another 4 V H bytes.
"""

from dataclasses import dataclass

from fullshard.core.dtypes import AUTOCAST, itemsize
from fullshard.core.sizes import format_nbytes
from fullshard.plan.activations import norm_nbytes
from fullshard.plan.job import Job
from fullshard.plan.shapes import ModelShape

BACKWARD_LOSS_NBYTES = 12
"""Bytes per logit at the peak of the loss's backward: log-softmax's output, its gradient and its input's gradient, each
in float32. `cross_entropy` saves nothing else."""


def _softmax_width(job: Job) -> int:
    """Return the bytes of a value of log-softmax."""
    return itemsize(job.compute_dtype) if job.loss == "plain" and job.precision not in AUTOCAST else 4


def softmax_passes(words: int) -> tuple[int, int]:
    """Return how often log-softmax reads or writes each of a row's float32 logits, in forward and in backward.

    PyTorch's kernel reads a row for its maximum, for the sum and for the result, unless the row fits in 48 KiB of
    shared memory. Backward reads the gradients for their sum, and then both operands (`cunn_SoftMaxForward` and
    `cunn_SoftMaxBackward` in aten/src/ATen/native/cuda/SoftMax.cu).
    """
    return (4, 4) if 4 * words > 48 * 1024 else (2, 3)


@dataclass(frozen=True, slots=True)
class LogitsNbytes:
    """The memory that the logits and the loss need at different stages of a step, in bytes."""

    forward: int  # the peak in forward
    loss: int  # the peak in the loss's backward
    head: int  # bytes when the gradient of the logits has been freed and the gradient of the head's weight is in memory


def logits_nbytes(model: ModelShape, job: Job) -> LogitsNbytes:
    """Return the bytes that the logits and the loss of a micro-batch need."""
    if not model.vocab:
        return LogitsNbytes(0, 0, 0)
    if job.loss == "fused":
        return _chunk_nbytes(model, job)
    elements, width = job.tokens * model.vocab, itemsize(job.compute_dtype)
    held = held_width(job)
    capped = width if model.capped_logits else 0  # tanh's output
    if job.loss == "kernel":  # the gradient is as large as the logits, which are kept
        return LogitsNbytes(*(elements * each for each in (width + capped, 2 * width + capped, held + capped)))
    softmax = _softmax_width(job)
    forward, backward = width + softmax * (1 + (width < softmax)), 3 * softmax
    return LogitsNbytes(*(elements * (each + capped) for each in (forward, held + backward, held)))


def _chunk_nbytes(model: ModelShape, job: Job) -> LogitsNbytes:
    width, words = itemsize(job.compute_dtype), _words(model, job)
    chunk, weight = job.chunk_tokens * words, words * model.hidden if _is_head_trained(model) else 0
    cast = width if width < 4 else 0
    softmax = chunk * (cast + 8)  # the logits, in float32 too, and log-softmax
    backward = chunk * 12 if job.chunk_tokens < job.tokens else softmax
    product = chunk * width + weight * cast  # the chunk's part of the weight's gradient, before it is added
    own = 4 * weight + job.tokens * model.hidden * width
    return LogitsNbytes(softmax, own + max(backward, product), 0)


def kept_beside_nbytes(model: ModelShape, job: Job) -> int:
    """Return the bytes that the last norm and the head keep for backward, which are their inputs.

    A compiler fuses the norms of layers, but not the last one, which belongs to the root.
    """
    if not model.vocab or not model.blocks:
        return 0
    width = itemsize(job.compute_dtype)
    each = norm_nbytes(model.blocks[-1], job, width, fused=False)
    each += width * (job.loss == "fused" or _is_head_trained(model))
    return each * model.hidden * job.tokens


def kept_logits_nbytes(model: ModelShape, job: Job) -> int:
    """Return the bytes of the logits that a loop keeps until the next forward."""
    return job.tokens * model.vocab * held_width(job) if job.loss != "fused" else 0


def cached_nbytes(model: ModelShape, job: Job) -> int:
    """Return the bytes of a freed block in the compute dtype, in which no float32 tensor of the loss fits.

    After the logits have been cast, the allocator keeps their block (`FRAGMENTATION` in `plan/memory`). If the device
    is full, it gives the block back.
    """
    width = itemsize(job.compute_dtype)
    is_cast = job.loss in ("eager", "plain") and width < _softmax_width(job) and held_width(job) != width
    return job.tokens * model.vocab * width if is_cast else 0


def _words(model: ModelShape, job: Job) -> int:
    """Return the number of vocabulary entries for which one tensor-parallel rank computes logits."""
    return -(-model.vocab // job.tp)


def _is_head_trained(model: ModelShape) -> bool:
    role = "embedding" if model.tied else "head"
    return any(p.trainable for p in model.root.parameters if p.role == role) or any(
        p.trainable for unit in model.units for p in unit.parameters if p.role == role
    )


def recomputed_flops(model: ModelShape, job: Job) -> float:
    """Return the FLOP that the fused loss spends on recomputing the logits in the backward pass of one micro-batch."""
    return 2.0 * _words(model, job) * model.hidden * job.tokens if job.loss == "fused" else 0.0


def moved_nbytes(model: ModelShape, job: Job) -> float:
    """Return the bytes that the loss of one micro-batch reads and writes, not counting matrix products."""
    width = itemsize(job.compute_dtype)
    if job.loss == "kernel":  # it reads twice and writes once
        return 3.0 * width * model.vocab * job.tokens
    if job.loss in ("eager", "plain"):
        # Casts and their gradients; log-softmax, its backward, and zeros for the gradient of picking the targets.
        softmax = _softmax_width(job)
        each = (2 * (width + softmax) if width < softmax else 0) + softmax * (sum(softmax_passes(model.vocab)) + 1)
        return float(each * model.vocab * job.tokens)
    words = _words(model, job)
    casts = 3 * (width + 4) if width < 4 else 0
    added = 8 + width if width < 4 else 0  # the summand is computed first; in float32 the product adds directly
    chunks = -(-job.tokens // job.chunk_tokens)
    of_weight = words * model.hidden * (8 + width + chunks * added if added else 4) if _is_head_trained(model) else 0
    passes = 2 * softmax_passes(words)[0] + 4  # forward; and backward, which exponentiates and multiplies in place
    return float((casts + 4 * passes) * words * job.tokens + of_weight)


def held_width(job: Job) -> int:
    """Return the bytes per logit of outputs that a loop keeps. An Accelerator may have cast them to float32."""
    if not job.keeps_outputs:
        return 0
    return 4 if job.precision in AUTOCAST else itemsize(job.compute_dtype)


def loss_note(model: ModelShape, job: Job) -> str:
    """Return a note that states how the loss is computed and how much memory it takes, or an empty string."""
    if not model.vocab:
        return ""
    most = max(logits_nbytes(model, job).forward, logits_nbytes(model, job).loss)
    worst = f"{most / (job.tokens * model.vocab):.0f} bytes per logit, {format_nbytes(most)} at the peak"
    if job.loss == "fused":
        return (
            f"the loss is computed {job.chunk_tokens} tokens at a time, as with use_chunked_loss: "
            f"{format_nbytes(most)} at the peak, and the head's product is computed again"
        )
    if job.loss == "kernel":
        return f"the loss is one kernel on all logits in {job.compute_dtype}, like flash-attn's and Liger's: {worst}"
    if job.loss == "plain":
        dtype = "float32" if _softmax_width(job) == 4 else job.compute_dtype
        return f"the loss is torch's cross_entropy on all logits, in {dtype}: {worst}"
    kept = "the loop keeps its outputs"
    if not job.keeps_outputs:
        kept = "a loop that keeps outputs until backward ends, unlike Trainer, needs more (--keeps-outputs)"
    return (
        f"the loss is Transformers' own, which casts all logits to float32: {worst}; {kept}. --loss fused uses chunks"
    )

"""What a language model's loss allocates, for each logit, in a step as it is run: by version of Transformers.

    logits          the head's output, in the compute dtype; cast to float32 for the loss, which is freed after it
    log-softmax     float32, kept for backward
    backward        the gradient of log-softmax's output and that of its input, float32, beside what was kept

| Transformers | its loss of a causal language model | worst of forward, b = bytes of the compute dtype |
|---|---|---|
| up to 4.45 | the model returns float32 logits, and a copy without the last token goes into the loss | 12 |
| 4.46 to 4.48 | float32 inside the loss, and that copy | b + 12 |
| from 4.49 | float32 inside the loss; labels are moved instead of logits | b + 8 |

In backward it is 12 in all of them (`loss/loss_utils.py`, and `models/llama` before 4.46). The logits themselves are in
no graph: they are gone before backward, unless the loop keeps `outputs` until it is over. Trainer does not.
In float32 nothing is cast, so there is one copy less in forward. A loss without a cast of its own (T5's) is cast by
autocast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from fullshard.core.dtypes import itemsize
from fullshard.core.sizes import format_nbytes
from fullshard.plan.job import Job
from fullshard.plan.shapes import ModelShape

BACKWARD_LOSS_NBYTES = 12
"""Per logit at the worst moment of the loss's backward: log-softmax's output, its gradient and that of its input, each
in float32. `cross_entropy` saves nothing else."""

_MOVED_LABELS, _OWN_LOSS = (4, 49), (4, 46)


@dataclass(frozen=True, slots=True)
class LogitsNbytes:
    """Bytes of the logits and of what the loss makes of them.

    Attributes:
        forward: at the worst moment of forward.
        loss: at the worst moment of the loss's backward.
        head: when the gradient of the head's weight is there and that of the logits is not any more.
    """

    forward: int
    loss: int
    head: int


def logits_nbytes(model: ModelShape, job: Job) -> LogitsNbytes:
    """What a micro-batch needs. A fused loss (Liger and others) holds one chunk, a few per cent, which is left out."""
    if not model.vocab or job.loss == "fused":
        return LogitsNbytes(0, 0, 0)
    elements, width = job.tokens * model.vocab, itemsize(job.compute_dtype)
    held = held_width(job)
    capped = width if model.capped_logits else 0  # what tanh has made
    if job.loss == "kernel":  # a gradient as large as the logits, which are what is kept
        return LogitsNbytes(*(elements * each for each in (width + capped, 2 * width + capped, held + capped)))
    forward = _forward_width(width, _transformers()) + capped
    return LogitsNbytes(
        elements * forward, elements * (held + BACKWARD_LOSS_NBYTES + capped), elements * (held + capped)
    )


def held_width(job: Job) -> int:
    """Bytes per logit of the outputs that a loop keeps, in float32 where an Accelerator casts them."""
    if not job.keeps_outputs:
        return 0
    return 4 if job.precision in ("bf16", "fp16") else itemsize(job.compute_dtype)


def _forward_width(width: int, release: tuple[int, ...]) -> int:
    if release < _OWN_LOSS:
        return 12
    copy = 4 if width < 4 else 0
    return width + copy + 4 + (0 if release >= _MOVED_LABELS else 4)


@cache
def _transformers() -> tuple[int, ...]:
    """The installed version's first two numbers, or, where there is none, those of a new one. Imports nothing."""
    try:
        found = re.findall(r"\d+", version("transformers"))
    except PackageNotFoundError:
        return (5, 0)
    return tuple(map(int, found[:2]))


def loss_note(model: ModelShape, job: Job) -> str:
    """Which loss was planned and why, in a line; empty where the model has no vocabulary."""
    if not model.vocab:
        return ""
    most = max(logits_nbytes(model, job).forward, logits_nbytes(model, job).loss)
    each, elements = most / (job.tokens * model.vocab), job.tokens * model.vocab
    if job.loss == "fused":
        return "the loss is computed in chunks, as use_chunked_loss and Liger's fused linear loss do: no whole logits"
    if job.loss == "kernel":
        return (
            f"the loss is one kernel on whole logits in {job.compute_dtype}, as flash-attn's and Liger's cross entropy "
            f"are: {each:.0f} bytes per logit, {format_nbytes(most)}"
        )
    release = ".".join(map(str, _transformers()))
    kept = (
        f"{held_width(job)} of them because the loop keeps its outputs"
        if job.keeps_outputs
        else f"a loop that keeps outputs until backward is over, as Trainer does not, holds "
        f"{format_nbytes(elements * held_width(job.model_copy(update={'keeps_outputs': True})))} more (--keeps-outputs)"
    )
    return (
        f"the loss is Transformers' own, of {release}, which makes float32 of whole logits: {each:.0f} bytes per logit "
        f"at the worst, {format_nbytes(most)}; {kept}. --loss fused: in chunks, as use_chunked_loss does"
    )

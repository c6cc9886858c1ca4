"""Count the bytes per token that a transformer layer saves for backward, and those of its temporaries.

b is the bytes of an element in the compute dtype. H, I, q and kv are the widths of the residual stream, the
feed-forward part, the queries and the keys (heads times head size). In a layer as Transformers implements it, autograd
saves these tensors:

| tensor | bytes per token | why |
|---|---|---|
| each norm's input | 4 H | RMS norms compute in float32: `pow` and `mul` save that copy; LayerNorm: b H |
| an RMS norm's output before its weight | b H, Gemma's 4 H | for the weight's gradient; not if the weight is frozen |
| the inputs of attention and the feed-forward part | b H each | the input of their projections |
| q, k, v after rotation, and attention's output | b (2 q + 2 kv) | attention's backward, the projection after it |
| latents of q, k, v, and what v is a slice of | norms', b (latents + kv) | DeepSeek: norms, projections, slices |
| the projection of which v is a slice | b (q + kv) | a slice keeps all of it; `eager` makes copies instead |
| written out: scores, keys per head | `_scores` | softmax, its copy for the product, dropout's mask |
| the same where `sdpa` has no kernel, in float32 | 4 (4 q) + `_scores` | `plan/attention` |
| a mask that `sdpa` reads, keys and values per head | b S + b (2 q) | made from the window, in the compute dtype |
| gated feed-forward | 4 b I | gate (SiLU), its activation and up (product), the product (down projection) |
| plain feed-forward | 2 b I | before and after the activation |
| an activation of several operations | `KEPT_BY_ACTIVATION` | each operation saves its own operands |
| mixture of experts | the same for each of k experts, + 2 b k H | gathered tokens and weighted outputs |
| dropout | b H each on a CPU, otherwise H | its mask |
| frozen projections' inputs | none, except attention's output | only adapters need them for a weight's gradient |
| adapters' inputs, of total width A | b each once; 4 A if only adapters are float32 | PEFT casts for each adapter |
| dropout of those inputs | A (b + 1), on a CPU 2 b A | a copy and its mask for each adapter |
| between an adapter's factors | b times its rank | the second factor's input |
| weights of experts with adapters | b per element, for any number of tokens | forward uses a changed copy of them |

`plan/axes` has what a layer holds in addition if it shares sequences or experts with other ranks. In a tensor-parallel
group, each rank has its share of the widths within attention and the feed-forward part. Norms,
dropout of sums, the layer's input and the inputs of projections have their full width on each rank.

With `torch.compile`, norms and activations are fused, and PyTorch's min-cut partitioner recomputes cheap operations.
The norms' float32 copies and the activation's output are then not kept. The tests compare these numbers with the
tensors that a real forward saves, for every family and activation (`tests/plan/test_plan_activations.py`).
"""

from dataclasses import dataclass

from fullshard.core.dtypes import itemsize
from fullshard.plan.attention import what_runs
from fullshard.plan.axes import exchanging_nbytes, moved_nbytes, saved_twice
from fullshard.plan.experts import dispatched_nbytes
from fullshard.plan.hardware import Device
from fullshard.plan.job import Job
from fullshard.plan.shapes import Adapters, Block

_NAMES_BY_KEPT = {
    0: "linear relu sigmoid tanh",
    1: "gelu gelu_pytorch_tanh hardswish laplace leaky_relu mish prelu relu2 relu6 silu sqrtsoftplus swish",
    2: "gelu_10 quick_gelu",
    3: "gelu_python",
    4: "gelu_accurate gelu_new gelu_python_tanh",
    7: "gelu_fast",
}
KEPT_BY_ACTIVATION = {name: kept for kept, names in _NAMES_BY_KEPT.items() for name in names.split()}
"""Number of tensors that autograd saves in each of Transformers' activations. The output is not counted, because the
next operation saves it.

An activation with a single kernel keeps its input or its output. `gelu_new` and others consist of several operations,
which keep the input, tanh's output, and the two factors of the last product."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """The memory that one layer needs for one micro-batch, in bytes.

    `weighting` counts three tensors as wide as the outputs of all experts, for the gradients of their weighted sum, of
    them and of their weights.
    """

    kept: int  # allocated from the layer's forward to its backward
    inputs: int  # the part of `kept` that is the layer's own input
    recomputed: int  # tensors that backward recomputes and holds in addition to `kept`
    working: int  # temporaries in backward, which are the gradients of the widest tensors
    weighting: int  # temporaries when backward begins, before there is a gradient of a weight
    in_product: int  # temporaries while a large weight's gradient is computed: one of the widest tensors is freed


def layer_activations(block: Block, job: Job, device: Device) -> LayerActivations:
    """Return the bytes that one layer saves for backward, and its temporaries, for one micro-batch."""
    width = itemsize(job.compute_dtype)
    tokens, widest = job.tokens, width * block.active_intermediate
    between = _saved_between(block, job, width, device) * job.tokens
    whole = _saved_within(block, job, width, device) * tokens + between
    whole += 0 if block.adapters is None else width * block.adapters.folded
    feeding = ((3 if block.gated else 2) * widest + 2 * width * block.hidden) * tokens
    if job.ep > 1:  # the gradients of what experts return, before and after they are sent
        feeding += round(width * block.experts_per_token * block.hidden * (1 + block.load)) * tokens
    within = max(_working_on_scores(block, job, device), exchanging_nbytes(block, job))
    # By then, the tensors of the feed-forward part have been freed.
    working = max(feeding, (within - width * _feed_forward_tensors(block, job) * block.active_intermediate) * tokens)
    weighting = 0
    if block.experts and job.experts == "grouped":
        each = max(width, 4) if block.float32_router else width
        weighting = (round(3 * each * block.experts_per_token * block.load) + width) * block.hidden * tokens
    inputs, temporaries = width * block.hidden * tokens, (working, weighting, feeding - widest * tokens)
    if job.checkpointing == "none":
        return LayerActivations(whole, inputs, 0, *temporaries)
    if job.checkpointing == "full":
        return LayerActivations(inputs, inputs, whole, *temporaries)
    kept = min(inputs + _selected_per_token(block, width) * tokens, whole)
    return LayerActivations(kept, inputs, whole - kept, *temporaries)


def page_nbytes(block: Block, job: Job, device: Device) -> int:
    """Return the bytes of one layer that are on the host between the layer's forward and its backward."""
    layer = layer_activations(block, job, device)
    # What selective checkpointing keeps in addition is not saved through autograd, so it stays on the device.
    return layer.inputs if job.checkpointing == "selective" else layer.kept


def between_products_nbytes(block: Block, job: Job, device: Device) -> tuple[int, int]:
    """Return the bytes that the operations between a layer's products read and write, in forward and in backward.

    If each norm and each activation is one kernel, or if a compiler fuses them, each saved tensor is written and read
    once in forward. Backward reads it, and writes and reads its gradient. Without a compiler, Transformers' Llama
    computes RMS norms and rotary embeddings in several operations, each of which reads its operands from memory and
    writes its result. The table shows the bytes for forward. Backward moves twice as many:

    | operation | bytes per token, where b is the bytes of an element |
    |---|---|
    | RMS norm: cast, square, mean, scale, cast, weight | H (24 + 6 b); in float32 28 H |
    | norms of queries and keys | the same for q + kv |
    | experts | `plan/experts` |
    | rotation: two products, a negation, joining halves, a sum | 10 b (q + kv) |
    | gated activation and its product | 5 b I |
    | additions to the residual stream | 3 b H for each part |
    | adapters | b times the width of the input + 6 b times that of the output |
    | scores that are written to memory | `passes_over_scores` |

    An adapter's products are so narrow that reading their wide operands and writing their results takes longer than
    computing. Its output is scaled and added, which a compiler fuses: 2 passes over outputs instead of 6. Backward
    reads the output's gradient twice and scales it, reads the input, and adds the input's gradient: 4 passes over
    outputs and 5 over inputs, or 3 and 3 if the single operations are fused.
    """
    layer, width = layer_activations(block, job, device), itemsize(job.compute_dtype)
    saved = layer.kept + layer.recomputed
    moved = [nbytes * job.tokens for nbytes in moved_nbytes(block, job)]
    if block.experts:
        saved -= round((1 + block.load) * width * block.experts_per_token * block.hidden) * job.tokens
        moved = [a + b * job.tokens for a, b in zip(moved, dispatched_nbytes(block, job), strict=True)]
    if block.adapters is not None:
        read, written = (width * each * job.tokens for each in (block.adapters.read, block.adapters.written))
        moved[0] += read + (2 if job.compile else 6) * written
        moved[1] += 3 * (read + written) if job.compile else 5 * read + 4 * written
    if job.compile:
        return 2 * saved + moved[0], 3 * saved + moved[1]
    saved -= _scores(block, job, device) * job.tokens
    scores = passes_over_scores(block, job, device)
    forward, backward = (nbytes * job.tokens + more for nbytes, more in zip(scores, moved, strict=True))
    if block.norm == "layer":
        return 2 * saved + forward, 3 * saved + backward
    between = block.hidden * (block.norms * (24 + 6 * width if width < 4 else 28) + 6 * width)
    if block.head_norms:
        between += (24 + 6 * width if width < 4 else 28) * (block.heads + block.kv_heads) * block.head_dim
    within = 10 * width * (block.heads + block.kv_heads) * block.head_dim
    within += (5 if block.gated else 2) * width * block.active_intermediate
    eager = between * job.tokens + within * job.tokens
    return max(2 * saved, eager) + forward, max(3 * saved, 2 * eager) + backward


def passes_over_scores(block: Block, job: Job, device: Device) -> tuple[int, int]:
    """Return the bytes that masking and softmax of attention scores read and write, in forward and in backward.

    The numbers are per token, and 0 if a kernel keeps the scores out of memory. A cap adds three passes, each of which
    reads and writes the scores, and dropout adds one. Transformers scales the scores before softmax, and casts them
    before and after it. PyTorch scales queries and keys, repeats keys and values, and in half precision makes a copy of
    the scores that is never read.
    """
    way, (softmax, width) = what_runs(block, job, device), _score_widths(block, job, device)
    each = 2 * (softmax + width) if softmax != width else 0
    copy = operands = 0
    if way == "eager":
        each += 2 * width
    elif way == "math":
        operands = 8 * (3 * block.heads + block.kv_heads) * block.head_dim
        copy = 6 if itemsize(job.compute_dtype) == 2 else 0
    capped, back = (6 * width, 7 * width) if block.capped_scores else (0, 0)
    if block.attention_dropout and softmax:
        each += 2 * width + 1
    scores = block.heads * job.seq_len
    forward, backward = each + capped + copy + 2 * width + 2 * softmax, each + back + 3 * softmax
    return forward * scores + operands, backward * scores + operands


def _saved_between(block: Block, job: Job, width: int, device: Device) -> int:
    """Return the bytes per token that norms and dropout save between attention and the feed-forward part."""
    saved = norm_nbytes(block, job, width, fused=job.compile) * block.norms * block.hidden
    if block.dropout:
        saved += 2 * (width if device.is_cpu else 1) * block.hidden
    return saved


def _saved_within(block: Block, job: Job, width: int, device: Device) -> int:
    """Return the bytes that attention and the feed-forward part save per token, including their inputs."""
    normed = block.latents
    if block.head_norms:
        normed += (block.heads + block.kv_heads) * block.head_dim
    attention = _attention(block, job, width, device)
    saved = norm_nbytes(block, job, width, fused=job.compile) * normed + 2 * width * block.hidden + attention
    saved += width * _feed_forward_tensors(block, job) * block.active_intermediate
    if block.experts:
        saved += round((1 + block.load) * width * block.experts_per_token * block.hidden)
    if block.latents:  # inputs of the projections; for keys and values they are slices of one tensor, which is kept
        saved += width * (block.latents + block.kv_heads * block.head_dim)
    if block.shared_intermediate:
        saved += width * block.hidden  # attention's output, which is multiplied by a gate
    if block.adapters is not None:
        saved += _adapters(block, block.adapters, job, width, device)
    return saved


def _adapters(block: Block, adapters: Adapters, job: Job, width: int, device: Device) -> int:
    """Return the bytes per token that adapters add to the frozen layer's bytes. PEFT casts the adapters' inputs."""
    own = itemsize(adapters.dtype) if job.precision == "no" else width
    kept = own * adapters.ranks
    if own == width and not adapters.dropout:
        kept += width * adapters.read_once
    else:
        kept += (own + (0 if not adapters.dropout else own if device.is_cpu else 1)) * adapters.read
    if block.experts:  # the experts' inputs are not counted separately
        return max(0, kept - width * adapters.read_once)
    return kept - width * (2 * block.hidden + block.intermediate)


def norm_nbytes(block: Block, job: Job, width: int, *, fused: bool) -> int:
    """Return the bytes that a norm saves for each element of its input. The next operation saves the output."""
    if block.norm == "layer" or fused:
        return width
    before_weight = 0 if job.method != "full" else 4 if block.norm == "rms-float32-weight" else width
    return max(4, width) + before_weight


def _attention(block: Block, job: Job, width: int, device: Device) -> int:
    """Return the bytes per token that attention saves: queries, keys, values, the output, and any scores."""
    queries, keys = block.heads * block.head_dim, block.kv_heads * block.head_dim
    value_dim = block.value_dim or block.head_dim
    way = what_runs(block, job, device)
    if way == "eager":
        return width * 2 * (queries + block.heads * value_dim) + _scores(block, job, device)
    if way == "math":
        return width * queries + 4 * 3 * queries + _scores(block, job, device)
    if way == "masked":
        return width * (
            2 * queries + 2 * block.heads * value_dim + job.seq_len + saved_twice(block, job, is_repeated=True)
        )
    saved = queries + keys + (block.heads + block.kv_heads) * value_dim + saved_twice(block, job, is_repeated=False)
    if block.sliced_values:
        # On a CPU the output has the layout of the rotated queries, so the next projection reads a copy.
        saved += queries + keys + (queries if device.is_cpu else 0)
    return width * saved


def _working_on_scores(block: Block, job: Job, device: Device) -> int:
    """Return the bytes per token while backward has the gradients of softmax's output and input, or 0."""
    softmax, copy = _score_widths(block, job, device)
    return (2 * softmax - (copy if copy != softmax or block.attention_dropout else 0)) * block.heads * job.seq_len


def _score_widths(block: Block, job: Job, device: Device) -> tuple[int, int]:
    """Return the bytes of a score in softmax's output and in the product with values, or 0 if none is stored."""
    way, width = what_runs(block, job, device), itemsize(job.compute_dtype)
    if way == "eager":
        return max(4, width) if block.float32_scores else width, width
    return (4, 4) if way == "math" else (0, 0)


def _scores(block: Block, job: Job, device: Device) -> int:
    """Return the bytes of a query's scores in all heads: softmax's output, the operand for the values, and masks."""
    softmax, width = _score_widths(block, job, device)
    each = softmax
    if block.attention_dropout or softmax != width:
        each += width
    if block.attention_dropout and softmax:
        each += width if device.is_cpu else 1
    if block.capped_scores:
        each += width
    return each * block.heads * job.seq_len


def _feed_forward_tensors(block: Block, job: Job) -> int:
    """Return the number of saved tensors that are as wide as the feed-forward part."""
    if job.compile:
        return 3 if block.gated else 1
    kept = KEPT_BY_ACTIVATION.get(block.activation, 1)
    if not block.gated:
        return kept + 1
    return max(kept, 1 if block.fused_gate else 0) + 3


def _selected_per_token(block: Block, width: int) -> int:
    """Return the bytes per token that torchtitan's selective checkpointing saves in a layer.

    These are the input, the outputs of every second matrix product, and attention's output. Of the products q, k, v, o,
    gate, up and down, it keeps q, v, gate and down (torchtitan's `parallelize_llama.py` of 2024-12).
    """
    queries, keys = block.heads * block.head_dim, block.kv_heads * block.head_dim
    return width * (block.hidden + 2 * queries + keys + block.active_intermediate)

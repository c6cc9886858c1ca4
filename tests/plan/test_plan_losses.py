"""What a loss allocates, as it is really run on a CPU, against what the planner takes it for.

pytest tests/plan/test_plan_losses.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard import Accelerator
from fullshard.api.virtual import costs
from fullshard.core.errors import ConfigError
from fullshard.core.events import EventKind
from fullshard.features.chunked_loss import chunked_cross_entropy
from fullshard.plan.evaluate import evaluate, notes_of
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.losses import (
    BACKWARD_LOSS_NBYTES,
    LogitsNbytes,
    cached_nbytes,
    kept_beside_nbytes,
    logits_nbytes,
    moved_nbytes,
    recomputed_flops,
    softmax_passes,
)
from fullshard.plan.methods import apply_method
from fullshard.plan.shapes import ModelShape
from fullshard.plan.tiles import tiled

VOCAB, TOKENS = 16000, 256
CONFIG: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCAB,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def peak(work: Callable[[], object]) -> float:
    """Most live bytes of what `work` allocates, per logit."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    live = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most / (VOCAB * TOKENS)


def built(kind: str, dtype: torch.dtype) -> Any:
    config = AutoConfig.for_model(kind, **CONFIG)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


def step(model: nn.Module, *, keeps: bool) -> None:
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    if keeps:
        outputs = model(input_ids=tokens, labels=tokens)
        outputs.loss.backward()
    else:
        model(input_ids=tokens, labels=tokens).loss.backward()


def planned(kind: str, **settings: Any) -> float:
    shape, _ = from_config({**CONFIG, "model_type": kind}, where="x")
    job = Job.of({"micro_batch": 1, "seq_len": TOKENS, **settings})
    nbytes = logits_nbytes(shape, job)
    return max(nbytes.forward, nbytes.loss) / (VOCAB * TOKENS)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("kind", "precision", "dtype"),
    [
        pytest.param("llama", "no", "float32", marks=pytest.mark.full),
        pytest.param("llama", "no", "bfloat16", marks=pytest.mark.full),
        ("llama", "bf16", "float32"),
        pytest.param("gemma2", "no", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_a_step_allocates_what_is_planned(kind: str, precision: str, dtype: str, keeps: bool) -> None:
    """Of installed Transformers, bf16 by an Accelerator, which hands float32 back. The rest is small."""
    model = built(kind, getattr(torch, dtype))
    if precision == "bf16":
        model = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    step(model, keeps=keeps)  # gradients are there
    found = peak(lambda: step(model, keeps=keeps))
    expected = planned(kind, precision=precision, base_dtype=dtype, keeps_outputs=keeps)
    print(f"{kind}, {precision}, {dtype}, keeps {keeps}: planned {expected}, found {found:.2f}")
    assert found == pytest.approx(expected, abs=0.6)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_last_norm_and_the_head_keep_what_is_planned(kind: str, method: str) -> None:
    """A frozen head keeps nothing, and the norm's own input is needed for the gradient of what is below."""
    model = built(kind, torch.bfloat16)
    if method == "lora":
        model.requires_grad_(False)
    inner = model.transformer if kind == "gpt2" else model.model
    last = inner.ln_f if kind == "gpt2" else inner.norm
    width = model.config.hidden_size
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (TOKENS, width):
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    hidden = torch.zeros(1, TOKENS, width, dtype=torch.bfloat16, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model.lm_head(last(hidden))
    assert logits.requires_grad
    sizes = {"n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": TOKENS} if kind == "gpt2" else {}
    shape, _ = from_config({**CONFIG, **sizes, "model_type": kind}, where="x")
    job = Job.of({"seq_len": TOKENS, "precision": "no", "base_dtype": "bfloat16", "method": method})
    assert sum(saved.values()) == kept_beside_nbytes(apply_method(shape, job), job)


def test_kept_outputs_stay_and_a_cast_leaves_a_block() -> None:
    """Logits that the loop keeps are there while the layers' backward runs. Reserved memory has the freed block."""
    model, cluster = load_model("Llama-3.2-1B")[0], parse_cluster("1xA100")
    lora = {"method": "lora", "checkpointing": "full"}
    plans = [evaluate(model, Job.of({**lora, "keeps_outputs": keeps}), cluster) for keeps in (False, True)]
    logits = 2048 * model.vocab
    for plan, each in zip(plans, (0, 4), strict=True):
        memory, framework = plan.memory, plan.memory.phases["load"]["framework"]
        layers = [m for m in memory.timeline if m.event.kind is EventKind.BACKWARD_BEGIN and m.event.unit]
        assert {m.nbytes["logits"] for m in layers} == {each * logits}
        at_loss = max(m.total for m in memory.timeline if m.nbytes.get("logits", 0) >= 12 * logits)
        assert memory.reserved == max(memory.needed, at_loss + 2 * logits) - framework
    assert plans[1].memory.reserved + framework == at_loss + 2 * logits > plans[1].memory.needed
    full = Job.of({"seq_len": 4096, "micro_batch": 8, "checkpointing": "full"})  # the device is nearly full
    plan = evaluate(load_model("Llama-3.1-8B")[0], full, parse_cluster("8xH100"))
    assert plan.fits and plan.memory.reserved + framework <= plan.cluster.device.memory
    assert cached_nbytes(model, Job.of({"precision": "no", "base_dtype": "bfloat16", "keeps_outputs": True})) == 0
    assert cached_nbytes(model, Job.of({"loss": "kernel"})) == cached_nbytes(model, Job.of({"precision": "fp32"})) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_holds_what_is_planned(dtype: str) -> None:
    """Transformers' loss in short: float32 inside it, and labels are moved instead of logits."""
    hidden = torch.zeros(TOKENS, 16, dtype=getattr(torch, dtype))
    head = torch.zeros(16, VOCAB, dtype=hidden.dtype, requires_grad=True)

    def forward() -> torch.Tensor:
        logits = hidden @ head
        return nn.functional.cross_entropy(logits.float(), torch.zeros(TOKENS, dtype=torch.long))

    shape, _ = from_config({**CONFIG, "model_type": "llama"}, where="x")
    job = Job.of({"seq_len": TOKENS, "precision": "no", "base_dtype": dtype})
    assert peak(forward) == pytest.approx(logits_nbytes(shape, job).forward / (VOCAB * TOKENS), abs=0.3)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torchs_loss_stays_in_the_dtype_of_the_logits(dtype: str, keeps: bool) -> None:
    """If nothing casts it. Autocast does, so the loss is then planned like Transformers' own."""
    hidden = torch.zeros(TOKENS, 16, dtype=getattr(torch, dtype))
    head = torch.zeros(16, VOCAB, dtype=hidden.dtype, requires_grad=True)

    def run() -> None:
        logits = hidden @ head
        loss = nn.functional.cross_entropy(logits, torch.zeros(TOKENS, dtype=torch.long))
        if not keeps:
            del logits
        loss.backward()

    expected = planned("llama", precision="no", base_dtype=dtype, loss="plain", keeps_outputs=keeps)
    assert expected == hidden.itemsize * (4 if keeps else 3)
    assert peak(run) == pytest.approx(expected, abs=0.3)
    assert planned("llama", precision="bf16", loss="plain") == planned("llama", precision="bf16")
    shape, _ = from_config({**CONFIG, "model_type": "llama"}, where="x")
    jobs = [Job.of({"precision": "no", "base_dtype": "bfloat16", "loss": loss}) for loss in ("plain", "eager")]
    assert moved_nbytes(shape, jobs[0]) < 0.5 * moved_nbytes(shape, jobs[1])
    plan = evaluate(load_model("GPT-2")[0], jobs[0], parse_cluster("2xA100"))
    assert any("torch's cross_entropy on all logits, in bfloat16: 6 bytes" in note for note in notes_of(plan))


def test_the_loss_needs_what_the_formula_says() -> None:
    """The three float32 tensors of cross entropy's backward, counted by their sizes."""
    produced = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.numel() == 64 * 1000:
                produced.append(str(function))
            return out

    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    with Count():
        torch.nn.functional.cross_entropy(logits.float(), torch.zeros(64, dtype=torch.long)).backward()
    names = [name.split(".")[1] for name in produced if "clone" not in name and "detach" not in name]
    assert names == ["_to_copy", "_log_softmax", "nll_loss_backward", "_log_softmax_backward_data"]
    assert len(names[1:]) * 4 == BACKWARD_LOSS_NBYTES


PRODUCTS = (*flop_registry, torch.ops.aten.addmm_)
HIDDEN, CHUNK = 64, 64
"""Of a loss in chunks, of which there are four."""


def in_chunks(dtype: torch.dtype, *, is_trained: bool = True, device: str = "cpu") -> torch.Tensor:
    hidden = torch.zeros(TOKENS, HIDDEN, dtype=dtype, device=device, requires_grad=True)
    weight = torch.zeros(VOCAB, HIDDEN, dtype=dtype, device=device, requires_grad=is_trained)
    labels = torch.zeros(TOKENS, dtype=torch.long, device=device)
    return chunked_cross_entropy(hidden, weight, None, labels, tokens=CHUNK)


def planned_chunks(dtype: torch.dtype, *, is_trained: bool = True) -> tuple[ModelShape, Job]:
    shape, _ = from_config({**CONFIG, "hidden_size": HIDDEN, "model_type": "llama"}, where="x")
    shape = shape.map(lambda _, p: [dataclasses.replace(p, trainable=is_trained or p.role != "head")])
    settings = {"precision": "bf16" if dtype is torch.bfloat16 else "no", "seq_len": TOKENS}
    return shape, Job.of({**settings, "loss": "fused", "loss_chunk": CHUNK})


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_chunks_costs_what_is_planned(dtype: torch.dtype, is_trained: bool) -> None:
    """The engine's own: FLOP as torch counts them, exactly; bytes at once, and those that its operations move."""
    shape, job = planned_chunks(dtype, is_trained=is_trained)
    product = 2 * VOCAB * HIDDEN * TOKENS
    # What torch does not count in place.
    added = {torch.ops.aten.addmm_: lambda total, left, right, out_val: 2 * left.numel() * right.shape[-1]}
    for formula in added.values():
        formula._get_raw = True  # type: ignore[attr-defined]
    with FlopCounterMode(display=False, custom_mapping=added) as counter:
        in_chunks(dtype, is_trained=is_trained).backward()
    assert counter.get_total_flops() == product * (3 if is_trained else 2) + recomputed_flops(shape, job)

    loss = []
    planned = logits_nbytes(shape, job)
    forward = peak(lambda: loss.append(in_chunks(dtype, is_trained=is_trained))) * VOCAB * TOKENS
    weight = VOCAB * HIDDEN * dtype.itemsize
    assert forward - weight == pytest.approx(planned.forward, rel=0.05)
    backward = peak(lambda: loss[0].backward()) * VOCAB * TOKENS
    copies = 4 * VOCAB * HIDDEN if dtype is torch.bfloat16 else 0  # of a product, which some processors do without
    print(f"{dtype}, {is_trained}: planned {planned}, found {forward - weight:.0f}, {backward:.0f}, copies {copies}")
    assert 0.95 * planned.loss <= backward <= 1.05 * planned.loss + copies


SOFTMAX = (torch.ops.aten._log_softmax, torch.ops.aten._log_softmax_backward_data)


class Moved(TorchDispatchMode):
    """Bytes that operations on matrices read and write, products and what touches a few elements left out."""

    nbytes = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        kind = function.overloadpacket
        is_matrix = isinstance(out, torch.Tensor) and out.ndim == 2
        if is_matrix and kind not in PRODUCTS and kind is not torch.ops.aten.index_put_ and not costs.is_view(function):
            self.nbytes += costs._moved(function, args, kwargs or {}, out)  # which counts each operand once
            if kind in SOFTMAX:
                again = softmax_passes(VOCAB)[SOFTMAX.index(kind)] - (2, 3)[SOFTMAX.index(kind)]
                self.nbytes += again * out.numel() * out.itemsize
        return out


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_that_a_loss_in_chunks_moves(dtype: torch.dtype, is_trained: bool) -> None:
    shape, job = planned_chunks(dtype, is_trained=is_trained)
    with Moved() as moved:
        in_chunks(dtype, is_trained=is_trained).backward()
    of_arguments = (TOKENS + VOCAB) * HIDDEN * dtype.itemsize  # which are made here
    found = moved.nbytes - of_arguments
    print(f"{dtype}, {is_trained}: planned {moved_nbytes(shape, job):.0f}, found {found:.0f}")
    assert moved_nbytes(shape, job) == pytest.approx(found, rel=0.1)


def test_bytes_that_whole_logits_move() -> None:
    """Transformers' loss, with what rows that do not fit in shared memory are read more often."""
    shape, job = planned_chunks(torch.bfloat16, is_trained=True)
    job = job.model_copy(update={"loss": "eager"})
    logits, labels = torch.randn(TOKENS, VOCAB, dtype=torch.bfloat16, requires_grad=True), torch.zeros(TOKENS).long()
    with Moved() as moved:
        nn.functional.cross_entropy(logits.float(), labels).backward()
    assert moved_nbytes(shape, job) == (2 * 6 + 4 * 9) * VOCAB * TOKENS
    assert moved_nbytes(shape, job) == pytest.approx(moved.nbytes, rel=0.1)


def test_a_step_with_a_loss_in_chunks_takes_longer() -> None:
    """By its fourth product, and what is moved; and needs no whole logits."""
    shape, _ = load_model("Llama-3.1-8B")
    settings = {"seq_len": 8192, "checkpointing": "full"}
    cluster = parse_cluster("8xH100")
    whole, fused = (evaluate(shape, Job.of({**settings, "loss": loss}), cluster) for loss in ("kernel", "fused"))
    seconds = 2 * 128256 * 4096 * 8192 / (cluster.device.flops * cluster.device.efficiency)
    longer = fused.time.total - whole.time.total
    assert seconds < longer < 4 * seconds  # with every chunk's part added to the weight's gradient
    assert fused.time.model_flops == whole.time.model_flops
    assert fused.memory.needed < evaluate(shape, Job.of(settings), cluster).memory.needed


def test_a_chunk_of_a_whole_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss_chunk requires loss fused, but loss is eager"):
        Job.of({"loss_chunk": 512})


def test_logits_of_a_large_vocabulary() -> None:
    shape, _ = from_config({**CONFIG, "model_type": "llama", "vocab_size": 128256}, where="x")
    job = Job.of({"precision": "bf16", "micro_batch": 2, "seq_len": 8192})
    n = 2 * 8192 * 128256
    assert logits_nbytes(shape, job) == LogitsNbytes(10 * n, 12 * n, 0)
    assert logits_nbytes(shape, job.model_copy(update={"keeps_outputs": True})) == LogitsNbytes(10 * n, 16 * n, 4 * n)
    assert logits_nbytes(shape, job.model_copy(update={"loss": "kernel"})) == LogitsNbytes(2 * n, 4 * n, 0)
    chunk, weight = 512 * 128256, 128256 * 16
    fused = job.model_copy(update={"loss": "fused", "loss_chunk": 512})
    own = 4 * weight + 2 * 8192 * 16 * 2
    assert logits_nbytes(shape, fused) == LogitsNbytes(10 * chunk, own + 12 * chunk, 0)
    halves, two = tiled(shape, 2), fused.model_copy(update={"tp": 2})
    own = 2 * weight + 2 * 8192 * 16 * 2
    assert logits_nbytes(halves, two) == LogitsNbytes(5 * chunk, own + 6 * chunk, 0)
    assert recomputed_flops(halves, two) == recomputed_flops(shape, fused) / 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {},
            ("Transformers' own, which casts", "12 bytes per logit", "unlike Trainer", "--keeps-outputs"),
        ),
        ({"keeps_outputs": True}, ("16 bytes per logit", "keeps its outputs")),
        ({"loss": "kernel"}, ("one kernel", "4 bytes per logit")),
        ({"loss": "fused", "loss_chunk": 512}, ("512 tokens at a time", "product is computed again")),
    ],
)
def test_a_plan_says_which_loss_it_took(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    shape, _ = load_model("Llama-3.1-8B")
    [note] = [
        n for n in notes_of(evaluate(shape, Job.of(settings), parse_cluster("8xH100"))) if n.startswith("the loss")
    ]
    assert all(word in note for word in words), note

"""Activations on the host: training is bit for bit what it is without, and what is moved, when, is recorded.

On a CPU host and device are one; `FULLSHARD_OFFLOAD=rehearse` makes the host further memory, and everything else is as
on any other device. On an accelerator: `pytest tests/features/offload/test_offload_gpu.py`.

    pytest tests/features/offload/test_activation_offload.py            # the quick ones: -m "not full"
"""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullshard import Accelerator, FullyShardedDataParallelPlugin
from fullshard.config.switches import OFFLOAD
from fullshard.core.errors import ConfigError
from fullshard.core.events import Event, EventKind
from fullshard.features import (
    OffloadPolicy,
    describe,
    fully_shard,
    shard_model,
)
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.unit_selection import unit_modules
from fullshard.plan.activations import layer_activations, page_nbytes
from fullshard.plan.evaluate import changes_that_fit, evaluate
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.host import many_page_locked_nbytes
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from tests.activations import (
    BFLOAT16,
    DEPTH,
    HIDDEN_NBYTES,
    ON_HOST,
    STEPS,
    TOKENS,
    WIDTH,
    Case,
    Held,
    Model,
    batch,
    moves,
)
from tests.differential import compare, ddp, gradients, optimizer_state, parameters, torch_engine
from tests.distributed import run_ranks

pytestmark = pytest.mark.usefixtures("rehearsed")


def trained(case: Case, offload: OffloadPolicy | None) -> dict[str, dict[Any, torch.Tensor | None]]:
    model = case.model(offload)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    record: dict[str, dict[Any, torch.Tensor | None]] = {"losses": {}, "gradients": {}}
    for step in range(STEPS):
        record["losses"][step] = case.backward(model, step)
        record["gradients"] |= {f"{step}.{name}": value for name, value in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    record["parameters"], record["state"] = parameters(model), optimizer_state(model, optimizer)
    return record


def differences(cases: list[Case]) -> dict[str, float]:
    found = {}
    for case in cases:
        for kind, value in compare(trained(case, ON_HOST), trained(case, None)).items():
            found[f"{case}: {kind}"] = value
    return found


CASES = [
    Case(micro_batches=2),
    Case(BFLOAT16, "full"),
    Case(checkpointing="selective"),
    Case(checkpointing="reentrant"),
    Case(BFLOAT16, is_frozen=True, micro_batches=2, two_forwards=True, shards=True),
]
SLOW_CASES = [
    Case(
        policy,
        checkpointing,
        is_frozen,
        micro_batches=2,
        two_forwards=number % 2 == 0,
        strategy=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")[number % 3],
    )
    for number, (policy, checkpointing, is_frozen) in enumerate(
        itertools.product((None, BFLOAT16), ("", "full", "selective", "reentrant"), (False, True))
    )
]


def test_training_is_bitwise_the_same() -> None:
    for found in run_ranks(differences, 2, CASES):
        assert set(found.values()) == {0.0}, {key: value for key, value in found.items() if value}


@pytest.mark.full
@pytest.mark.parametrize("comm", ["", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_is_bitwise_the_same_everywhere(world_size: int, comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm:
        monkeypatch.setenv("FULLSHARD_COMM", comm)
    for found in run_ranks(differences, world_size, SLOW_CASES):
        assert set(found.values()) == {0.0}, {key: value for key, value in found.items() if value}


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["", "full"])
def test_compiled_units(checkpointing: str) -> None:
    """A graph saves its tensors like any other function."""
    for found in run_ranks(differences, 1, [Case(checkpointing=checkpointing, compiled=True)]):
        assert set(found.values()) == {0.0}, found
    [said] = run_ranks(moves, 1, Case(checkpointing=checkpointing, compiled=True))
    assert [line.split(": ")[0] for line in said if "to_host" in line] == [f"to_host {i}" for i in range(DEPTH - 1)], (
        said
    )


# -- other engines --------------------------------------------------------------------------------------------------


def language_model(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=61, n_embd=WIDTH, n_layer=4, n_head=4, n_positions=TOKENS)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
        return model
    options = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    llama: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=61, hidden_size=WIDTH, intermediate_size=2 * WIDTH, **options)
    )
    return llama


def fits(model: nn.Module, around: Callable[[], Any] = contextlib.nullcontext) -> dict[str, dict[Any, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    record: dict[str, dict[Any, Any]] = {"losses": {}}
    for step in range(STEPS):
        torch.manual_seed(step)
        ids = torch.randint(61, (1, TOKENS))
        with around():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        record["losses"][step] = loss.detach()
        record["gradients"] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return record | {"parameters": parameters(model)}


def against_others(family: str, checkpointing: str, by_itself: bool) -> dict[str, float]:
    def ours(offload: OffloadPolicy | None) -> dict[str, dict[Any, Any]]:
        model = language_model(family)
        units = unit_modules(model)
        if checkpointing and by_itself:
            options = {"use_reentrant": checkpointing == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
        elif checkpointing:
            checkpoint_modules(model, units, reentrant=checkpointing == "reentrant")
        return fits(shard_model(model, unit_modules=units, offload_policy=offload, event_sink=events.append))

    events: list[Event] = []
    found = ours(ON_HOST)
    moved = {event.unit for event in events if event.what == "activations"}
    assert len(moved) >= 2, moved
    plain = language_model(family)
    torchs = language_model(family)
    others = {
        "plain": ours(None),
        "ddp": fits(ddp(plain)),
        "torch": fits(torch_engine(torchs, unit_modules(torchs)), save_on_cpu),
    }
    return {f"{name}: {k}": v for name, other in others.items() for k, v in compare(found, other).items()}


@pytest.mark.full
@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("checkpointing", ["", "full", "reentrant"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_language_models_as_other_engines_train_them(family: str, checkpointing: str, by_itself: bool) -> None:
    """Without offload, under DDP, and under torch's `fully_shard` with `save_on_cpu`; `by_itself`: Transformers'
    own checkpointing, which is around each layer's hooks instead of inside."""
    for found in run_ranks(against_others, 2, family, checkpointing, by_itself):
        assert set(found.values()) == {0.0}, {key: value for key, value in found.items() if value}


# -- what is moved, when, and how many bytes ------------------------------------------------------------------------


def test_pages_leave_in_forward_and_are_back_ahead_of_need() -> None:
    """A layer saves its input, the norm's output, the product (once, of which it saves two views), what tanh and relu
    give, what dropout multiplies with and gives; its output with the next layer, whose input that is; and not the mask,
    which the model holds."""
    said = moves(Case())
    layer = HIDDEN_NBYTES * (1 + 1 + 3 + 2 + 2)
    assert [line for line in said if line.startswith("to_")] == [
        *(f"to_host {index}: {layer}" for index in range(DEPTH - 1)),
        *(f"to_device {index}: {layer}" for index in reversed(range(DEPTH - 1))),
    ]


def test_without_prefetch_pages_come_when_they_are_needed() -> None:
    said = moves(Case(checkpointing="full"), backward_prefetch="NO_PREFETCH")
    for index in range(DEPTH - 1):
        back = said.index(f"to_device {index}: {HIDDEN_NBYTES}")
        assert said.index(f"backward_end {index + 1}") < back < said.index(f"backward_begin {index}")
    ahead = moves(Case(checkpointing="full"))
    for index in range(1, DEPTH - 1):
        assert ahead.index(f"to_device {index - 1}: {HIDDEN_NBYTES}") < ahead.index(f"backward_begin {index}")


def test_the_device_holds_two_pages() -> None:
    """Of a model of twelve layers: what a layer saves, what is on its way, and never more, in either direction."""
    seen: list[tuple[int, int]] = []
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(12)]
    model = nn.Sequential(*layers)
    shard_model(model, unit_modules=layers, offload_policy=ON_HOST, device=torch.device("cpu"))
    held = Held(model)
    for layer in layers:
        layer.register_forward_hook(lambda *_: seen.append(held.nbytes()))
        layer[1].register_full_backward_hook(lambda *_: seen.append(held.nbytes()))
    loss = model(batch(0)).square().mean()
    forward, layer_nbytes = len(seen), 2 * HIDDEN_NBYTES
    loss.backward()
    assert len(seen) == 2 * forward
    assert max(device for device, _ in seen) == 2 * layer_nbytes + HIDDEN_NBYTES  # and the output just computed
    assert seen[forward - 1][1] == 11 * layer_nbytes - HIDDEN_NBYTES  # the batch is not moved: the caller holds it
    assert held.nbytes() == (0, 0)


# -- the plan -------------------------------------------------------------------------------------------------------


@sdpa_kernel(SDPBackend.MATH)  # all that the planned device has in float32 with grouped heads
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_the_planner_knows_what_is_held_where(checkpointing: str) -> None:
    """What autograd holds on the device when each layer's forward ends, and what is on the host in the end, within 5 %.

    Of selective checkpointing the planner counts on the device what it keeps of its own, too.
    """
    import transformers

    settings = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, use_cache=False, tie_word_embeddings=False, **settings
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    shape, _ = from_config(config.to_dict(), where="test")
    units = unit_modules(model)
    if checkpointing != "none":
        checkpoint_modules(model, units, selective=checkpointing == "selective")
    held_at: list[tuple[int, int]] = []
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if event.kind is EventKind.FORWARD_END:
            held_at.append(held.nbytes())

    shard_model(model, unit_modules=units, offload_policy=ON_HOST, device=torch.device("cpu"), event_sink=listen)
    held = Held(model)
    ids = torch.randint(61, (1, 2 * TOKENS))
    loss = model(input_ids=ids, labels=ids).loss
    job = Job.of(
        {"precision": "fp32", "seq_len": 2 * TOKENS, "offload_activations": True, "checkpointing": checkpointing}
    )
    plan = evaluate(shape, job, parse_cluster("1xA100"))
    planned = [
        moment.nbytes["activations"]
        for moment in plan.memory.timeline
        if moment.event.kind is EventKind.FORWARD_END and moment.event.unit
    ]
    own = layer_activations(shape.blocks[0], job, plan.setting.device)
    stays = own.kept - page_nbytes(shape.blocks[0], job, plan.setting.device)
    for index in range(5):  # the second moment of each: without what is there for a moment
        # The model holds the first layer's input, which then counts with a later layer.
        slack = own.inputs if checkpointing != "none" else 0
        assert held_at[index][0] == pytest.approx(planned[2 * index + 1] - stays * (index + 1), rel=0.05, abs=slack)
    moved = sum(event.nbytes for event in events if event.kind is EventKind.TO_HOST)
    loss.backward()
    assert moved == sum(event.nbytes for event in events if event.kind is EventKind.TO_DEVICE)
    first_input = own.inputs if checkpointing != "none" else 0
    assert moved == pytest.approx(plan.traffic.to_host_nbytes, rel=0.05, abs=first_input)
    assert plan.traffic.to_host_nbytes == plan.traffic.to_device_nbytes


def test_the_plan_of_a_large_model() -> None:
    """Pages instead of layers on the device, the rest on the host, and both ways over PCIe, which takes its time."""
    model, _ = load_model("Llama-3.1-8B")
    cluster = parse_cluster("8xA100")
    values = {"seq_len": 8192, "loss": "fused", "optimizer": "adamw-fused"}
    for checkpointing in ("none", "full"):
        plain, moved = (
            evaluate(model, Job.of({**values, "checkpointing": checkpointing, **more}), cluster)
            for more in ({}, {"offload_activations": True})
        )
        layers = len(model.blocks)
        page = page_nbytes(model.blocks[0], moved.job, cluster.device)
        most = [max(moment.nbytes.get("activations", 0) for moment in p.memory.timeline) for p in (plain, moved)]
        assert most[0] - most[1] == (layers - 2) * page
        assert 0 <= plain.memory.peak_of_step - moved.memory.peak_of_step <= (layers - 2) * page
        locked = page if checkpointing == "full" else many_page_locked_nbytes(page)  # an input is a power of two here
        assert moved.memory.host_steady - plain.memory.host_steady == pytest.approx(8 * (layers - 1) * locked)
        assert (moved.traffic.to_host_nbytes, moved.traffic.to_device_nbytes) == ((layers - 1) * page,) * 2
        assert moved.time.total >= plain.time.total
    assert moved.time.total < 1.02 * plain.time.total, "inputs of layers are copied beside computing"


def test_what_does_not_fit_is_told_of_it() -> None:
    model, _ = load_model("Llama-3.1-8B")
    job = Job.of({"seq_len": 131072, "checkpointing": "full", "loss": "fused", "optimizer": "adamw-8bit"})
    plan = evaluate(model, job, parse_cluster("8xA100-80"))
    assert not plan.fits
    words = {change.words for change in changes_that_fit(plan, most=20)}
    assert any("the inputs of checkpointed layers on the host" in word for word in words), words


# -- as a user asks for it ------------------------------------------------------------------------------------------


def test_accelerates_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True, activation_checkpointing_offload=True)
    model = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(Model())
    held = Held(model)
    loss = model(batch(0)).mean()
    assert held.nbytes()[1] == (DEPTH - 1) * HIDDEN_NBYTES
    loss.backward()
    capsys.readouterr()
    monkeypatch.delenv(OFFLOAD.name)
    Accelerator(cpu=True, fsdp_plugin=plugin).prepare(Model())
    said = capsys.readouterr()
    assert "activation offload saves no memory here" in said.out + said.err


@pytest.mark.full
def test_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("one and two and three and " * 8000, encoding="utf-8")
    options = {"nproc": 2, "device": "cpu", "data": tmp_path / "data.txt", "vocab-size": 320, "steps": 4}
    options |= {"batch-size": 2, "seq-len": 512, "save-every": 0, "sample-tokens": 0}

    def run(name: str, *flags: str) -> str:
        texts = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        code = "from fullshard.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "train", "--no-plot", "--no-export", "--output-dir", name, *texts, *flags],
            capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    said = run("moved", "--offload-activations", "--activation-checkpointing")
    assert "activations on the host" in said
    plain = run("plain", "--activation-checkpointing")
    losses = [re.findall(r"loss[= ]+([0-9.]+)", text) for text in (said, plain)]
    assert losses[0] and losses[0] == losses[1]


# -- what is refused, and what is said ------------------------------------------------------------------------------


def test_what_is_said_and_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(describe(Case().model(ON_HOST))).endswith("; activations on the host")
    with pytest.raises(ConfigError, match="one unit"):
        shard_model(Model(), unit_modules=[], offload_policy=ON_HOST, device=torch.device("cpu"))
    alone = fully_shard(nn.Linear(WIDTH, WIDTH), offload_policy=ON_HOST)
    with pytest.raises(ConfigError, match="one unit"):  # until now it could have become a layer of another
        alone(batch(0))
    monkeypatch.delenv(OFFLOAD.name)  # a CPU is the host itself
    assert not describe(Case().model(ON_HOST)).offload

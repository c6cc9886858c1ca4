"""Trains tiny models of every Transformers type sharded and not, side by side, and records how equal they are.

    python -m tests.model_types                 every type, into the record and the page made from it
    python -m tests.model_types bert t5         some of them
    python -m tests.model_types --page          the page alone

Beside every sharded model trains an unsharded one, whose gradients are averaged over the ranks: what data parallel
training means. Then their state dicts, what they export and what they generate are compared.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.overrides import TorchFunctionMode

from fullshard.checkpoint import export_hf, full_state_dict
from fullshard.core.errors import FullshardError
from fullshard.engine.parameter import ShardedParameter, ShardedTensor
from fullshard.engine.precision import map_tensors
from fullshard.features import describe, shard_model
from fullshard.features.unit_selection import unit_modules
from tests.distributed import preload, run_ranks
from tests.tiny_inputs import batches, loss_of, trained_class, without_noise
from tests.tiny_models import build, model_types, why_not

preload("tests.model_types")

RECORD = Path(__file__).with_name("model_types.json")
VISION_RECORD = RECORD.with_name("vision_models.json")
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
STEPS = 2
ROUNDING = 1e-6
"""What differs by more, relative to the largest element of its tensor, is more than the same number rounded."""

DOUBLE_ROUNDING = 1e-9
"""The same for float64, of a model that is further apart in float32."""

NOISE = 1e-2
"""Gradients of less than this share of the model's largest one are compared relative to that share: softmax does not
see the bias of keys, so that its gradient is nothing but rounding."""

_NOTHING = contextlib.nullcontext()
Row = dict[str, Any]
ResultT = TypeVar("ResultT")


# -- one type, on every rank ------------------------------------------------------------------------------------


def compare_type(model_type: str, name: str) -> Row:
    """How equal a type's class is, sharded and not. The same on every rank, or an error."""
    plain: Any = without_noise(build(model_type, name))
    try:
        batch = batches(plain)
    except ValueError as error:
        return {"absent": str(error)}
    row: Row = {"inputs": list(batch(0))} | compare(plain, batch)
    if row["train"] > ROUNDING:  # in float64 what is rounding shrinks, and what is wrong stays
        plain.set_experts_implementation("eager")  # products of groups have no kernel for it
        with contextlib.suppress(RuntimeError):  # a forward with dtypes of its own; every rank comes to it alike
            double = compare(plain.double(), lambda seed: map_tensors(_doubled, batch(seed)), within=InDouble())
            row["double"] = double["train"]
            if double["train"] <= DOUBLE_ROUNDING:  # weights that are further apart are so in a state dict, too
                row |= {what: double[what] for what in ("state", "export")}
    return row


class InDouble(TorchFunctionMode):
    """Within it, forwards that cast to float32 (routers of experts, norms) cast to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def compare(
    plain: nn.Module,
    batch: Callable[[int], dict[str, Any]],
    within: contextlib.AbstractContextManager[Any] = _NOTHING,
) -> Row:
    """Train `plain` and a sharded copy of it, and compare whatever can be.

    Args:
        plain: the model, which is trained too.
        batch: from a seed to a batch.
        within: what both forwards run in.

    Returns:
        `train`: the largest difference of losses, gradients and weights, 0.0 if they are equal bit for bit; `where` it
        is; `units`; `state`, `export`, `generate`: whether those are equal, None where there is nothing to compare;
        `error` instead, if this library refuses or something fails.
    """
    transformers.logging.set_verbosity_error()
    sharded = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        units = unit_modules(sharded)
        shard_model(sharded, unit_modules=units)
    row: Row = {"units": describe(sharded).units}
    worst = Worst()
    optimizers = [_optimizer(model.parameters()) for model in (plain, sharded)]
    for step in range(STEPS):
        seed = 10 * step + dist.get_rank()
        given = batch(seed)
        losses = [_backward(model, copy.deepcopy(given), seed, within) for model in (plain, sharded)]
        _average(plain)
        worst.note(f"loss of step {step}", losses[1], losses[0])
        gradients = [p.grad for p in plain.parameters() if p.grad is not None and p.grad.numel()]
        worst.floor = NOISE * max(gradient.abs().max().item() for gradient in gradients)
        _compare_parameters(worst, plain, sharded, lambda p: p.grad, f"gradient of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst.floor = 0.0
    _compare_parameters(worst, plain, sharded, lambda p: p.detach(), "weight")
    row |= worst.over_ranks()
    row["state"] = _same_state(plain, sharded)
    row["generate"] = _same_text(plain, sharded, batch(0))
    row["export"] = _same_export(plain, sharded)
    return row


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW that does not make whole steps of gradients that are nothing but rounding."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3, weight_decay=0.1)


def _backward(
    model: nn.Module, batch: dict[str, Any], seed: int, within: contextlib.AbstractContextManager[Any]
) -> torch.Tensor:
    torch.manual_seed(seed)
    with within:
        outputs = model(**batch)
    value = loss_of(outputs)
    value.backward()
    return value.detach()


def _average(model: nn.Module) -> None:
    """The mean over the ranks of every gradient that any of them has."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
    dist.all_reduce(used)
    for dtype in {p.dtype for p in parameters}:
        chosen = [p for p, n in zip(parameters, used.tolist(), strict=True) if n and p.dtype == dtype]
        if not chosen:
            continue
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in chosen])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for parameter, gradient in zip(chosen, flat.split([p.numel() for p in chosen]), strict=True):
            parameter.grad = gradient.view(parameter.shape).clone()


class Worst:
    """The largest difference so far, and of what."""

    def __init__(self) -> None:
        self.value, self.where, self.floor = 0.0, "", 0.0

    def note(self, what: str, value: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Compare, relative to the largest element of `scale` (default: the reference)."""
        same = (value == reference) | (value.isnan() & reference.isnan())
        if bool(same.all()):
            return
        largest = (reference if scale is None else scale).abs().max().item()
        off = (value - reference).abs().max().item() / max(largest, self.floor, 1e-30)
        if off != off or off > self.value:
            self.value, self.where = (off if off == off else float("inf")), what

    def over_ranks(self) -> Row:
        """`train` and `where` of the rank that differs most."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self.value, self.where))
        value, where = max(found)
        return {"train": value} | ({"where": where} if value else {})


def _compare_parameters(
    worst: Worst, plain: nn.Module, sharded: nn.Module, of: Callable[[Any], torch.Tensor | None], what: str
) -> None:
    """Every rank compares its own intervals, so nothing is sent."""
    references = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, ShardedParameter), name
        value, reference = of(parameter), of(references[name])
        if (value is None) != (reference is None) and parameter.interval.numel:
            worst.value, worst.where = float("inf"), f"{what} of {name}, which only one of the two has"
        elif value is not None and reference is not None and parameter.interval.numel:
            own = reference.flatten()[parameter.interval.start : parameter.interval.stop]
            assert isinstance(value, ShardedTensor), name
            worst.note(f"{what} of {name}", value.local, own, scale=reference)


def _same_state(plain: nn.Module, sharded: nn.Module) -> bool:
    """Whether the gathered state dict is rank 0's unsharded one: names, order, shapes, and values to rounding."""
    state = full_state_dict(sharded)
    return _from_rank_0(lambda: list(state) == list(plain.state_dict()) and _close(state, plain.state_dict()))


def _same_text(plain: Any, sharded: Any, batch: dict[str, Any]) -> bool | None:
    """Whether both generate the same tokens; None if the model does not generate from such a batch."""
    if not (hasattr(plain, "can_generate") and plain.can_generate()):
        return None
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "num_beams": 1}
    texts = []
    for model in (plain, sharded):
        model.eval()
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                texts.append(model.generate(**copy.deepcopy(batch), **options))
        except Exception:
            if model is sharded:
                raise
            return None
        finally:
            model.train()
    return isinstance(texts[0], torch.Tensor) and torch.equal(*texts)


def _same_export(plain: Any, sharded: Any) -> bool | None:
    """Whether what this library exports is what Transformers saves; None where it cannot save its own."""
    if not hasattr(plain, "save_pretrained"):
        return None
    with tempfile.TemporaryDirectory() as directory:
        paths: list[Any] = [directory]
        dist.broadcast_object_list(paths)
        shared = Path(paths[0])
        export_hf(shared / "ours", model=sharded)
        return _from_rank_0(lambda: _same_files(plain, shared))


def _same_files(plain: Any, directory: Path) -> bool | None:
    try:
        plain.save_pretrained(directory / "theirs")
    except Exception:
        return None
    ours, theirs = (
        {key: value for path in (directory / who).glob("*.safetensors") for key, value in load_file(path).items()}
        for who in ("ours", "theirs")
    )
    if ours.keys() == theirs.keys():
        return _close(ours, theirs)
    states = [type(plain).from_pretrained(directory / who).state_dict() for who in ("ours", "theirs")]
    return _close(*states)


def _close(state: Mapping[str, Any], reference: Mapping[str, Any]) -> bool:
    """Whether both have the same names, and equal values to rounding."""
    worst = Worst()
    for key, value in reference.items():
        if isinstance(value, torch.Tensor):
            if key not in state or state[key].shape != value.shape or state[key].dtype != value.dtype:
                return False
            worst.note(key, state[key].double(), value.double())
    return state.keys() == reference.keys() and worst.value <= 10 * ROUNDING


def _from_rank_0(function: Callable[[], ResultT]) -> ResultT:
    values: list[Any] = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values)
    value: ResultT = values[0]
    return value


# -- rows -------------------------------------------------------------------------------------------------------


def row_of(model_type: str) -> Row:
    """The row of one type: what it was compared as, or why it was not."""
    name = trained_class(model_type)
    if name is None:
        return {"absent": "Transformers has no model of it, only a configuration"}
    reason = why_not(model_type, name)
    if reason is not None:
        return {"class": name, "absent": reason}
    found: Row = run_ranks(_guarded, 2, model_type, name)[0]
    return {"class": name} | found


def _guarded(model_type: str, name: str) -> Row:
    """`compare_type`, whose error is what the row says."""
    try:
        return compare_type(model_type, name)
    except FullshardError as error:
        return {"refused": str(error).splitlines()[0]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]}


# -- the page ---------------------------------------------------------------------------------------------------

_HEAD = """# Models

This page shows which of Transformers' models train, save and export with fullshard exactly as in one process. A tiny
model of every type in Transformers {version} was trained with AdamW for {steps} steps on two ranks, with automatic
units. An unsharded model with averaged gradients was trained beside it. Losses, all gradients and all weights were
compared, and then the state dict, the export and generated tokens.

{tried} types were tried: {equal} are equal bit for bit, {rounded} are equal up to rounding, and {wrong} are not equal
or refused ({share:.1%} are right). {absent} more could not be tried. They are listed below with the reason: most of
them are only configurations.

`python -m tests.model_types` writes this page from tests/model_types.json. `tests/engine/test_model_types.py` checks
a few types by default, and all types in the full suite.

* *equal*: equal bit for bit.
* *rounding*: equal up to 1e-6, relative to the largest element of a tensor. Gradients that consist only of rounding
  errors are compared with a hundredth of the model's largest gradient. If the float32 results are further apart, the
  results in float64 agree to 1e-9. Such differences arise because the gradients of an output with several uses are
  added in another order.
* *state, export, tokens*: the state dict and the export equal those of the unsharded model, and both models generate
  the same tokens. A dash means that the model does not generate, or cannot generate from this batch.

| type | class | keys of a batch | units | training | state, export, tokens |
|---|---|---|---|---|---|
"""


_VISION = """

## torchvision and timm

The same comparison, run with `tests/vision_models.py`. The test suite does not include it, because it does not
install these packages. Batch norms are in train mode. State dicts are equal, including the running statistics of rank
0.

| model | images | units | training |
|---|---|---|---|
"""


def verdict(row: Row) -> str:
    """`equal`, `rounding`, or what is wrong; `absent` for what was not tried."""
    if "absent" in row:
        return "absent"
    if "refused" in row or "error" in row:
        return "refused" if "refused" in row else "fails"
    if False in (row["state"], row["export"], row["generate"]):
        return "differs"
    if row["train"] == 0.0:
        return "equal"
    return "rounding" if row["train"] <= ROUNDING or row.get("double", 1.0) <= DOUBLE_ROUNDING else "differs"


def page(rows: Mapping[str, Row]) -> str:
    """docs/models.md."""
    verdicts = {name: verdict(row) for name, row in rows.items()}
    counts = Counter(verdicts.values())
    tried = len(rows) - counts["absent"]
    lines, wrong, absent = [], [], []
    for name, row in rows.items():
        match verdicts[name]:
            case "absent":
                absent.append(f"| {name} | {_cell(row['absent'])} |")
            case "equal" | "rounding" as training:
                words = [{True: "equal", None: "-"}[row[what]] for what in ("state", "export", "generate")]
                batch = ", ".join(f"`{key}`" for key in row["inputs"])
                lines.append(
                    f"| {name} | `{row['class']}` | {batch} | {row['units']} | {training} | {', '.join(words)} |"
                )
            case _:
                wrong.append(f"| {name} | {_why(row)} |")
    head = _HEAD.format(
        version=transformers.__version__, steps=STEPS, tried=tried, equal=counts["equal"], absent=counts["absent"],
        rounded=counts["rounding"], wrong=tried - counts["equal"] - counts["rounding"], share=_share(counts, tried),
    )  # fmt: skip
    text = head + "\n".join(lines)
    text += "\n\n## Not right\n\n| type | why |\n|---|---|\n" + "\n".join(wrong) if wrong else ""
    text += _vision()
    return text + "\n\n## Not tried\n\n| type | why |\n|---|---|\n" + "\n".join(absent) + "\n"


def _vision() -> str:
    """The part on torchvision and timm."""
    rows: dict[str, Row] = json.loads(VISION_RECORD.read_text()) if VISION_RECORD.exists() else {}
    lines = [
        f"| {name} | {row.get('class', '-')} | {row.get('units', '-')} | {_training(row)} |"
        for name, row in rows.items()
    ]
    return _VISION + "\n".join(lines) if lines else ""


def _training(row: Row) -> str:
    if "error" in row:
        return _cell(row["error"])
    return {"equal": "equal", "rounding": "rounding"}.get(verdict(row), f"{row['train']:.0e} off")


def right_share(rows: Mapping[str, Row]) -> float:
    """Of the types tried, those that are equal or equal to rounding."""
    counts = Counter(verdict(row) for row in rows.values())
    return _share(counts, len(rows) - counts["absent"])


def _share(counts: Mapping[str, int], tried: int) -> float:
    return (counts["equal"] + counts["rounding"]) / max(tried, 1)


def _why(row: Row) -> str:
    if "refused" in row or "error" in row:
        return _cell(row.get("refused") or row["error"])
    wrong = [what for what in ("state", "export", "generate") if row[what] is False]
    return (
        _cell(f"training is {row['train']:.0e} off ({row.get('where')})") if not wrong else f"{', '.join(wrong)} differ"
    )


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def read_record() -> dict[str, Row]:
    """Type to row."""
    rows: dict[str, Row] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return rows


def main(arguments: list[str]) -> None:
    """Measure the types named, or all; keep their rows and make the page."""
    rows = read_record()
    for model_type in () if "--page" in arguments else arguments or model_types():
        try:
            rows[model_type] = row_of(model_type)
        except RuntimeError as error:  # a rank that hangs or dies
            rows[model_type] = {"class": trained_class(model_type), "error": str(error).splitlines()[0]}
        print(model_type, rows[model_type], flush=True)
        rows = dict(sorted(rows.items()))
        RECORD.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()) + "\n}\n")
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    importlib.import_module("tests.model_types").main(sys.argv[1:])  # workers know it under this name

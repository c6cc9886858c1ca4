"""What autograd saves in real layers, on the meta device, against the planner's formulas.

pytest tests/test_plan_activations.py
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard.plan.activations import BACKWARD_LOSS_NBYTES, layer_activations, logits_nbytes
from fullshard.plan.families import from_config
from fullshard.plan.job import Job
from fullshard.wrap.policies import checkpoint_modules, unit_modules

SEQUENCE, BATCH = 512, 2
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
}
CASES = {
    "llama, fp32, eager": ("llama", {}, "no", "eager"),
    "llama, bf16, eager": ("llama", {}, "bf16", "eager"),
    "llama, bf16, sdpa": ("llama", {}, "bf16", "sdpa"),
    "llama, grouped keys, bf16, eager": ("llama", {"num_key_value_heads": 2}, "bf16", "eager"),
    "llama, grouped keys, bf16, sdpa": ("llama", {"num_key_value_heads": 2}, "bf16", "sdpa"),
    "qwen2, fp32, sdpa": ("qwen2", {}, "no", "sdpa"),
    "mistral, wide, bf16, sdpa": ("mistral", {"intermediate_size": 1024, "num_key_value_heads": 8}, "bf16", "sdpa"),
}


def saved_by_layers(model: Any) -> int:
    """Bytes autograd saves during a forward that are not parameters, each storage once, per layer on average."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    storages: dict[int, tuple[int, Any]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = (storage.nbytes(), storage)
        return tensor

    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device=model.device)
    totals = []
    for layers in (1, 3):
        storages.clear()
        kept, model.model.layers = model.model.layers, model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(tokens, use_cache=False, logits_to_keep=1)
        totals.append(sum(nbytes for nbytes, _ in storages.values()))
        del out
        model.model.layers = kept
    return (totals[1] - totals[0]) // 2


@pytest.mark.parametrize("name", list(CASES))
def test_a_layer_keeps_what_the_formulas_say(name: str) -> None:
    """Within 4 %: the rest is statistics of norms, masks and attention's log-sum-exp."""
    kind, changes, precision, attention = CASES[name]
    values = {**LLAMA, **changes, "model_type": kind}
    config = AutoConfig.for_model(**values)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    shape, _ = from_config(values, where=name)
    job = Job.of({"precision": precision, "attention": attention, "micro_batch": BATCH, "seq_len": SEQUENCE})
    predicted = layer_activations(shape.blocks[0], job).kept
    measured = saved_by_layers(model)
    print(f"{name}: predicted {predicted}, saved {measured}, ratio {predicted / measured:.3f}")
    assert predicted == pytest.approx(measured, rel=0.04)


def held_by_checkpoints(config: Any, dtype: torch.dtype, attention: str) -> int:
    """Bytes that a layer's selective checkpoint holds between forward and backward: what Python can see, per layer.

    Autograd itself saves nothing inside a checkpoint, and what the checkpoint keeps it keeps in Python objects.
    """
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    totals = []
    for layers in (1, 3):
        config.num_hidden_layers = layers
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
        checkpoint_modules(model, unit_modules(model), selective=True)
        parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        out = model(tokens, use_cache=False, logits_to_keep=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some objects warn when they are looked at
            tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        totals.append(sum(nbytes for key, nbytes in held.items() if key not in parameters))
        del out, tensors, model
        gc.collect()
    return (totals[1] - totals[0]) // 2


@pytest.mark.parametrize("name", ["qwen2, fp32, sdpa", "mistral, wide, bf16, sdpa", "llama, grouped keys, bf16, sdpa"])
def test_a_selective_checkpoint_keeps_what_the_formula_says(name: str) -> None:
    """Within 2 %: the rest is attention's log-sum-exp."""
    kind, changes, precision, attention = CASES[name]
    values = {**LLAMA, **changes, "model_type": kind}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shape, _ = from_config(values, where=name)
    values_of_job = {"precision": precision, "attention": attention, "micro_batch": BATCH, "seq_len": SEQUENCE}
    predicted = layer_activations(shape.blocks[0], Job.of({**values_of_job, "checkpointing": "selective"})).kept
    measured = held_by_checkpoints(AutoConfig.for_model(**values), dtype, attention)
    assert predicted == pytest.approx(measured, rel=0.02)


def test_the_loss_needs_what_the_formula_says() -> None:
    """The three float32 tensors of cross entropy's backward, counted by their sizes."""
    from torch.utils._python_dispatch import TorchDispatchMode

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


def test_logits_of_a_large_vocabulary() -> None:
    shape, _ = from_config({**LLAMA, "model_type": "llama", "vocab_size": 128256}, where="x")
    job = Job.of({"precision": "bf16", "micro_batch": 2, "seq_len": 8192})
    elements = 2 * 8192 * 128256
    assert logits_nbytes(shape, job) == (10 * elements, 14 * elements)
    assert logits_nbytes(shape, job.model_copy(update={"loss": "fused"})) == (0, 0)


def test_checkpointing_trades_kept_for_recomputed() -> None:
    shape, _ = from_config({**LLAMA, "model_type": "llama"}, where="x")
    by = {
        kind: layer_activations(shape.blocks[0], Job.of({"checkpointing": kind, "seq_len": 128}))
        for kind in ("none", "selective", "full")
    }
    assert by["none"].kept > by["selective"].kept > by["full"].kept == 2 * 256 * 128
    assert by["none"].recomputed == 0
    assert by["selective"].kept + by["selective"].recomputed == by["none"].kept
    assert by["full"].recomputed == by["none"].kept

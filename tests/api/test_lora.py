"""LoRA while the base is sharded, against PEFT on one process.

pytest tests/api/test_lora.py
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from fullshard.checkpoint import full_state_dict
from fullshard.checkpoint.adapters import load_adapters, save_adapters
from fullshard.checkpoint.format import read_manifest
from fullshard.core.errors import CheckpointError, ConfigError, LifecycleError, OptimizerError
from fullshard.features import shard_model, unsharded
from tests.differential import CLOSE, TOLERANCE, gradients, is_same_product
from tests.distributed import run_ranks
from tests.interchange import files_in_use
from tests.trainers import arguments, build, close, keep_layout, result, samples, trainer

CASES = ("plain", "rslora", "dora", "modules_to_save", "embeddings", "tied", "bias", "two", "resized")


def adapted(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """A PEFT model whose adapters are no longer zero."""
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    match case:
        case "rslora":
            options |= {"use_rslora": True}
        case "dora":
            options |= {"use_dora": True}
        case "modules_to_save":
            options |= {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "down_proj"]}
        case "embeddings":
            options |= {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}
        case "tied":
            options |= {"target_modules": ["embed_tokens", "v_proj"]}
        case "bias":
            options |= {"bias": "lora_only", "target_modules": ["q_proj", "k_proj"]}
        case "resized":
            options |= {"modules_to_save": ["embed_tokens", "lm_head"]}
        case "transformers":  # its own way to add them, with no model of PEFT's around
            options |= {"target_modules": ["q_proj", "down_proj"]}
    base = build("qwen" if case in ("tied", "bias") else "llama").to(dtype)
    if case == "resized":
        torch.manual_seed(3)
        base.resize_token_embeddings(104)
    torch.manual_seed(2)
    if case == "transformers":
        base.add_adapter(LoraConfig(**options))
    model = base if case == "transformers" else get_peft_model(base, LoraConfig(**options))
    if case == "two":
        model.add_adapter("other", LoraConfig(**options | {"r": 2}))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def train(output: str, case: str, stock: bool, options: dict[str, Any]) -> Any:
    made = trainer(adapted(case), arguments(output, stock=stock, **options), stock=stock)
    made.train()
    made.save_model(f"{output}/adapter")
    return result(made)


@pytest.mark.parametrize("case", ["plain", "dora", "modules_to_save", "tied", "two"])
def test_losses_and_saved_adapters_are_those_of_one_process(tmp_path: Path, case: str) -> None:
    from safetensors.torch import load_file

    [stock] = run_ranks(train, 1, str(tmp_path / "stock"), case, True, {})
    ranks = run_ranks(train, 2, str(tmp_path / "sharded"), case, False, {})
    assert close(ranks[0]["losses"], stock["losses"])
    for name in ["", "other"] if case == "two" else [""]:
        ours, theirs = (tmp_path / side / "adapter" / name for side in ("sharded", "stock"))
        assert (ours / "adapter_config.json").read_text() == (theirs / "adapter_config.json").read_text()
        left, right = load_file(ours / "adapter_model.safetensors"), load_file(theirs / "adapter_model.safetensors")
        assert left.keys() == right.keys()
        for key in left:
            torch.testing.assert_close(left[key], right[key], **CLOSE)
    assert not list((tmp_path / "sharded" / "adapter").glob("model*.safetensors"))


def memory(adapter_dtype: torch.dtype) -> Any:
    from fullshard import Accelerator

    model = adapted("plain", torch.bfloat16)
    if adapter_dtype is torch.bfloat16:
        model.to(torch.bfloat16)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.stack([row["input_ids"] for row in samples(2)])
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is None for p in frozen) and all(p.grad is not None for p in trained)
    assert {p.dtype for p in frozen} == {torch.bfloat16} and {p.dtype for p in trained} == {adapter_dtype}
    held = len(optimizer.state)
    return sum(p.to_local().nbytes for p in frozen), sum(p.numel() * 2 for p in frozen), held == len(trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_frozen_base_stays_as_it_is(dtype: torch.dtype) -> None:
    ranks = run_ranks(memory, 2, dtype)
    whole = ranks[0][1]
    assert sum(own for own, _, _ in ranks) == whole and all(abs(own - whole / 2) <= 64 for own, _, _ in ranks)
    assert all(only_adapters for _, _, only_adapters in ranks)


def interrupted(output: str, case: str, kind: str) -> Any:
    options: dict[str, Any] = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "fsdp_config": {"state_dict_type": kind},
    }
    whole = trainer(adapted(case), arguments(output, **options))
    whole.train()
    again = trainer(adapted(case), arguments(output, **options))
    again.train(resume_from_checkpoint=f"{output}/checkpoint-2")
    first, second = result(whole), result(again)
    if dist.get_rank() == 0:
        assert all(torch.equal(first["weights"][name], value) for name, value in second["weights"].items())
    return first["losses"], second["losses"]


RESUMED = [
    ("two", "SHARDED_STATE_DICT"),
    ("modules_to_save", "FULL_STATE_DICT"),
    pytest.param("transformers", "SHARDED_STATE_DICT", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("case", "kind"), RESUMED)
def test_resume_is_bit_exact_and_holds_only_adapters(tmp_path: Path, case: str, kind: str) -> None:
    first, second = run_ranks(interrupted, 2, str(tmp_path), case, kind)[0]
    assert first == second
    checkpoint = tmp_path / "checkpoint-2"
    manifest = read_manifest(checkpoint / "training_state")
    stored = [name for name, record in manifest.parameters.items() if record.is_stored]
    assert stored and all("lora_" in name or "modules_to_save" in name for name in stored)
    assert (checkpoint / "adapter_model.safetensors").is_file()


def dora_from_files(base: str) -> dict[str, torch.Tensor]:
    import peft

    import fullshard

    model: Any = fullshard.from_pretrained(transformers.AutoModelForCausalLM, base)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    model = fullshard.Accelerator(cpu=True).prepare(model)
    ids = samples(1)[0]["input_ids"][None]
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        # B is zero, so magnitude times direction is the weight itself
        tolerance = 1e-5 if whole.dtype is torch.float32 else 4e-3  # a step of bf16
        torch.testing.assert_close(model(input_ids=ids).logits, whole(input_ids=ids).logits, rtol=0, atol=tolerance)
    return {name: v for name, v in full_state_dict(model).items() if "magnitude" in name}


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_starts_from_norms_that_are_read(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    import peft

    build(family).to(dtype).save_pretrained(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    found = run_ranks(dora_from_files, 2, str(tmp_path))[0]
    magnitudes = {name: v for name, v in expected.state_dict().items() if "magnitude" in name}
    assert found.keys() == magnitudes.keys() and len(found) == 14
    assert all(torch.equal(found[name], value) for name, value in magnitudes.items())


def dora_on_quantized(base: str, bits: int, dtype: torch.dtype, storage: torch.dtype) -> None:
    import peft

    import fullshard

    config = (
        transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_storage=storage,
        )
        if bits == 4
        else transformers.BitsAndBytesConfig(load_in_8bit=True)
    )  # fmt: skip
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    auto: Any = transformers.AutoModelForCausalLM
    model: Any = fullshard.from_pretrained(auto, base, quantization_config=config, dtype=dtype)
    model = fullshard.Accelerator(cpu=True).prepare(peft.get_peft_model(model, adapter))
    reference: Any = auto.from_pretrained(base, quantization_config=config, dtype=dtype)
    reference = keep_layout(peft.get_peft_model(reference, adapter))
    whole = full_state_dict(model, rank0_only=False)
    expected = {name: value for name, value in reference.state_dict().items() if "magnitude" in name}
    assert len(expected) == 14
    assert all(torch.equal(whole[name], value) for name, value in expected.items())
    ids = samples(1)[0]["input_ids"][None]
    # B is zero, the norms are not.
    assert is_same_product(model(input_ids=ids).logits, reference(input_ids=ids).logits)
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [p.local_grad for name, p in model.named_parameters() if "magnitude" in name and p.interval.numel]
    assert gradients and all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning", "ignore:Some parameters are on the meta:UserWarning")
@pytest.mark.parametrize(
    ("bits", "dtype", "storage"),
    [
        (4, torch.float32, torch.uint8),
        pytest.param(4, torch.bfloat16, torch.uint8, marks=pytest.mark.full),
        pytest.param(4, torch.bfloat16, torch.bfloat16, marks=pytest.mark.full),
        pytest.param(8, torch.float32, torch.uint8, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_dora_on_weights_quantized_as_they_are_read(
    tmp_path: Path, bits: int, dtype: torch.dtype, storage: torch.dtype
) -> None:
    """Magnitudes are the norms of what the weights have become, as PEFT takes them."""
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    build("llama").save_pretrained(tmp_path)
    run_ranks(dora_on_quantized, 2, str(tmp_path), bits, dtype, storage)


# -- merging --------------------------------------------------------------------------------------------------------


def export_merged(output: str, case: str) -> None:
    from fullshard import Accelerator
    from fullshard.checkpoint import export_hf

    model = Accelerator(cpu=True).prepare(adapted(case))
    export_hf(output, model=model)


def pefts_merge(case: str) -> Any:
    return adapted(case).merge_and_unload()


@pytest.mark.filterwarnings("ignore:Model has:UserWarning", "ignore:Model with:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_merging_while_sharded_is_bitwise_pefts(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    run_ranks(export_merged, 2, str(tmp_path / "merged"), case)
    expected = pefts_merge(case)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    compare_bitwise(loaded, expected)


def compare_bitwise(loaded: nn.Module, expected: nn.Module) -> None:
    found, wanted = loaded.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def merge_in_place(case: str, directory: str) -> Any:
    from fullshard import Accelerator
    from fullshard.checkpoint import full_state_dict

    model = Accelerator(cpu=True).prepare(adapted(case))
    ids = samples(1)[0]["input_ids"][None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        model.merge_adapter()
        after = model(input_ids=ids).logits
    torch.testing.assert_close(after, before, **CLOSE)
    plain = model.merge_and_unload() if case == "plain" else None
    if plain is not None:
        plain.save_pretrained(directory, is_main_process=dist.get_rank() == 0)  # which says that all ranks call
    weights = full_state_dict(model if plain is None else plain)
    return weights, None if plain is None else type(plain).__name__


@pytest.mark.parametrize("case", ["plain", "dora", "embeddings"])
def test_merging_in_memory(tmp_path: Path, case: str) -> None:
    weights, name = run_ranks(merge_in_place, 2, case, str(tmp_path))[0]
    if case == "plain":
        assert name == "LlamaForCausalLM"
        compare_bitwise(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), pefts_merge(case))
        return
    whole = adapted(case)
    whole.merge_adapter()
    for key, value in whole.state_dict().items():
        assert torch.equal(weights[key], value), key


def peft_methods(case: str, names: list[str] | None) -> None:
    """Merge, disable, go on, merge and unmerge: after each step what PEFT does with the whole model."""
    from fullshard import Accelerator

    whole, ids = adapted(case).eval(), samples(1)[0]["input_ids"][None]
    model = Accelerator(cpu=True).prepare(adapted(case)).eval()

    def same(how: str) -> None:
        with torch.no_grad():
            expected = whole(input_ids=ids).logits
            assert is_same_product(model(input_ids=ids).logits, expected), how
        weights = full_state_dict(model, rank0_only=False)
        assert all(torch.equal(weights[key], value) for key, value in whole.state_dict().items()), how

    same("as they are")
    for one in (whole, model):
        one.merge_adapter(adapter_names=names)
    same("merged")
    with whole.disable_adapter(), model.disable_adapter():
        same("disabled")
    same("enabled again")
    for one in (whole, model):
        one.merge_adapter(names, True)
    same("merged safely")
    for one in (whole, model):
        one.unmerge_adapter()
    same("unmerged")


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("two", ["default", "other"]),
        pytest.param("dora", None, marks=pytest.mark.full),
        pytest.param("embeddings", None, marks=pytest.mark.full),
        pytest.param("tied", None, marks=pytest.mark.full),
    ],
)
def test_pefts_methods_while_sharded(case: str, names: list[str] | None) -> None:
    run_ranks(peft_methods, 2, case, names)


def policy_and_reference(case: str, order: str) -> None:
    """As preference trainers do it: the reference model is the policy without its adapter."""
    from fullshard import Accelerator

    ids = [samples(4)[index]["input_ids"][None] for index in range(2)]
    whole, model = adapted(case), Accelerator(cpu=True).prepare(adapted(case))

    def score(one: Any, rank: int) -> torch.Tensor:
        if order == "policy first":
            policy = one(input_ids=ids[rank], labels=ids[rank]).loss
        with torch.no_grad(), one.disable_adapter():
            base = one(input_ids=ids[rank], labels=ids[rank]).loss
        if order == "reference first":
            policy = one(input_ids=ids[rank], labels=ids[rank]).loss
        return torch.nn.functional.logsigmoid(policy - base)

    score(model, dist.get_rank()).backward()
    for rank in range(2):
        score(whole, rank).backward()
    expected = {name: None if p.grad is None else p.grad / 2 for name, p in whole.named_parameters()}
    found = gradients(model)
    assert found.keys() == expected.keys() and sum(value is not None for value in found.values()) > 8
    for name, value in expected.items():
        assert (value is None) == (found[name] is None), name
        torch.testing.assert_close(found[name], value, **CLOSE)


@pytest.mark.parametrize("order", ["policy first", "reference first"])
@pytest.mark.parametrize("case", ["plain", pytest.param("modules_to_save", marks=pytest.mark.full)])
def test_the_reference_is_the_policy_without_its_adapter(case: str, order: str) -> None:
    run_ranks(policy_and_reference, 2, case, order)


def misused(directory: str) -> None:
    """What would write slices, add parameters that nobody reduces, or find no gradient, is an error on every rank."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.optimizers import create_lorafa_optimizer, create_riemannian_optimizer
    from peft.utils.hotswap import hotswap_adapter

    from fullshard import Accelerator

    model = Accelerator(cpu=True).prepare(adapted("plain"))
    base = model.get_base_model()
    for one, state in ((model, model.state_dict()), (base, None), (base, model.state_dict())):
        with pytest.raises(LifecycleError, match="save_pretrained would save this rank's intervals"):
            one.save_pretrained(directory, state_dict=state)
    with pytest.raises(LifecycleError, match="add_adapter cannot be called on a sharded"):
        model.add_adapter("late", LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(
        LifecycleError,
        match="adds the initial adapter to the model, which is not possible because the model is sharded",
    ):
        model.save_pretrained(directory, path_initial_model_for_weight_conversion=f"{directory}/initial")
    with pytest.raises(LifecycleError, match="load_adapter cannot be called on a sharded"):
        model.load_adapter(directory, "late")
    injected = inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), build())
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        injected = Accelerator(cpu=True).prepare(injected)
    assert "save_model will refuse this model: it contains adapters" in said.getvalue() or dist.get_rank()
    with pytest.raises(CheckpointError, match="contains adapters"):
        Accelerator(cpu=True).save_model(injected, directory)
    with pytest.raises(ConfigError, match="not supported for adapters"):
        Accelerator(cpu=True).save_model(model, directory, safe_serialization=False)
    parameter = next(p for name, p in model.named_parameters() if "lora_B" in name)
    with torch.no_grad():
        parameter.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    for make in (
        lambda whole: create_lorafa_optimizer(whole, r=4, lora_alpha=8, lr=0.1),
        lambda whole: create_riemannian_optimizer(whole, torch.optim.SGD, lr=0.1),
    ):
        whole = adapted("plain")
        with pytest.raises(OptimizerError, match="Optimizer needs complete tensors"):
            Accelerator(cpu=True).prepare(whole, make(whole))
    assert not list(Path(directory).iterdir())
    weights = full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(directory, state_dict=weights)
    model.save_pretrained(f"{directory}/plain")
    model.save_pretrained(f"{directory}/idiom", is_main_process=dist.get_rank() == 0)  # which says that all ranks call
    with pytest.raises(LifecycleError, match=r"inside `with fullshard.unsharded\(model, writeback=True\)`"):
        hotswap_adapter(model, f"{directory}/plain", "default", torch_device="cpu")
    model.load_state_dict(model.state_dict() | {name: torch.zeros(p.shape) for name, p in model.named_parameters()})
    with unsharded(model, writeback=True):
        hotswap_adapter(model, f"{directory}/plain", "default", torch_device="cpu")
    swapped = full_state_dict(model)
    assert all(torch.equal(value, weights[name]) for name, value in swapped.items() if "lora_A" in name)


def test_what_peft_cannot_do_while_sharded_is_refused(tmp_path: Path) -> None:
    run_ranks(misused, 2, str(tmp_path))
    name = "adapter_model.safetensors"
    assert (tmp_path / name).read_bytes() == (tmp_path / "idiom" / name).read_bytes()
    assert (tmp_path / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def whole_and_adapter(directory: Path, case: str, dtype: torch.dtype = torch.float32) -> Any:
    """The base model and the adapter, each in a directory of its own; returns what PEFT makes of them."""
    build("qwen" if case in ("tied", "bias") else "llama").to(dtype).save_pretrained(directory / "base")
    model = adapted(case, dtype)
    model.peft_config["default"].base_model_name_or_path = str(directory / "base")
    model.save_pretrained(directory / "adapter")
    return model.merge_and_unload()


@pytest.mark.filterwarnings("ignore:Model has:UserWarning", "ignore:Model with:UserWarning", "ignore:Setting `save")
@pytest.mark.parametrize("case", [case for case in CASES if case != "two"])
def test_fullshard_merge_is_bitwise_pefts(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM
    from typer.testing import CliRunner

    from fullshard.cli.main import app

    expected = whole_and_adapter(tmp_path, case)
    words = ["merge", *(str(tmp_path / name) for name in ("base", "adapter", "merged")), "--max-shard-size", "20KB"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    compare_bitwise(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), expected)


def test_fullshard_merge_with_another_base_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from fullshard.cli.main import app

    whole_and_adapter(tmp_path, "plain")
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    for base, says in (("base", False), ("copy", True)):  # PEFT would warn of both, and pytest raise it
        done = CliRunner().invoke(app, ["merge", base, "adapter", f"of_{base}"], catch_exceptions=False)
        assert done.exit_code == 0 and ("warning: adapter was trained on" in done.stderr) is says, done.stderr
    with pytest.raises(ConfigError, match="adapter is an adapter, but the first argument is the base model") as error:
        CliRunner().invoke(app, ["merge", "adapter", "base", "out"], catch_exceptions=False, standalone_mode=False)
    assert error.value.hint == "use fullshard merge base adapter out"


@pytest.mark.filterwarnings("ignore:Setting `save")
def test_fullshard_merge_of_damaged_files_names_them(tmp_path: Path) -> None:
    """They are not JSON, no model's or adapter's, or cut: each library has errors of its own for that."""
    from fullshard.checkpoint.offline import open_merged, write_weights

    whole_and_adapter(tmp_path, "plain")
    weights = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    for name, content, what in (
        ("base/config.json", b"{", "is not valid JSON"),
        ("base/config.json", b"[]", "is not valid JSON"),
        ("base/config.json", b'{"hidden_size": 8}', "cannot build a model from this file: ValueError"),
        (
            "base/config.json",
            b'{"model_type": "llama", "hidden_size": "x"}',
            "cannot build a model from this file: .*expected int",
        ),
        ("adapter/adapter_config.json", b"{", "is not valid JSON"),
        (
            "adapter/adapter_config.json",
            b'{"peft_type": "X"}',
            "cannot build an adapter for .*base from this file: KeyError: 'X'",
        ),
        ("adapter/adapter_model.safetensors", b"", "has a header length of 0 bytes"),
        ("adapter/adapter_model.safetensors", weights[:-8], "is at bytes"),
    ):
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(content)
        with (
            pytest.raises(CheckpointError, match=f"(?s){path}.*{what}"),
            open_merged(tmp_path / "base", tmp_path / "adapter"),
        ):
            pass
        path.write_bytes(whole)
    adapter = shutil.copytree(tmp_path / "adapter", tmp_path / "run" / "step-5")
    with (
        open_merged(tmp_path / "base", adapter) as (merged, _),
        pytest.raises(CheckpointError, match=f"{tmp_path / 'run'} contains {adapter}, which is being read"),
    ):
        write_weights(merged, tmp_path / "run", overwrite=True)
    assert adapter.is_dir()


@pytest.mark.filterwarnings("ignore:Setting `save")
@pytest.mark.parametrize(("files", "config"), [("float32", "bfloat16"), ("float16", None)])
def test_fullshard_merge_of_files_in_another_dtype_than_the_configuration_says(
    tmp_path: Path, files: str, config: str | None
) -> None:
    """The files' own: no bit of them is lost, and what is written is that."""
    from safetensors.torch import load_file

    from fullshard.checkpoint.offline import open_merged, write_weights

    expected = whole_and_adapter(tmp_path, "plain", getattr(torch, files)).state_dict()
    path = tmp_path / "base" / "config.json"
    said = json.loads(path.read_text())
    del said["dtype"]
    path.write_text(json.dumps(said | ({} if config is None else {"dtype": config})))
    with open_merged(tmp_path / "base", tmp_path / "adapter") as (merged, beside):
        write_weights(merged, tmp_path / "merged", config_from=beside, needs_config=True)
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(found, getattr(torch, files))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def part_of_adapters(directory: str) -> list[str]:
    """Where rank 1 has none, and where all have a file of fewer."""
    from peft import LoraConfig, get_peft_model

    def make(*modules: str) -> Any:
        model = get_peft_model(build(), LoraConfig(r=2, target_modules=list(modules)))
        return shard_model(model, unit_modules=list(model.base_model.model.model.layers))

    save_adapters(directory, make("q_proj"))
    model, found = make("q_proj", "v_proj"), []
    for place in (f"{directory}-1" if dist.get_rank() == 1 else directory, directory):
        with pytest.raises(CheckpointError) as error:
            load_adapters(place, model)
        found.append(str(error.value))
    return found


def test_a_file_that_lacks_some_of_the_adapters_is_refused(tmp_path: Path) -> None:
    for elsewhere, message in run_ranks(part_of_adapters, 2, str(tmp_path / "a")):
        assert "rank 1: " in elsewhere and "a-1 does not contain an adapter" in elsewhere and "rank 0" not in elsewhere
        assert "lacks 4 of the 8 tensors of the adapter 'default': " in message and "v_proj.lora_A" in message


def test_fullshard_merge_of_a_trainers_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from fullshard.checkpoint.offline import open_merged, write_weights

    whole_and_adapter(tmp_path, "plain")
    run_ranks(interrupted, 2, str(tmp_path), "plain", "SHARDED_STATE_DICT")
    for name, place in (("a", "checkpoint-4"), ("b", "checkpoint-4/training_state")):
        with open_merged(tmp_path / "base", tmp_path / place) as (merged, config):
            write_weights(merged, tmp_path / name, config_from=config, needs_config=True)
        assert files_in_use(tmp_path) == []
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    compare_bitwise(first, second)


def test_fullshard_merge_of_a_checkpoint_with_transformers_own_adapters(tmp_path: Path) -> None:
    """Whose names begin with no model of PEFT's."""
    from peft import LoraConfig

    from fullshard.checkpoint import save_checkpoint
    from fullshard.checkpoint.offline import open_merged, write_weights

    build().save_pretrained(tmp_path / "base")
    model = build()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    save_checkpoint(tmp_path / "adapter" / "state", model=model)
    for name, place in (("a", "adapter"), ("b", "adapter/state")):
        with open_merged(tmp_path / "base", tmp_path / place) as (merged, config):
            write_weights(merged, tmp_path / name, config_from=config, needs_config=True)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "base")]
    assert files[0] == files[1] != files[2]


def load_with_peft(directory: str) -> bool:
    """By PEFT's own function, which believes DTensors to be tensor parallelism's, and by ours."""
    from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict

    def make(seed: int) -> Any:
        base = build()
        torch.manual_seed(seed)  # after the base, which is built of one seed
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        return shard_model(model, unit_modules=list(model.base_model.model.model.layers))

    first, second, third = make(1), make(2), make(3)
    save_adapters(directory, first)
    set_peft_model_state_dict(second, load_peft_weights(directory, device="cpu"))
    load_adapters(directory, third)
    whole, *others = (full_state_dict(model, rank0_only=False) for model in (first, second, third))
    return all(torch.equal(whole[name], loaded[name]) for loaded in others for name in whole if "lora_" in name)


def test_adapters_are_loaded_into_sharded_ones(tmp_path: Path) -> None:
    assert run_ranks(load_with_peft, 2, str(tmp_path / "a")) == [True, True]


def other_adapters(method: str, seed: int) -> Any:
    """A model with adapters of another method of PEFT's than LoRA."""
    import peft

    base = build()
    torch.manual_seed(seed)  # after the base, which is built of one seed
    options: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if method == "transformers":  # its own way to add them, with no model of PEFT's around
        for name in ("first", "second"):  # the last one is at work
            base.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), name)
        return base
    match method:
        case "vera":  # its layers share two buffers
            config: Any = peft.VeraConfig(r=4, target_modules=["q_proj"], init_weights=False, **options)
        case "prompt":  # what is stored is computed
            config = peft.PromptTuningConfig(num_virtual_tokens=3, **options)
        case "adalora":  # parts of what is there are stored
            config = peft.AdaLoraConfig(init_r=4, total_step=10, target_modules=["q_proj"], **options)
    model: Any = peft.get_peft_model(base, config)
    if method == "adalora":
        names = [name for name, _ in model.base_model.model.named_parameters() if name.endswith("lora_E.default")]
        model.peft_config["default"].rank_pattern = {name: [True, False, True, True] for name in names}
    return model


def _sharded_layers(model: Any) -> Any:
    return shard_model(model, unit_modules=[each for each in model.modules() if type(each).__name__.endswith("Layer")])


def stored_and_loaded(directory: str, method: str) -> Any:
    model = _sharded_layers(other_adapters(method, 1))
    save_adapters(f"{directory}/sharded", model)
    if method == "adalora":  # PEFT makes the modules smaller to load it
        return None
    other = _sharded_layers(other_adapters(method, 2))
    load_adapters(f"{directory}/sharded", other)
    kept = {"transformers": "second"}.get(method, method)
    return [{name: value for name, value in full_state_dict(each).items() if kept in name} for each in (model, other)]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize("method", ["vera", "prompt", "adalora", "transformers"])
def test_adapters_of_other_methods_are_stored_as_peft_does(tmp_path: Path, method: str) -> None:
    stored = run_ranks(stored_and_loaded, 2, str(tmp_path), method)[0]
    other_adapters(method, 1).save_pretrained(tmp_path / "plain")
    names = ("adapter_model.safetensors", "adapter_config.json")
    assert all((tmp_path / "sharded" / n).read_bytes() == (tmp_path / "plain" / n).read_bytes() for n in names)
    if stored is not None:
        saved, loaded = stored
        assert saved and all(torch.equal(value, loaded[name]) for name, value in saved.items())


def adapted_parameters() -> float:
    """The largest difference from one process, of the adapters' gradients and of the weights after a step."""
    from peft import LoraConfig, get_peft_model

    def make() -> Any:
        torch.manual_seed(3)
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
        return get_peft_model(build("experts"), config)

    tokens, results = torch.arange(24).view(2, 12), []
    for is_sharded in (False, True):
        model = make()
        if is_sharded:
            model = shard_model(model, unit_modules=list(model.base_model.model.model.layers))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        results.append(full_state_dict(model, rank0_only=False))
    plain, sharded = results
    start = make().state_dict()
    assert all(not torch.equal(plain[name], start[name]) for name in plain if "lora_" in name)
    return max(float((plain[name] - sharded[name]).abs().max()) for name in plain)


def test_adapters_of_parameters_train_as_on_one_process() -> None:
    """Of experts, which are one parameter: PEFT parametrizes it in each forward."""
    assert max(run_ranks(adapted_parameters, 2)) <= TOLERANCE


def test_adapters_of_one_process_are_plain_tensors(tmp_path: Path) -> None:
    """As diffusers' scripts write them: taken out of the model, and given to safetensors."""
    import peft
    from safetensors.torch import load_file, save_file

    plain, model = peft.get_peft_model_state_dict(adapted("plain")), _sharded_layers(adapted("plain"))
    save_file(peft.get_peft_model_state_dict(model), tmp_path / "adapters")
    saved = load_file(tmp_path / "adapters")
    assert saved.keys() == plain.keys() and all(torch.equal(saved[name], plain[name]) for name in plain)

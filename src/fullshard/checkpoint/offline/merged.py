"""A base model with an adapter merged into it. PEFT computes the changed tensors, one layer at a time."""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.coded_files import stored_values
from fullshard.checkpoint.conversion import Rules, loading_rules, outline_of
from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.export import write_configuration
from fullshard.checkpoint.format import MANIFEST_NAME, TRAINER_STATE, TensorRecord
from fullshard.checkpoint.merging import MergedModel
from fullshard.checkpoint.offline.huggingface import (
    CONFIG_NAME,
    files_beside_weights,
    open_weights,
    read_configuration,
    skeleton_of,
    stored_form_of,
    write_weights,
)
from fullshard.checkpoint.offline.source import Contents, Kind, Source, open_native, tensor_record
from fullshard.checkpoint.places import tensors_of, without_wrappers
from fullshard.checkpoint.sources import Match, match, read_whole
from fullshard.checkpoint.tensors import LocalTensor
from fullshard.checkpoint.weight_files import model_directory
from fullshard.checkpoint.weight_files import tensors_of as tensors_of_file
from fullshard.core.errors import CheckpointError, own_errors
from fullshard.core.imports import import_extra
from fullshard.core.layout import Interval
from fullshard.features.meta_device import meta_parameters

ADAPTER_CONFIG = "adapter_config.json"
_COMPUTED_WITH = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_ADAPTER_WEIGHTS, _GENERATION = "adapter_model.safetensors", "generation_config.json"


@contextmanager
def open_merged(path: Path, adapter: Path) -> Iterator[tuple[Source, Path]]:
    """Yield a base model with an adapter merged into it, and a directory with its configuration and tokenizer.

    `path` is the base model's Hugging Face directory. `adapter` is a directory that PEFT wrote, a Trainer checkpoint,
    or the `training_state` inside one.
    """
    on_disk = stored_values(path)
    files = open_weights(path, on_disk)
    directory = _config_directory(adapter)
    # Use the widest dtype on disk, whatever the configuration says, because a narrower merge would lose bits.
    held = {source.dtype for source in on_disk.values()} & _COMPUTED_WITH or {torch.float32}
    model, values, rules = _peft_model(path, adapter, directory, functools.reduce(torch.promote_types, held))
    merged, base = MergedModel(model), match(on_disk, rules)
    merged.base._weight_conversions = rules.used()  # type: ignore[assignment] # storing reverses them

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        """Return the value of a parameter from the adapter's files, or from the base model's files otherwise."""
        names = merged.local(tensor).names
        value = next((values[name] for name in names if name in values), None)
        if value is None:
            found = next((base.sources[plain] for plain in map(without_wrappers, names) if plain in base.sources), None)
            if found is None:
                raise CheckpointError(f"neither {adapter} nor {path} holds {names[0]}")
            value = read_whole(found, found.shape, found.dtype)
        if value.shape != tensor.shape:
            raise CheckpointError(f"{names[0]} has shape {tuple(value.shape)}, expected {tuple(tensor.shape)}")
        return value.to(tensor.dtype)

    changed: dict[str, LocalTensor] = {}
    for source in merged.sources:
        parts = (name for part in merged.parts(source) for name in merged.local(part).names)
        if merged.is_changed(source) or not values.keys().isdisjoint(parts):
            # If the adapter untied the tensor, the base has none of its names, so use the first.
            changed[next((name for name in source.names if name in base.sources), source.name)] = source
    contents, read = _with(files, base, changed, lambda source: merged.merge(source, whole), merged.base)
    transformers, trained = import_extra("transformers", extra="hf", purpose="merging an adapter"), merged.base
    with own_errors(f"cannot read the tokenizer or generation_config.json for {directory}"):
        if (path / _GENERATION).is_file():
            trained.generation_config = transformers.GenerationConfig.from_pretrained(path)
        if (directory / "tokenizer_config.json").is_file():
            align_tokens(trained, transformers.AutoTokenizer.from_pretrained(directory))
    with tempfile.TemporaryDirectory() as beside:
        write_configuration(Path(beside), merged.base, None, merged)
        for file in (*files_beside_weights(path), *files_beside_weights(directory)):  # the adapter's tokenizer is newer
            if file.name not in (CONFIG_NAME, _GENERATION):
                shutil.copyfile(file, Path(beside) / file.name)
        yield Source("base model with an adapter merged into it", path, contents, read, [adapter]), Path(beside)


def align_tokens(model: Any, tokenizer: Any) -> None:
    """Set a tokenizer's special tokens in a model's configurations, as Trainer does. Lists of end tokens are kept."""
    for config in filter(None, (model.config.get_text_config(), generation := model.generation_config)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            new, old = getattr(tokenizer, name), getattr(config, name, None)
            held = old if isinstance(old, list) else [old] * (old is not None)
            if new is not None and new not in held:
                several = held is old or (config is generation and name == "eos_token_id")
                setattr(config, name, [new, *held] if several else new)


def write_merged(base: str | Path, adapter: Path, output: Path, hub: Any = None, **options: Any) -> None:
    """Write a base model, a directory or hub name, with an adapter merged into it (see `write_weights`)."""
    with open_merged(model_directory(base, hub), adapter) as (merged, configuration):
        write_weights(merged, output, config_from=configuration, needs_config=True, **options)


def _with(
    files: Source,
    base: Match,
    changed: Mapping[str, LocalTensor],
    merge: Callable[[LocalTensor], torch.Tensor],
    model: nn.Module,
) -> tuple[Contents, Callable[[Kind, str, Interval], torch.Tensor]]:
    """Return the contents of a base model's directory after the merge, and a function to read them."""
    # Tensors in `changed` that Transformers computes from others are stored as Transformers stores them.
    sources: dict[str, LocalTensor] = {}
    records: dict[str, TensorRecord] = {}
    in_memory: dict[str, TensorRecord] = {}
    on_disk = files.contents.parameters
    for name, source in changed.items():
        keys, is_converted = base.keys.get(name, ()), name in base.converted
        key = name if is_converted or not keys else keys[0]
        # PEFT may compute in another dtype than the base has on disk; the base's is written.
        dtype = on_disk[keys[0]].dtype if keys else source.tensor.dtype
        sources[key] = source
        (in_memory if is_converted else records)[key] = tensor_record(source.shape, dtype, where=key)

    @functools.lru_cache(1)  # it is read in pieces
    def made(key: str) -> torch.Tensor:
        return merge(sources[key]).detach().to(dtype_of({**records, **in_memory}[key])).reshape(-1)

    def read_changed(kind: Kind, key: str, interval: Interval) -> torch.Tensor:
        return made(key)[interval.start : interval.stop].contiguous()

    stored = stored_form_of(Source("merged", files.path, Contents(in_memory), read_changed), model)

    def read(kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        if name in records:
            return read_changed(kind, name, interval)
        return (stored if name in stored.contents.parameters else files).read(kind, name, interval)

    gone = {key for name in in_memory for key in base.keys[name]}
    kept = {name: record for name, record in on_disk.items() if name not in gone}
    return Contents({**kept, **records, **stored.contents.parameters}), read


def base_of(adapter: Path) -> str | None:
    """Return the directory or hub name of the model that an adapter was trained on, or None if it is not recorded."""
    return read_configuration(_config_directory(adapter) / ADAPTER_CONFIG).get("base_model_name_or_path")


def _config_directory(adapter: Path) -> Path:
    for directory in (adapter, adapter.parent):
        if (directory / ADAPTER_CONFIG).is_file():
            return directory
    raise CheckpointError(
        f"{adapter} does not hold an {ADAPTER_CONFIG}, which describes the adapter",
        hint="use a directory that save_model or PEFT wrote, or a Trainer checkpoint",
    )


def _peft_model(
    base: Path, adapter: Path, directory: Path, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, torch.Tensor], Rules]:
    """Return the PEFT model on the meta device, the adapter's tensors by base model name, and the base's rules."""
    transformers = import_extra("transformers", extra="hf", purpose="merging an adapter")
    peft = import_extra("peft", extra="sft", purpose="merging an adapter")
    base_model: Any = skeleton_of(transformers, base, dtype)
    vars(base_model.config).pop("quantization_config", None)  # the merge computes and writes decoded values
    rules = loading_rules(base_model, outline_of(base_model, tensors_of(base_model)))
    path = directory / ADAPTER_CONFIG
    read_configuration(path)
    with _open_adapter(adapter) as source:
        stored = {name: source.whole(name) for name, r in source.contents.parameters.items() if r.is_stored}
        is_ours = source.contents.manifest is not None
    with meta_parameters():
        rows = _table_rows(stored, base_model.get_input_embeddings().weight.shape)
        if rows is not None:
            base_model.resize_token_embeddings(rows, mean_resizing=False)
        try:
            config = peft.PeftConfig.from_pretrained(str(directory))
            config.inference_mode, config.base_model_name_or_path = False, None  # PEFT warns of another spelling
            model: Any = peft.get_peft_model(base_model, config, low_cpu_mem_usage=True)
        except Exception as error:  # each method checks its fields in its own way
            raise CheckpointError(
                f"{path}: PEFT {peft.__version__} cannot build an adapter for {base} from this file: "
                f"{type(error).__name__}: {error}",
                hint="use the adapter's complete configuration, and the base model that it was trained on",
            ) from error
    if not is_ours:
        stored = _by_model_name(peft, model, stored, adapter)
    # Names in a checkpoint of a model with Transformers' own `add_adapter` lack the base model's prefix.
    prefix = next(f"{name}." for name, module in model.named_modules() if module is model.get_base_model())
    return model, {name.removeprefix(prefix): value for name, value in stored.items()}, rules


def _open_adapter(directory: Path) -> Source:
    if (directory / _ADAPTER_WEIGHTS).is_file():
        return open_weights(directory, dict(tensors_of_file(directory / _ADAPTER_WEIGHTS)))
    for place in (directory, directory / TRAINER_STATE):
        if (place / MANIFEST_NAME).is_file():
            return open_native(place)
    raise CheckpointError(
        f"{directory} holds neither {_ADAPTER_WEIGHTS} nor a checkpoint", hint="use the adapter's directory"
    )


def _by_model_name(
    peft: Any, model: nn.Module, stored: Mapping[str, torch.Tensor], directory: Path
) -> dict[str, torch.Tensor]:
    """Return the tensors of PEFT's file, keyed by their names in the PEFT model. PEFT itself defines these names."""
    stand_ins = {name: torch.empty(0, device="meta") for name in model.state_dict()}
    chosen = peft.get_peft_model_state_dict(
        model, state_dict=dict(stand_ins), save_embedding_layers=any(".embed" in name for name in stored)
    )
    names = {id(value): name for name, value in stand_ins.items()}
    places = {key: names[id(value)] for key, value in chosen.items() if id(value) in names}
    if strangers := sorted(stored.keys() - places.keys() - stand_ins.keys()):
        raise CheckpointError(
            f"{directory} does not match the base model, which has no parameters for {', '.join(strangers[:5])}"
        )
    return {places.get(key, key): value for key, value in stored.items()}


def _table_rows(stored: Mapping[str, torch.Tensor], shape: torch.Size) -> int | None:
    """Return the number of embedding rows in the adapter if training resized the embeddings; otherwise, return None."""
    return next((
        tensor.shape[0] for name, tensor in stored.items()
        if tensor.ndim == 2 and tensor.shape[1] == shape[1] and name.endswith(".weight") and "lora_" not in name
        and any(part.startswith(("embed", "lm_head", "wte", "shared")) for part in name.split("."))
        and tensor.shape[0] != shape[0]), None)  # fmt: skip

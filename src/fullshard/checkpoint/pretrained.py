"""Load Hugging Face directories directly into shards. Every rank reads only the bytes that it will own.

    model = fullshard.from_pretrained(AutoModelForCausalLM, "path/or/hub-name")     no weights are read
    model = accelerator.prepare(model)                                              each rank reads its intervals

No rank ever holds the complete model, not even in host memory. In addition to its shard, a rank needs one small buffer
and, for a weight that is quantized during the load (QLoRA), the full weight before quantization.
"""

import functools
import importlib
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.checkpoint.bitsandbytes_files import layer_problem, restore
from fullshard.checkpoint.chunks import fill_local, read_across, read_transposed
from fullshard.checkpoint.coded_files import (
    decoded_sources,
    is_to_be_decoded,
    keep_codes,
    settings_of_layers,
    stored_values,
    without_quantization,
)
from fullshard.checkpoint.coded_sources import fill_cut
from fullshard.checkpoint.conversion import Outline, loading_rules, outline_of
from fullshard.checkpoint.places import Place, new_parts, not_ignored, places_of, tensors_of
from fullshard.checkpoint.quantities import adapter_modules, conversion_of, quantize_rest
from fullshard.checkpoint.sources import Match, are_equal, match, read_whole
from fullshard.checkpoint.tensors import LocalTensor, local_tensors, rest, stand_in
from fullshard.checkpoint.weight_files import TensorSource, model_directory, stored_tensors
from fullshard.core.boxes import UNCUT
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import CheckpointError, ConfigError, LifecycleError
from fullshard.core.forms import StoredForm
from fullshard.core.imports import import_extra
from fullshard.core.layout import Interval
from fullshard.core.paths import local_path
from fullshard.features.meta_device import WEIGHTS, meta_parameters
from fullshard.features.quantized_weights.marks import mark_of
from fullshard.features.quantized_weights.quantize import mark_large
from fullshard.features.quantized_weights.scales import dequantized, is_exact, outline, quantize, whole_shape
from fullshard.features.tensor_parallel import local_shard_of
from fullshard.wrap.partition import Slot

logger = logging.getLogger(__name__)

_REFUSED = dict.fromkeys(
    ("key_mapping", "variant", "subfolder"), "pass the directory itself, with the file names that save_pretrained uses"
) | {"device_map": "omit it, because each rank reads the part of the weights that it owns"}
_REFUSED |= dict.fromkeys(("load_in_4bit", "load_in_8bit"), "pass quantization_config=BitsAndBytesConfig(...)")
_HUB_OPTIONS = ("revision", "cache_dir", "token", "local_files_only")
_DORA = "lora_magnitude_vector"
_NORM_NUMEL = 2**20
"""Number of elements of a weight in memory at a time when the norms of its rows are computed."""


def from_pretrained(
    auto_class: Any,
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    quantization_config: Any = None,
    quantize: str | None = None,
    dequantize: bool = False,
    config: Any = None,
    ignore_missing: bool = False,
    ignore_mismatched_sizes: bool = False,
    **options: Any,
) -> nn.Module:
    """Return a Transformers model whose weights are read when it is sharded. Each rank reads only its own part.

    Until then, the parameters are on the meta device. PEFT can wrap the model, and its embeddings can be resized, but
    it cannot run.

    If Transformers uses other names or forms in memory than on disk, its own rules convert them. A weight that is in
    the model but not in the files is an error. The exception is a weight that the class that saved the files does not
    have, such as a new head on a base model. Such weights are initialized, and a warning lists their names.

    Args:
        auto_class: `AutoModelForCausalLM`, another auto class, or a model class.
        name_or_path: a directory with weights (safetensors or `pytorch_model.bin`) and a config.json, or a hub name.
        dtype: dtype of the parameters. Default: that of the configuration, or else of the first weight.
        quantization_config: bitsandbytes' `BitsAndBytesConfig`. Weights are quantized as they are read. Weights for
            which bitsandbytes has no layers are quantized at rest (`fullshard.quantize`). All of them are frozen.
        quantize: a form, such as `nf4`, in which all large weights are quantized at rest. They are frozen.
        dequantize: read the values of weights that the files contain as codes, as Transformers does with
            `Mxfp4Config(dequantize=True)` or `FineGrainedFP8Config(dequantize=True)`.
            By default, these weights are frozen and remain codes at rest.
        config: a configuration to use instead of the one in the directory.
        ignore_missing: initialize all weights that are not in the files, and list their names in a warning.
        ignore_mismatched_sizes: do the same for weights that have another shape in the files.
        options: passed to the model's configuration (for example `attn_implementation`) and the hub (`revision`).

    Raises:
        CheckpointError: there are no weights. If weights do not match the model, this is raised later, when the model
            is sharded.
        ConfigError: a quantization that is not bitsandbytes', an unknown form, files that are quantized in an
            unsupported way, or an option such as `device_map` or `subfolder`.
        MissingExtraError: the `hf` extra is not installed.
    """
    transformers = import_extra("transformers", extra="hf", purpose="loading a pretrained model")
    if given := [name for name in _REFUSED if options.pop(name, None)]:
        raise ConfigError(f"from_pretrained(...) does not support {', '.join(given)}", hint=_REFUSED[given[0]])
    hub: dict[str, Any] = {key: options.pop(key) for key in _HUB_OPTIONS if key in options}
    directory = model_directory(name_or_path, hub)
    if config is None:
        # Options of the configuration (num_labels, rope_scaling, ...) are set there; the others go to the model.
        source = transformers.AutoConfig if hasattr(auto_class, "from_config") else auto_class.config_class
        config, options = source.from_pretrained(directory, return_unused_kwargs=True, **options)
        config.name_or_path = str(name_or_path)  # TRL finds the tokenizer there, and PEFT records it
    config, quantization = without_quantization(config, quantization_config, directory)
    stored = dict(stored_tensors(directory))
    is_decoded = dequantize or is_to_be_decoded(quantization_config)
    if quantization is not None:
        stored = decoded_sources(stored, quantization, quantize)
        quantization_config = settings_of_layers(quantization, quantization_config, not is_decoded and quantize is None)
    parsed = _dtype(dtype, config, stored)
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    with meta_parameters():
        model: nn.Module = make(config, dtype=parsed, **options)
        _keep_in_fp32(model, parsed)
        built = outline_of(model, tensors_of(model))
        rules = loading_rules(model, built)
        found = match(stored, rules)
        model._weight_conversions = rules.used()  # type: ignore[assignment] # used in reverse by a save
        _untie_what_differs(model, found.sources)
        if quantization_config is not None:
            _replace_linear_layers(model, quantization_config)
            outline(model)  # so that PEFT finds the final kind of weights
        if quantization is not None and not is_decoded:
            keep_codes(model, found.sources, quantize)
        if quantization_config is not None:
            quantize_rest(model, freezes=True)
            conversion = conversion_of(model)
            level = logging.WARNING if conversion.stacked else logging.INFO
            logger.log(level, "%s: %s", type(model).__name__, conversion.said)
        if quantize is not None:
            logger.info("%s: %s", type(model).__name__, mark_large(model, quantize, freezes=True))
    model.eval()  # as after Transformers' own from_pretrained
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = MethodType(_resize_token_embeddings, model)  # type: ignore[assignment]
    generation = directory / "generation_config.json"
    if generation.is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    weights = PretrainedWeights(directory, model, built, parsed, found)
    weights.ignore_missing, weights.ignore_mismatched_sizes = ignore_missing, ignore_mismatched_sizes
    model.__dict__[WEIGHTS] = weights
    weights.guard = model.register_forward_pre_hook(_refuse_to_run)
    return model


def _refuse_to_run(model: nn.Module, *_: Any) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        what = f"the weights of {type(model).__name__} have not been read: this happens when the model is sharded"
        raise LifecycleError(what, hint="first shard it, with Accelerator.prepare, accelerate or shard_model")


def _dtype(dtype: torch.dtype | str | None, config: Any, stored: Mapping[str, TensorSource]) -> torch.dtype:
    if dtype is None or dtype == "auto":
        floating = (source.dtype for source in stored.values() if source.dtype.is_floating_point)
        dtype = getattr(config, "dtype", None) or next(floating, torch.float32)
    if isinstance(dtype, str):
        itemsize(dtype.removeprefix("torch."))  # an error if it is unknown
    parsed: torch.dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    return parsed


def _keep_in_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep modules in float32 if the model requires it for them, even if all other modules have another dtype."""
    if not hasattr(model, "_get_dtype_plan"):
        return
    asked: Any = model
    plan = asked._get_dtype_plan(dtype)
    for name, tensor in tensors_of(model).items():
        for pattern, kept in plan.items():
            if tensor.is_floating_point() and re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)


def _untie_what_differs(model: nn.Module, sources: Mapping[str, TensorSource]) -> None:
    """Untie weights that are tied in the configuration but have different values in the files."""
    tied: Any = getattr(model, "all_tied_weights_keys", {})
    for target, origin in list(tied.items()):
        if target in sources and origin in sources and not are_equal(sources[target], sources[origin]):
            logger.warning(
                "%s: the configuration ties %s to %s, but they are not tied because their values in the files differ",
                type(model).__name__, target, origin,
            )  # fmt: skip
            path, _, attribute = target.rpartition(".")
            parameter = model.get_parameter(target)
            own = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
            model.get_submodule(path)._parameters[attribute] = own
            del tied[target]


def _resize_token_embeddings(
    self: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool | None = None,
) -> nn.Module:
    """Resize the embeddings as Transformers does. `mean_resizing` is an error if the old rows are not read yet."""
    if mean_resizing and self.get_input_embeddings().weight.is_meta:
        raise ConfigError(
            "mean_resizing=True needs the old rows of the embedding, which are read only when the model is sharded",
            hint="omit it, so that new rows are drawn with the model's own initialization",
        )
    mean_resizing = not self.get_input_embeddings().weight.is_meta if mean_resizing is None else mean_resizing
    resized: nn.Module = type(self).resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, mean_resizing)
    return resized


class PretrainedWeights:
    """The weights in a directory that will be read into one model. This class implements the engine's `WeightSource`.

    `base` is the Transformers model, which may be wrapped later; names are relative to it. `built` is the model as the
    configuration describes it, before any changes. `dtype` is the dtype of weights before they are quantized.
    """

    ignore_missing = ignore_mismatched_sizes = False
    guard: RemovableHandle  # refuses to run the model until `start`

    def __init__(self, directory: Path, base: nn.Module, built: Outline, dtype: torch.dtype, found: Match) -> None:
        self.directory, self._base, self._built, self._dtype = directory, base, built, dtype
        self._sources, self._unused = found.sources, found.unused
        self._names: dict[tuple[int, str], str] = {}
        self._adapters: dict[int, tuple[str, Any, Any]] = {}

    def start(self, model: nn.Module) -> None:
        """Match the model's parameters and buffers with the files. Raise an error that lists all differences."""
        self.guard.remove()
        self._adapters = _adapter_parts(model)
        adapters = adapter_modules(model)
        places = [p for p in places_of(self._base) if id(p.module) not in adapters]
        found = [place for place in places if place.name in self._sources]
        mismatched = {place.name: problem for place in found if (problem := self._shape_problem(place))}
        if self.ignore_mismatched_sizes:
            found = [place for place in found if place.name not in mismatched]
        self._names = {(id(place.module), place.attribute): place.name for place in found}
        present = {id(place.tensor) for place in found}  # a tied parameter is present under one of its names
        absent = [p for p in places if id(p.tensor) not in present and not is_exact(p.tensor)]
        names = {p.name for p in absent if isinstance(p.tensor, nn.Parameter)} - mismatched.keys()
        names = not_ignored(names, self._base, "_keys_to_ignore_on_load_missing")
        missing = set() if self.ignore_missing else names - new_parts(self._base, names)
        problems = [] if self.ignore_mismatched_sizes else [mismatched[name] for name in sorted(mismatched)]
        problems += [f"{name} is not in the files" for name in sorted(missing)]
        if problems:
            raise CheckpointError(
                f"the weights in {self.directory} do not match {type(self._base).__name__}:\n" + "\n".join(problems),
                hint="load the saved class, or pass ignore_missing=True or ignore_mismatched_sizes=True",
            )
        buffers = {p.name for p in absent if not isinstance(p.tensor, nn.Parameter)} - names
        for named, ignored, what in (
            (names - missing, "", "not in %s, newly initialized: %s"),
            (mismatched.keys() & {p.name for p in absent}, "", "in another shape in %s, newly initialized: %s"),
            (buffers, "_keys_to_ignore_on_load_missing", "not in %s, left as the model creates them: %s"),
            (set(self._unused), "_keys_to_ignore_on_load_unexpected", "in %s, not used: %s"),
        ):
            if said := not_ignored(named, self._base, ignored):
                logger.warning(f"%s: {what}", type(self._base).__name__, self.directory, ", ".join(sorted(said)))

    def _shape_problem(self, place: Place) -> str | None:
        stored = self._sources[place.name]
        outlined = whole_shape(place.module) if place.attribute == "weight" else None
        shape = tuple(place.tensor.shape) if outlined is None else outlined
        is_resized = tuple(self._built.tensors[place.name].shape) == stored.shape  # by `resize_token_embeddings`
        if outlined is not None and (problem := layer_problem(place.tensor, stored)):
            return f"{place.name}: {problem}"
        is_table = isinstance(place.module, nn.Embedding | nn.Linear) and len(shape) == len(stored.shape) in (1, 2)
        has_more_rows = is_table and shape[1:] == stored.shape[1:] and shape[0] > stored.shape[0]
        if shape == stored.shape or (is_resized and has_more_rows):
            return None
        return f"{place.name} has shape {shape} in the model and {stored.shape} in {stored.where}"

    def make_whole(self, module: nn.Module, device: torch.device) -> None:
        """Read a module's persistent buffers. If its weight must be quantized, read and quantize it, too."""
        for attribute, buffer in list(module._buffers.items()):
            name = self._names.get((id(module), attribute))
            if name is not None and buffer is not None:
                module._buffers[attribute] = read_whole(self._sources[name], buffer.shape, buffer.dtype, device)
        shape, name = whole_shape(module), self._names.get((id(module), "weight"))
        if shape is not None and name is not None:
            source = self._sources[name]
            if not restore(module, source, device):
                quantize(module, read_whole(source, shape, self._dtype, device))

    def holds(self, slot: Slot) -> bool:
        """Return whether the files contain values for this parameter."""
        return slot.parameter.is_meta and self._name(slot) is not None

    def read(self, slot: Slot, interval: Interval, out: torch.Tensor) -> None:
        """Read the elements in `interval` of a parameter into `out`, in the order in which the parameter is sharded.

        If tensor parallelism splits the parameter, the interval counts the elements of this rank's part.
        """
        read, shape, target = functools.partial(self._read_rows, slot), tuple(slot.parameter.shape), UNCUT
        if (shard := local_shard_of(slot)) is not None:
            target, interval = shard.chunking, interval.shift(shard.start)
        if (own_mark := mark_of(slot.parameter)) is not None and own_mark.is_transposed:
            *others, rows, columns = shape  # a shard has complete matrices
            read_transposed(read, (*others, columns, rows), interval, out)
        else:
            read_across(read, out, shape=shape, source=UNCUT, target=target, wanted=interval)

    def _read_rows(self, slot: Slot, interval: Interval, out: torch.Tensor) -> None:
        """Read the elements in `interval` of a parameter into `out`. The parameter is flattened row by row."""
        name = self._name(slot)
        assert name is not None  # noqa: S101 -- the caller asked `holds`
        stored = self._sources[name]
        kept = interval.intersect(Interval(0, stored.numel))
        self._sources[name].read(kept, out[: kept.numel])
        if interval.numel > kept.numel:  # rows that were added to an embedding
            added = _new_rows(self._base, name, stored, math.prod(slot.parameter.shape))
            start = max(interval.start, stored.numel) - stored.numel
            out[kept.numel :].copy_(added[start : start + interval.numel - kept.numel])

    def read_parts(self, slot: Slot, interval: Interval, form: StoredForm, parts: Mapping[str, torch.Tensor]) -> bool:
        """Read codes and scales from the files into `parts`. Return False if the files do not have this form.

        Raises:
            CheckpointError: tensor parallelism splits the weight inside a block.
        """
        name = self._name(slot)
        coded = None if name is None else self._sources[name].coded
        if name is None or coded is None or coded.mark is None or coded.mark != mark_of(slot.parameter):
            return False
        shard = local_shard_of(slot)
        if shard is None or not shard.is_chunked:
            coded.fill(interval, parts)
        elif not fill_cut(coded, self._sources[name].shape, shard.chunking, shard.rank, interval, parts):
            raise CheckpointError(
                f"{name} of shape {self._sources[name].shape}: tensor parallelism over {shard.chunking.chunks} ranks "
                f"would split it along dim {shard.chunking.dim} in the middle of a block of {form.name}",
                hint="pass dequantize=True, or remove the weight from the tensor-parallel plan",
            )
        return True

    def initialize(self, module: nn.Module) -> bool:
        """Initialize a module of a LoRA adapter as PEFT does. Do nothing and return False for any other module."""
        found = self._adapters.get(id(module))
        if found is None:
            return False
        kind, scheme, layer = found
        with torch.no_grad():
            if kind == _DORA:
                self._read_row_norms(layer.get_base_layer(), module.weight)  # type: ignore[arg-type]
                return True
            for name, parameter in module.named_parameters(recurse=False):
                if name == "bias" or (scheme is not False and kind in ("lora_B", "lora_embedding_A")):
                    parameter.zero_()
                elif kind.startswith("lora_embedding"):
                    nn.init.normal_(parameter)
                elif scheme == "gaussian":
                    nn.init.normal_(parameter, std=1 / parameter.shape[0])
                else:
                    nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        return True

    def _read_row_norms(self, base: Any, out: torch.Tensor) -> None:
        """Compute DoRA's initial magnitudes, the row norms of the base weight, a few rows at a time."""
        if is_exact(base.weight):
            values, computes = dequantized(base), getattr(base, "compute_dtype", torch.float32)
            # PEFT adds the adapter's product to the weight in this dtype.
            out.copy_(torch.linalg.norm(values.to(torch.promote_types(values.dtype, computes)), dim=1))
            return
        stored = self._sources.get(self._names.get((id(base), "weight"), ""))
        if stored is None or stored.shape != tuple(base.weight.shape):
            raise ConfigError(
                f"DoRA on {type(base).__name__} is not possible: {self.directory} does not store its weight in the "
                "model's layout",
                hint="load the base with Transformers' own from_pretrained before adding the adapter",
            )
        columns = stored.shape[1]
        step = max(1, _NORM_NUMEL // columns)
        for rows in (range(start, min(start + step, len(out))) for start in range(0, len(out), step)):
            part = torch.empty(len(rows), columns, dtype=base.weight.dtype)
            stored.read(Interval(rows.start * columns, rows.stop * columns), part.view(-1))
            out[rows.start : rows.stop] = torch.linalg.norm(part, dim=1)

    def _name(self, slot: Slot) -> str | None:
        names = (self._names.get((id(module), attribute)) for module, attribute in slot.owners)
        return next((name for name in names if name is not None), None)


def load_pretrained(directory: str | Path, model: nn.Module) -> None:
    """Load a directory of safetensors files into a model that is already sharded. Each rank reads its intervals.

    The directory must contain every parameter and persistent buffer. Their names and layouts must be those of the model
    in memory, or those of the format that Transformers saves. If names or shapes differ, the model is not changed.
    """
    rest(model)
    directory = local_path(directory)
    locals_ = local_tensors(model)
    metas = {name: stand_in(local) for local in locals_ for name in local.names}
    tensors = match(stored_values(directory), loading_rules(model, outline_of(model, metas))).sources
    found: list[tuple[LocalTensor, TensorSource]] = []
    problems = []
    for local in locals_:
        stored = next((tensors[name] for name in local.names if name in tensors), None)
        if stored is None:
            problems.append(f"{local.name} is missing")
        elif stored.shape != local.shape:
            problems.append(f"{local.name} has shape {stored.shape}, expected {local.shape}")
        else:
            found.append((local, stored))
    if problems:
        raise CheckpointError(f"{directory} does not match {type(model).__name__}:\n" + "\n".join(problems))
    for local, stored in found:
        fill_local(local, stored.read)


def _new_rows(model: nn.Module, name: str, stored: TensorSource, numel: int) -> torch.Tensor:
    """Return values for the rows that were added to a table, the same on every rank and at every world size."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + stored.numel)
    std = getattr(getattr(model, "config", None), "initializer_range", 0.02)
    return torch.randn(numel - stored.numel, generator=generator) * std


def _adapter_parts(model: nn.Module) -> dict[int, tuple[str, Any, Any]]:
    """Return (kind of part, initialization scheme, layer) for each module of a LoRA adapter, keyed by id."""
    schemes: dict[str, Any] = {}
    for module in model.modules():
        if isinstance(configs := module.__dict__.get("peft_config"), Mapping):
            schemes = {name: getattr(each, "init_lora_weights", True) for name, each in configs.items()} | schemes
    found: dict[int, tuple[str, Any, Any]] = {}
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "adapter_layer_names") and hasattr(m, "lora_A")]
    for layer, kind in ((each, kind) for each in layers for kind in each.adapter_layer_names):
        holder = getattr(layer, kind, None)
        parts = list(holder.items()) if isinstance(holder, nn.ModuleDict) else []
        if isinstance(holder, nn.ParameterDict) and len(holder):
            parts = [(next(iter(holder)), holder)]
        for adapter, part in parts:
            scheme = schemes.get(adapter, True)
            if next(part.parameters(), None) is None:
                continue
            # B is initially zero except with False, and a row is one output except with `fan_in_fan_out`.
            is_of_rows = type(part).__name__ == "DoraLinearLayer" and not part.fan_in_fan_out and scheme is not False
            if (kind == _DORA and not is_of_rows) or (scheme not in (True, False) and scheme != "gaussian"):
                what = f"{type(part).__name__}, " if kind == _DORA else ""
                raise ConfigError(
                    f"{what}init_lora_weights={scheme!r} computes the adapter from unsharded base weights, but no "
                    "rank holds them",
                    hint="load the base with Transformers' own from_pretrained before adding the adapter",
                )
            found[id(part)] = kind, scheme, layer
    return found


def _replace_linear_layers(model: nn.Module, quantization_config: Any) -> None:
    quantizers: Any = importlib.import_module("transformers.quantizers.auto")
    quantizer = quantizers.AutoHfQuantizer.from_config(quantization_config)
    if "bnb" not in type(quantizer).__module__:
        raise ConfigError(
            f"quantization_config is a {type(quantization_config).__name__}, which is not supported",
            hint="use BitsAndBytesConfig",
        )
    quantizer.preprocess_model(model, device_map=None)
    model.hf_quantizer = quantizer
    model.is_quantized, model.quantization_method = True, quantization_config.quant_method  # type: ignore[assignment]
    is_4bit = bool(getattr(quantization_config, "load_in_4bit", False))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = is_4bit, not is_4bit  # type: ignore[assignment]

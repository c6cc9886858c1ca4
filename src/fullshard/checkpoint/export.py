"""Export a model as a Hugging Face directory for `from_pretrained`. The complete model is never in memory."""

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from fullshard.checkpoint.adapters import HOW_TO_SAVE_INNER, carries_adapters, is_adapted
from fullshard.checkpoint.conversion import Group, outline_of, saving_rules
from fullshard.checkpoint.elements import entry_of, tensor_bytes
from fullshard.checkpoint.full_state import full_tensor
from fullshard.checkpoint.merging import MergedModel
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.save import Destination
from fullshard.checkpoint.shards import divided, parse_dtype, write_index
from fullshard.checkpoint.tensor_file import Bytes, TensorEntry, write_tensor_file
from fullshard.checkpoint.tensors import LocalTensor, local_tensors, rest, stand_in
from fullshard.core.errors import CheckpointError
from fullshard.core.paths import local_path
from fullshard.core.progress import progress
from fullshard.core.sizes import parse_size
from fullshard.core.user_class import user_class
from fullshard.engine.precision import cast_floating, dtype_name


def export_hf(
    path: str | Path,
    *,
    model: nn.Module,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Path:
    """Write the weights, configuration and tokenizer of `model` for `from_pretrained`. All ranks must call this.

    Parameters are gathered one at a time and written immediately. In addition to its shards, every device holds one
    unsharded parameter (or all parameters that are stored as one tensor). Rank 0's host holds up to two copies of it.
    These amounts do not depend on the size of the model or on `max_shard_size`. The directory appears under its name
    only when it is complete.

    Names and layout are those that `save_pretrained` would write, even where Transformers uses another layout in memory
    (for example for experts). Where the layout on disk joins several parameters into one, they are gathered together.

    Args:
        path: directory to create; only rank 0 writes.
        model: a Transformers model, sharded or not. For other modules, only the weights are written. The adapters of a
            PEFT model are merged layer by layer during the export, as PEFT's `merge_and_unload` does. Use
            `save_adapters` to write only the adapters.
        tokenizer: any object with `save_pretrained`, for example a tokenizer or a processor.
        dtype: dtype to store floating-point tensors in; by default, they keep their own dtypes.
        max_shard_size: maximum size of the tensors per file, as a number of bytes or as text such as `5GB` (10**9) or
            `5GiB` (2**30). A larger tensor gets a file to itself.
        overwrite: replace `path` if it exists.

    Returns:
        `path`.

    Raises:
        CheckpointError: the export failed. Every rank raises it, and nothing new is left at `path`.
        ConfigError: `max_shard_size` or `dtype` cannot be parsed.
    """
    limit, cast = parse_size(max_shard_size), parse_dtype(dtype)
    final = local_path(path).absolute()
    destination = Destination.of(model, final, overwrite=overwrite)
    ranks, temp = destination.ranks, Path(destination.store.directory)
    with destination.discarded_on_failure():
        convert = ranks.together(f"exporting {final}", lambda: SavedLayout.of(model, cast=cast))
        batches = ranks.together(f"exporting {final}", convert.entries)
        files = divided(batches, limit)
        destination.make("exporting")
        with progress("exporting", sum(entry.nbytes for entry in batches)):
            for name, entries in files.items():
                _write_weights(temp / name, [(entry, batches[entry]) for entry in entries], convert, ranks)

        def finish() -> None:
            write_index(temp, files)
            write_configuration(temp, model, cast, convert.merged)
            if tokenizer is not None:
                tokenizer.save_pretrained(temp)
            destination.store.commit()

        ranks.on_rank_0(f"exporting {final}", finish)
    return final


def is_exported_as_it_is(model: nn.Module) -> bool:
    """Return whether `export_hf` writes every parameter and persistent buffer without renaming or converting it."""
    convert = SavedLayout(model, local_tensors(model), cast=None)
    return all(batch.group is None and batch.stored_name in batch.sources[0].names for batch in convert.batches)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tensors that `group` converts together, or one tensor that is stored unchanged as `stored_name`."""

    sources: list[LocalTensor]
    names: list[str]
    stored_name: str = ""
    group: Group | None = None


class SavedLayout:
    """Converts unsharded parameters to the tensors that Transformers stores for them.

    Usually the stored tensor is the parameter itself. For some models, however, Transformers 5 uses another form in
    memory than on disk. For example, all experts of a layer are one tensor in memory. Other software reads the form on
    disk. `batches` lists the conversions in model order.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Sequence[LocalTensor],
        *,
        cast: torch.dtype | None,
        merged: MergedModel | None = None,
    ) -> None:
        self._cast, self.merged = cast, merged
        self._tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
        self._outline = outline_of(model, {name: stand_in(source) for source in sources for name in source.names})
        by_name = {name: source for source in sources if (name := self._name(source)) not in ignored}
        as_it_is, groups = saving_rules(model, self._outline).save(by_name)
        batches = [Batch([by_name[name]], [name], stored_name=stored) for name, stored in as_it_is.items()]
        for group in groups:
            names = [name for _, name in group.takes]
            batches.append(Batch([by_name[name] for name in names], names, group=group))
        order = {id(source): index for index, source in enumerate(sources)}
        self.batches = sorted(batches, key=lambda batch: min(order[id(source)] for source in batch.sources))

    @classmethod
    def of(cls, model: nn.Module, *, cast: torch.dtype | None) -> Self:
        """Return the stored layout of a model with its adapters merged. This reshards all units of the model."""
        rest(model)
        if is_adapted(model):
            merged = MergedModel(model)
            return cls(merged.base, merged.sources, cast=cast, merged=merged)
        if carries_adapters(model):
            raise CheckpointError(
                f"{type(model).__name__} contains adapters, so its parameter names do not match those of a plain model",
                hint=HOW_TO_SAVE_INNER,
            )
        return cls(model, local_tensors(model), cast=cast)

    def entries(self) -> dict[TensorEntry, Batch]:
        """Return the tensors to store, in model order, each with its batch. The result is the same on every rank."""
        return {
            entry_of(name, tensor): batch
            for batch in self.batches
            for name, tensor in self(batch, [stand_in(source) for source in batch.sources]).items()
        }

    def gather(self, batch: Batch) -> Callable[[], list[torch.Tensor]]:
        """Start to gather a batch on all ranks. Return a function that returns full tensors, with adapters merged."""
        makers = [self._gather(source) for source in batch.sources]
        return lambda: [make() for make in makers]

    def _gather(self, source: LocalTensor) -> Callable[[], torch.Tensor]:
        if self.merged is None:
            whole = full_tensor(source, self._cast)  # casting first sends fewer bytes, with the same result
            return lambda: whole
        merged = self.merged
        wholes = {id(part): full_tensor(merged.local(part)) for part in merged.parts(source)}
        return lambda: merged.merge(source, lambda tensor: wholes[id(tensor)])

    def __call__(self, batch: Batch, wholes: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors to store, by name. On the meta device, this gives only their names and shapes."""
        cast = cast_floating(list(wholes), self._cast)
        if batch.group is None:
            return {batch.stored_name: cast[0]}
        by_name = dict(zip(batch.names, cast, strict=True))
        return batch.group.convert(by_name.__getitem__, self._outline)

    def _name(self, source: LocalTensor) -> str:
        """Return the primary name of a tensor: the one that the model does not list as tied to another."""
        names = (name for name in source.names if not any(re.search(pattern, name) for pattern in self._tied))
        return next(names, source.name)


def _write_weights(
    path: Path, entries: Sequence[tuple[TensorEntry, Batch]], convert: SavedLayout, ranks: Ranks
) -> None:
    """Gather the tensors of a file in storage order, and write them on rank 0. Then raise its error on every rank."""
    lost: list[Exception] = []  # errors of gathers, after which ranks can no longer communicate

    def gathered() -> Iterator[Callable[[], list[torch.Tensor]]]:
        for batch, _ in itertools.groupby(batch for _, batch in entries):
            try:
                wholes = convert.gather(batch)
            except Exception as caught:
                lost.append(caught)
                raise
            yield wholes

    def parts() -> Iterator[list[Bytes]]:
        for (batch, members), wholes in zip(itertools.groupby(entries, lambda pair: pair[1]), gathers, strict=False):
            converted = convert(batch, wholes())
            yield from ([tensor_bytes(converted[entry.name])] for entry, _ in members)

    gathers, error = gathered(), None
    made = parts()
    try:
        if ranks.rank == 0:
            write_tensor_file(path, [entry for entry, _ in entries], {"format": "pt"}, lambda _: next(made))
    except Exception as caught:
        if lost:
            raise
        error = caught
    for _ in gathers:  # those that are left, in which the other ranks wait
        pass
    ranks.fail_together(f"writing {path.name}", error)


def write_configuration(
    directory: Path, model: nn.Module, cast: torch.dtype | None, merged: MergedModel | None
) -> None:
    """Write `config.json` and `generation_config.json` if the model is a Transformers model."""
    if merged is not None:
        model = merged.base
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [user_class(model).__name__]
    dtype = cast or next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if merged is not None and getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = merged.ties_embeddings
    if dtype is not None:
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype_name(dtype))
    config.save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(model, "generate"):
        generation.to_json_file(directory / "generation_config.json")  # `save_pretrained` refuses some valid ones

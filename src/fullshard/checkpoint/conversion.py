"""Convert the tensors of a Hugging Face directory to those of a model and back, by Transformers' own rules.

Transformers 5 holds many models under other names in memory than on disk, and some in another form: all experts of a
layer in one tensor, a fused projection in three. The rules for that are its own objects. A *renaming* makes a name of a
name; a *converter* makes tensors of tensors. Here they are asked which tensors belong together, and applied to one such
`Group` after the other, so that no more of a model is held at once.

Earlier versions have no rules; then a tensor keeps its name, but for the prefix of its base model.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import CheckpointError
from fullshard.engine.lookup import clean_name

_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names in old checkpoints, and what they are called today; later versions of Transformers have a rule for them."""


@dataclass(frozen=True)
class Outline:
    """The model as the rules see it: its configuration, and the names, shapes and dtypes of its tensors unsharded."""

    config: Any
    base_model_prefix: str
    tensors: Mapping[str, torch.Tensor]

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return the tensor with that name, on the meta device."""
        return self.tensors[name]

    @property
    def title(self) -> str:
        """The model's name in messages."""
        return type(self.config).__name__.removesuffix("Config")


@dataclass(frozen=True)
class Group:
    """Tensors that a converter (`rule`) makes of others, all at once; `first` is the name of the first.

    `takes` is what it takes, in order: the pattern of the rule that a name matches, and the name. The names of what it
    makes go through `renamings`.
    """

    rule: Any
    first: str
    takes: list[tuple[str, str]] = field(default_factory=list)
    renamings: tuple[Any, ...] = ()

    def convert(self, get: Callable[[str], torch.Tensor], outline: Outline) -> dict[str, torch.Tensor]:
        """Return the tensors, by name, that the rule makes of those that `get` gives."""
        return self._apply([(pattern, name, get(name)) for pattern, name in self.takes], outline)

    def convert_meta(self, metas: Mapping[str, torch.Tensor], outline: Outline) -> dict[str, torch.Tensor]:
        """Return the names, shapes and dtypes of the tensors that are made."""
        with torch.device("meta"):
            return self.convert(lambda name: metas[name].to("meta"), outline)

    def row(self, index: int, get: Callable[[str], torch.Tensor], outline: Outline) -> torch.Tensor:
        """Return row `index` of the result; see `has_rows`."""
        taken = [(pattern, names[index], get(names[index])) for pattern, names in self._by_pattern.items()]
        return next(iter(self._apply(taken, outline).values()))

    @property
    def has_rows(self) -> bool:
        """Return whether it stacks equal lists along dim 0, which no later step mixes: rows can be made alone.

        So an expert of a layer can be read without the others.
        """
        first, *others = self.rule.operations
        stacks = type(first).__name__ == "MergeModulelist" and first.dim == 0 and len(self.rule.target_patterns) == 1
        keeps = all(
            (type(op).__name__ == "Concatenate" and op.dim > 0)
            or (type(op).__name__ == "Transpose" and min(op.dim0, op.dim1) > 0 and not op.check_dims)
            for op in others
        )
        return stacks and keeps and len({len(names) for names in self._by_pattern.values()}) == 1

    @functools.cached_property
    def _by_pattern(self) -> dict[str, list[str]]:
        return {pattern: [n for p, n in self.takes if p == pattern] for pattern, _ in self.takes}

    def _apply(self, taken: Iterable[tuple[str, str, torch.Tensor]], outline: Outline) -> dict[str, torch.Tensor]:
        rule = copy.deepcopy(self.rule)  # it keeps its inputs
        for pattern, name, tensor in taken:
            rule.add_tensor(self.first, name, pattern, tensor)
        try:
            made = rule.convert(self.first, model=outline, config=outline.config)
        except (KeyError, ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{outline.title}: Transformers' rule for {self.first} ({self.rule.operations}) does not fit "
                f"{', '.join(name for _, name in self.takes[:8])}: {error}"
            ) from error
        single = {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}
        return {_renamed(name, self.renamings): tensor for name, tensor in single.items()}


class Rules:
    """Rules of Transformers for one model, in one direction."""

    def __init__(self, outline: Outline, transforms: Iterable[Any]) -> None:
        self.outline, self.transforms = outline, tuple(transforms)
        self._converters = [t for t in self.transforms if hasattr(t, "operations")]
        self._renamings = tuple(t for t in self.transforms if not hasattr(t, "operations"))
        self._by_pattern = {pattern: t for t in self._converters for pattern in t.source_patterns}

    def used(self) -> list[Any]:
        """Return the rules that matched a name in the files."""
        return [transform for transform in self.transforms if transform.was_used()]

    def load(self, keys: Iterable[str]) -> tuple[dict[str, str], list[Group], list[str], list[tuple[str, str]]]:
        """Return how to make the model's tensors from files with tensors of these names.

        That is: the name in the files of each tensor that is stored as it is; how the others are made; names in the
        files that none is made of; and further names in the files for tensors that are stored as they are.
        """
        known = self.outline.tensors
        as_it_is: dict[str, str] = {}
        groups: dict[str, Group] = {}
        unused, again = [], []
        for key in sorted(keys, key=_natural):
            name, pattern = self._converted(_renamed(key, self._renamings))
            name = self._prefixed(name)
            if name not in known and key in known:
                name, pattern = self._prefixed(key), None  # the files hold it as it is in memory
            if pattern is not None and name in known:
                groups.setdefault(name, Group(self._by_pattern[pattern], name)).takes.append((pattern, key))
            elif name not in known:
                unused.append(key)
            elif as_it_is.setdefault(name, key) != key:
                again.append((name, key))
        return as_it_is, list(groups.values()), unused, again

    def save(self, names: Iterable[str]) -> tuple[dict[str, str], list[Group]]:
        """Return how to store the model's tensors: the name of each that is stored as it is, and groups of others."""
        as_it_is: dict[str, str] = {}
        groups: dict[str, Group] = {}
        for name in sorted(names, key=_natural):
            first, pattern = self._converted(name)
            if pattern is None:
                as_it_is[name] = _renamed(name, self._renamings)
            else:
                group = Group(self._by_pattern[pattern], first, renamings=self._renamings)
                groups.setdefault(first, group).takes.append((pattern, name))
        return as_it_is, list(groups.values())

    def _converted(self, name: str) -> tuple[str, str | None]:
        for converter in self._converters:
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return renamed, pattern
        return name, None

    def _prefixed(self, name: str) -> str:
        """Add or remove the prefix that a base model's tensors have in a model with a head.

        A name that the model has is left as it is. Transformers looks for another even then, and exchanges two norms of
        a model (Pixio's backbone) that has one with the prefix and one without.
        """
        prefix = f"{self.outline.base_model_prefix}."
        candidates = (name, name.removeprefix(prefix), prefix + name)
        return next((each for each in candidates if each in self.outline.tensors), name)


def loading_rules(model: nn.Module, outline: Outline) -> Rules:
    """Return the rules from a Hugging Face directory to `model`."""
    mapping = _conversion_mapping()
    return Rules(outline, [_Legacy()] if mapping is None else mapping.get_model_conversion_mapping(model))


def saving_rules(model: nn.Module, outline: Outline) -> Rules:
    """Return the rules from `model` to a Hugging Face directory: its load's, reversed, or else those of its kind."""
    mapping = _conversion_mapping()
    if mapping is None or not hasattr(getattr(model, "config", None), "save_pretrained"):
        return Rules(outline, ())
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:
        transforms = [
            transform
            for transform in mapping.get_model_conversion_mapping(model, add_legacy=False)
            # A model that was never loaded does not show whether it would have had such a prefix.
            if type(transform).__name__ != "PrefixChange"
        ]
    return Rules(outline, [transform.reverse_transform() for transform in reversed(transforms)])


def outline_of(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Outline:
    """Return the outline of a model whose tensors, or stand-ins of their shapes and dtypes, are given by name."""
    metas = {clean_name(name): tensor.detach().to("meta") for name, tensor in tensors.items()}
    return Outline(getattr(model, "config", None), getattr(model, "base_model_prefix", ""), metas)


class _Legacy:
    """The renaming that every version of Transformers does."""

    def rename_source_key(self, name: str) -> tuple[str, str | None]:
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        return name, None

    def was_used(self) -> bool:
        return False


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _natural(name: str) -> list[tuple[int, Any, int]]:
    """Return a sort key that puts the second expert before the tenth, as Transformers orders a group's tensors."""
    parts: list[tuple[int, Any, int]] = []
    for part in name.split("."):
        if part.isdigit():
            parts.append((0, int(part), 0))
        else:
            text, digits = re.fullmatch(r"(.*?)(\d*)", part, re.DOTALL).groups()  # type: ignore[union-attr]
            parts.append((1, text, int(digits) if digits else -1))
    return parts


def _conversion_mapping() -> Any:
    """Return the module in which Transformers keeps its rules; None in a version that has none."""
    try:
        return importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return None

"""Convert the tensors of a Hugging Face directory to those of a model and back, with Transformers' own rules.

In Transformers 5, the tensors of many models have other names or another form in memory than on disk. For example, all
experts of a layer are one tensor. The rules are Transformers objects: a *renaming* maps a name to another name, and a
*converter* computes tensors from other tensors. This module determines which tensors belong together, and converts one
such `Group` at a time, so that only one group is in memory.

In earlier versions of Transformers, a tensor keeps its name, except for the prefix of its base model.
"""

import copy
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import CheckpointError
from fullshard.engine.lookup import clean_name

_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names in old checkpoints and their current names. Later versions of Transformers have rules for them."""


@dataclass(frozen=True)
class Outline:
    """The configuration of a model, and its unsharded tensors on the meta device, as conversion rules need them."""

    config: Any
    base_model_prefix: str
    tensors: Mapping[str, torch.Tensor]

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return the tensor with this name, which is on the meta device."""
        return self.tensors[name]

    @property
    def title(self) -> str:
        """Return the name of the model for error messages."""
        return type(self.config).__name__.removesuffix("Config")


@dataclass(frozen=True)
class Group:
    """Tensors that the converter `rule` computes together, by pattern and name. `first` is the first name."""

    rule: Any
    first: str
    takes: list[tuple[str, str]] = field(default_factory=list)
    renamings: tuple[Any, ...] = ()

    def convert(self, get: Callable[[str], torch.Tensor], outline: Outline) -> dict[str, torch.Tensor]:
        """Return the tensors that the rule computes, by name. `get` returns the input with a given name."""
        return self._apply([(pattern, name, get(name)) for pattern, name in self.takes], outline)

    def convert_meta(self, metas: Mapping[str, torch.Tensor], outline: Outline) -> dict[str, torch.Tensor]:
        """Apply the rule on the meta device, to find the names, shapes and dtypes of its results."""
        with torch.device("meta"):
            return self.convert(lambda name: metas[name].to("meta"), outline)

    def row(self, index: int, get: Callable[[str], torch.Tensor], outline: Outline) -> torch.Tensor:
        """Return row `index` of the result without computing the other rows. Call this only if `has_rows` is true."""
        taken = [(pattern, names[index], get(names[index])) for pattern, names in self._by_pattern.items()]
        return next(iter(self._apply(taken, outline).values()))

    @property
    def has_rows(self) -> bool:
        """Return whether rows of the result can be computed separately, such as one expert without the others."""
        first, *others = self.rule.operations
        stacks = type(first).__name__ == "MergeModulelist" and first.dim == 0 and len(self.rule.target_patterns) == 1
        keeps = all(
            (type(op).__name__ == "Concatenate" and op.dim > 0)
            or (type(op).__name__ == "Transpose" and min(op.dim0, op.dim1) > 0 and not op.check_dims)
            for op in others
        )
        return stacks and keeps and len({len(names) for names in self._by_pattern.values()}) == 1

    @property
    def keeps_rows(self) -> bool:
        """Return whether the rule only concatenates or stacks tensors and does not change rows along the last dim."""
        return all(type(op).__name__ in ("MergeModulelist", "Concatenate") for op in self.rule.operations)

    @functools.cached_property
    def _by_pattern(self) -> dict[str, list[str]]:
        return {pattern: [n for p, n in self.takes if p == pattern] for pattern, _ in self.takes}

    def _apply(self, taken: Iterable[tuple[str, str, torch.Tensor]], outline: Outline) -> dict[str, torch.Tensor]:
        rule = copy.deepcopy(self.rule)  # a rule stores its inputs
        for pattern, name, tensor in taken:
            rule.add_tensor(self.first, name, pattern, tensor)
        try:
            made = rule.convert(self.first, model=outline, config=outline.config)
        except (KeyError, ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{outline.title}: Transformers' rule for {self.first} ({self.rule.operations}) cannot convert "
                f"{', '.join(name for _, name in self.takes[:8])}: {error}"
            ) from error
        single = {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}
        return {_renamed(name, self.renamings): tensor for name, tensor in single.items()}


class Rules:
    """Applies Transformers' conversion rules for one model in one direction."""

    def __init__(self, outline: Outline, transforms: Iterable[Any]) -> None:
        self.outline, self.transforms = outline, tuple(transforms)
        self._converters = [t for t in self.transforms if hasattr(t, "operations")]
        self._renamings = tuple(t for t in self.transforms if not hasattr(t, "operations"))
        self._by_pattern = {pattern: t for t in self._converters for pattern in t.source_patterns}

    def used(self) -> list[Any]:
        """Return the rules that have matched a name in the files."""
        return [transform for transform in self.transforms if transform.was_used()]

    def load(self, keys: Iterable[str]) -> tuple[dict[str, str], list[Group], list[str], list[tuple[str, str]]]:
        """Return how to compute the model's tensors from files that contain tensors named `keys`.

        Returns:
            A tuple of four: the names in the files of tensors that are stored unchanged, keyed by model name; the
            groups that compute the other tensors; the names in the files that are not used; and (model name, name in
            the file) for each further copy of a tensor that is stored unchanged.
        """
        known = self.outline.tensors
        as_it_is: dict[str, str] = {}
        groups: dict[str, Group] = {}
        unused, again = [], []
        for key in sorted(keys, key=_natural):
            name, pattern = self._converted(_renamed(key, self._renamings))
            name = self._prefixed(name)
            if name not in known and key in known:
                name, pattern = self._prefixed(key), None  # the files hold the form that is used in memory
            if pattern is not None and name in known:
                groups.setdefault(name, Group(self._by_pattern[pattern], name)).takes.append((pattern, key))
            elif name not in known:
                unused.append(key)
            elif as_it_is.setdefault(name, key) != key:
                again.append((name, key))
        return as_it_is, list(groups.values()), unused, again

    def save(self, names: Iterable[str]) -> tuple[dict[str, str], list[Group]]:
        """Return the stored name of each unchanged tensor, by model name, and the groups that convert the others."""
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
        """Add or remove the base model's prefix if the model has the tensor only under the resulting name."""
        # Transformers also does this to existing names, and thus swaps two norms of Pixio's backbone.
        prefix = f"{self.outline.base_model_prefix}."
        candidates = (name, name.removeprefix(prefix), prefix + name)
        return next((each for each in candidates if each in self.outline.tensors), name)


def loading_rules(model: nn.Module, outline: Outline) -> Rules:
    """Return the rules that convert a Hugging Face directory to the tensors of `model`."""
    mapping = _conversion_mapping()
    return Rules(outline, [_Legacy()] if mapping is None else mapping.get_model_conversion_mapping(model))


def saving_rules(model: nn.Module, outline: Outline) -> Rules:
    """Return the rules for saving `model`: the rules that loaded it, or else those of its class, in reverse."""
    mapping = _conversion_mapping()
    if mapping is None or not hasattr(getattr(model, "config", None), "save_pretrained"):
        return Rules(outline, ())
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # The model was not loaded from files, so it is unknown whether a prefix applies.
        known = mapping.get_model_conversion_mapping(model, add_legacy=False)
        transforms = [transform for transform in known if type(transform).__name__ != "PrefixChange"]
    return Rules(outline, [transform.reverse_transform() for transform in reversed(transforms)])


def outline_of(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Outline:
    """Return the outline of a model with tensors of these names, shapes and dtypes. Their values are not used."""
    metas = {clean_name(name): tensor.detach().to("meta") for name, tensor in tensors.items()}
    return Outline(getattr(model, "config", None), getattr(model, "base_model_prefix", ""), metas)


class _Legacy:
    """Applies the renamings that all versions of Transformers share."""

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
    """Return a sort key that orders numbers in names by value, as Transformers orders the tensors of a group."""
    parts: list[tuple[int, Any, int]] = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        number = int(part[len(text) :] or -1)
        parts.append((1, text, number) if text or number < 0 else (0, number, 0))
    return parts


def _conversion_mapping() -> Any:
    """Return the Transformers module that contains the rules, or None if the installed version does not have it."""
    try:
        return importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return None

"""What a tiny model of any Transformers type is given, and what is asked of it.

    trained_class("bert")                the class of a type that is trained here
    without_noise(model)                 the model in train mode, with nothing dropped out
    batches(model)                       what makes a batch for its forward from a seed
    loss_of(outputs)                     one number from whatever it returns

A batch follows from the names in the signature of `forward` and from the configuration, by the rules in `_RULES`. Where
they leave a choice (whether time or features come first, how large an image is), the first of `_VARIANTS` that the
model takes is it; the last of them leave images and sounds out, which a model with a text takes, too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.tiny_models import class_names

BATCH, LENGTH = 2, 8
_PROBABILITIES = ("p", "mask_time_prob", "mask_feature_prob", "layerdrop", "label_noise_ratio")
FIRST_ID, LAST_ID = 5, 30
"""Ids that are no special tokens in a tiny configuration."""

_PREFERRED = (
    "ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForCTC", "ForMaskedLM", "ForQuestionAnswering",
    "ForImageClassification", "ForSemanticSegmentation", "ForObjectDetection", "ForAudioClassification",
    "ForVideoClassification", "ForPrediction",
)  # fmt: skip


def trained_class(model_type: str) -> str | None:
    """The class of a type that is trained: with a head if there is one, else the base model; None without any."""
    names = class_names(model_type)
    chosen = CLASSES.get(model_type) or next(
        (name for suffix in _PREFERRED for name in names if name.endswith(suffix)), None
    )
    return chosen or (names[0] if names else None)


def without_noise(model: nn.Module) -> nn.Module:
    """`model` in train mode, with probabilities of dropping and masking at zero."""
    configs = [model.config, *(getattr(m, "config", None) for m in model.modules())]
    configs += [getattr(c, name, None) for c in configs if c is not None for name in getattr(c, "sub_configs", ())]
    holders: list[Any] = [*model.modules(), *configs]
    for holder in holders:
        for name, value in list(vars(holder).items()) if holder is not None else ():
            if isinstance(value, float) and ("drop" in name or name in _PROBABILITIES):
                setattr(holder, name, 0.0)
            elif name == "use_cache":
                holder.use_cache = False
    return model.train()


def loss_of(outputs: Any) -> torch.Tensor:
    """The sum of the mean squares of every tensor that wants a gradient."""
    found: dict[int, torch.Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                found[id(value)] = value
        elif isinstance(value, Mapping):
            for item in value.values():
                visit(item)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            for item in vars(value).values():
                if isinstance(item, torch.Tensor | list | tuple):
                    visit(item)

    visit(outputs)
    if not found:
        raise ValueError("no output wants a gradient")
    return torch.stack([(v.abs() if v.is_complex() else v).float().square().mean() for v in found.values()]).sum()


@dataclass(frozen=True, slots=True)
class Variant:
    """A choice that the names leave open.

    Attributes:
        size: height and width of an image; None for the configuration's.
        images: images per sample, in an axis of their own; 0 for one without.
        time_first: whether spectrograms have time before features.
        frames: of a spectrogram; None for what the configuration says.
        mono: whether waves have an axis for one channel.
        only_text: whether images and sounds are left out.
    """

    size: int | None = None
    images: int = 0
    time_first: bool = True
    frames: int | None = 64
    mono: bool = False
    only_text: bool = False


_VARIANTS = (
    Variant(), Variant(time_first=False), Variant(mono=True), Variant(frames=None, time_first=False),
    Variant(frames=None), Variant(size=64), Variant(images=2), Variant(size=128), Variant(size=224),
    Variant(images=2, size=64), Variant(only_text=True),
)  # fmt: skip


class Maker:
    """Makes the tensors of one batch."""

    def __init__(self, model: nn.Module, variant: Variant, seed: int) -> None:
        self.model, self.variant = model, variant
        self.config: Any = model.config
        self.names = list(inspect.signature(type(model).forward).parameters)
        self.generator = torch.Generator().manual_seed(seed)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that the configuration or a part of it has."""
        parts = [self.config]
        for part in parts:
            parts += [getattr(part, name, None) for name in getattr(part, "sub_configs", {}) or ()]
        for part in parts:
            for name in names:
                value = getattr(part, name, None)
                if value is not None:
                    return value
        return default

    def normal(self, *shape: int) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(*shape, generator=self.generator)

    def ids(self, length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
        """Token ids."""
        last = min(LAST_ID, int(self.get("vocab_size", default=LAST_ID)))
        length = 48 if self.config.model_type == "reformer" else length  # the product of its axial positions
        ids = torch.randint(FIRST_ID, last, (batch, length), generator=self.generator)
        for name in ("image_token_id", "image_token_index", "video_token_id", "audio_token_id"):
            ids[ids == self.get(name, default=-1)] = FIRST_ID - 1
        return ids

    def first(self, kind: type[nn.Module], default: int) -> int:
        """What the first convolution of a kind takes."""
        found = next((module for module in self.model.modules() if isinstance(module, kind)), None)
        return int(found.in_channels) if found is not None else default  # type: ignore[arg-type]

    def image_size(self) -> tuple[int, int]:
        """Height and width of an image."""
        size = self.variant.size or self.get("image_size", "img_size", "input_size", default=64)
        if isinstance(size, Mapping):
            size = (size["height"], size["width"])
        return (size, size) if isinstance(size, int) else tuple(size)[-2:]

    def image(self) -> torch.Tensor:
        """Pixels of a batch of images."""
        count = (self.variant.images,) if self.variant.images else ()
        channels = self.get("num_channels", default=self.first(nn.Conv2d, 3))
        return self.normal(
            BATCH, *count, channels if isinstance(channels, int) and channels < 7 else 3, *self.image_size()
        )

    def video(self) -> torch.Tensor:
        """Pixels of a batch of videos."""
        frames = self.get("num_frames", "frames_per_clip", default=4)
        return self.normal(BATCH, frames, 3, *self.image_size())

    def patches(self) -> torch.Tensor:
        """Pixels of images as a list of flat patches, four by four for each image."""
        patch = self.get("patch_size", default=14)
        depth = self.get("temporal_patch_size", default=1)
        return self.normal(BATCH * 16, self.get("in_channels", "num_channels", default=3) * depth * patch**2)

    def pixels(self) -> torch.Tensor:
        """Of patches, videos or images, as the type has them."""
        if "image_grid_thw" in self.names or "grid_thw" in self.names:
            return self.patches()
        return self.video() if self.get("num_frames", "frames_per_clip", "tubelet_size") else self.image()

    def features(self) -> torch.Tensor:
        """Spectrograms."""
        bins = self.get("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim",
                        "input_channels", "mel_bins", "input_size", "input_dim", default=80)  # fmt: skip
        frames = self.variant.frames or 2 * self.get("max_source_positions", "max_length", default=64)
        if self.variant.time_first:
            return self.normal(BATCH, frames, bins)
        return self.normal(BATCH, self.first(nn.Conv1d, bins), frames)

    def wave(self) -> torch.Tensor:
        """Sound, or its spectrogram where a configuration has a number of bins."""
        if self.get("num_mel_bins") and self.config.model_type.startswith("audio-spectrogram"):
            return self.normal(BATCH, self.get("max_length"), self.get("num_mel_bins"))
        return self.normal(BATCH, *([1] if self.variant.mono else []), 3200)

    def past(self) -> torch.Tensor:
        """A time series."""
        length = self.get("context_length", default=32)
        if "past_time_features" in self.names:
            return self.normal(BATCH, length + max(self.get("lags_sequence", default=[0])))
        channels = self.get("num_input_channels")
        return self.normal(BATCH, length, *([channels] if channels else []))

    def past_features(self) -> torch.Tensor:
        """What is known about the times of a series."""
        length = self.get("context_length") + max(self.get("lags_sequence"))
        return self.normal(BATCH, length, self.get("num_time_features", default=0))

    def with_images(self, batch: dict[str, Any]) -> dict[str, Any]:
        """`batch` with a token for every feature of its images, where the model wants those."""
        token = self.get("image_token_id", "image_token_index")
        features = getattr(self.model, "get_image_features", None)
        if token is None or features is None or "pixel_values" not in batch or "input_ids" not in batch:
            return batch
        wanted = set(inspect.signature(features).parameters) | {"image_sizes"}
        with torch.no_grad():
            found = features(**{key: value for key, value in batch.items() if key in wanted - {"input_ids"}})
        found = getattr(found, "pooler_output", found)
        tensors = list(found) if isinstance(found, list | tuple) else [found]
        count = sum(tensor.numel() // tensor.size(-1) for tensor in tensors) // BATCH
        ids = torch.cat([torch.full((BATCH, count), int(token)), batch["input_ids"]], dim=1)
        kinds = (ids == token).long()
        more = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in self.names}
        return batch | {"input_ids": ids} | more


def _grid(make: Maker) -> torch.Tensor:
    return torch.tensor([[1, 4, 4]] * BATCH)


def _bbox(make: Maker) -> torch.Tensor:
    return torch.tensor([1, 2, 5, 7]).expand(BATCH, LENGTH, 4).clone()


_TEXT: dict[str, Callable[[Maker], Any]] = {
    "input_ids": lambda make: make.ids(),
    "decoder_input_ids": lambda make: make.ids(),
    "bbox": _bbox,
    "lang_ids": lambda make: torch.zeros(BATCH, dtype=torch.long),
}
_RULES: dict[str, Callable[[Maker], Any]] = _TEXT | {
    "pixel_values": lambda make: make.pixels(),
    "pixel_values_videos": lambda make: make.video(),
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "image_sizes": lambda make: torch.tensor([make.image_size()] * BATCH),
    "input_values": lambda make: make.wave(),
    "input_features": lambda make: make.features(),
    "past_values": lambda make: make.past(),
    "past_time_features": lambda make: make.past_features(),
    "past_observed_mask": lambda make: torch.ones_like(make.past()),
    "future_values": lambda make: make.normal(BATCH, make.get("prediction_length", default=4)),
    "future_time_features": lambda make: make.normal(
        BATCH, make.get("prediction_length", default=4), make.get("num_time_features", default=0)
    ),
    "visual_feats": lambda make: make.normal(BATCH, 4, make.get("visual_feat_dim", default=2048)),
    "visual_pos": lambda make: make.normal(BATCH, 4, 4),
    "flattened_patches": lambda make: make.normal(BATCH, 6, 2 + make.get("patch_embed_hidden_size", default=768)).abs(),
    "task_inputs": lambda make: make.ids(make.get("task_seq_len", default=77)),
    "prompt_pixel_values": lambda make: make.image(),
    "prompt_masks": lambda make: make.image(),
    "qformer_input_ids": lambda make: make.ids(),
    "states": lambda make: make.normal(BATCH, 4, make.get("state_dim", default=17)),
    "actions": lambda make: make.normal(BATCH, 4, make.get("act_dim", default=4)),
    "rewards": lambda make: make.normal(BATCH, 4, 1),
    "returns_to_go": lambda make: make.normal(BATCH, 4, 1),
    "timesteps": lambda make: torch.arange(4).expand(BATCH, 4).clone(),
    "latents": lambda make: make.normal(BATCH, make.first(nn.Conv1d, 32), 8),
}
_FOR_SERIES = ("past_observed_mask", "future_values", "future_time_features")
CLASSES: dict[str, str] = {"speecht5": "SpeechT5ForSpeechToText"}


def batches(model: nn.Module) -> Callable[[int], dict[str, Any]]:
    """From a seed to a batch that `model` takes.

    Raises:
        ValueError: it takes none of those tried here; the text has the first error.
    """
    errors: list[str] = []
    for variant in _VARIANTS:
        trial = copy.deepcopy(model)
        try:
            loss_of(trial(**_batch(trial, variant, 0))).backward()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
            continue
        return lambda seed, chosen=variant: _batch(model, chosen, seed)  # type: ignore[misc]
    raise ValueError(f"no batch made here suits it: {errors[0][:160]}")


def _batch(model: nn.Module, variant: Variant, seed: int) -> dict[str, Any]:
    make = Maker(model, variant, seed)
    rules = _TEXT if variant.only_text else _RULES
    wanted = [name for name in make.names if name in rules]
    if "past_time_features" not in wanted:
        wanted = [name for name in wanted if name not in _FOR_SERIES]
    text = getattr(model, "main_input_name", "input_ids") == "input_ids"
    if "pixel_values" in wanted and "pixel_values_videos" in wanted:
        wanted.remove("pixel_values_videos")
    if "input_values" in wanted and "input_features" in wanted:
        wanted.remove("input_features")
    batch = {name: rules[name](make) for name in wanted if not (text and name == "input_features")}
    if "grid_thw" in batch and "hidden_states" in make.names:
        batch["hidden_states"] = make.patches()
    return make.with_images(batch)

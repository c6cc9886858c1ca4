"""Trains models of torchvision and timm as `tests.model_types` does, by hand: neither is installed for tests.

    pip install --no-deps --target DIR torchvision==0.28.0 timm==1.0.31
    PYTHONPATH=DIR python -m tests.vision_models              all of them, into the record
    PYTHONPATH=DIR python -m tests.vision_models resnet18     some of them

Then `python -m tests.model_types --page` puts them on the page.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import sys
from typing import Any

import torch
from torch import nn

from tests.distributed import run_ranks
from tests.model_types import ROUNDING, VISION_RECORD, Row, compare

MODELS = {
    "torchvision": (
        "resnet18", "resnext50_32x4d", "efficientnet_b0", "efficientnet_v2_s", "vit_b_16", "swin_t", "swin_v2_t",
        "convnext_tiny", "regnet_y_400mf", "mobilenet_v2", "mobilenet_v3_small", "densenet121", "maxvit_t",
        "googlenet", "inception_v3", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "vgg11_bn",
    ),
    "timm": (
        "resnet18", "efficientnet_b0", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto",
        "regnety_002", "mobilenetv3_small_050", "mobilenetv4_conv_small", "densenet121", "maxvit_rmlp_pico_rw_256",
        "deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "mixer_s32_224", "pvt_v2_b0", "levit_128s",
        "mobilevit_xxs", "edgenext_xx_small", "cait_xxs24_224", "poolformer_s12", "hrnet_w18_small", "fastvit_t8",
        "hiera_tiny_224",
    ),
}  # fmt: skip
SIZES = {"inception_v3": 299, "maxvit_rmlp_pico_rw_256": 256, "googlenet": 96}
WANT_224 = ("vit", "224", "maxvit", "levit")
"""Parts of names of models that take images of one size only; the others take 64 x 64."""

_OPERATORS = (
    "nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "qroi_align", "_ps_roi_align_backward",
    "_ps_roi_pool_backward", "_roi_align_backward", "_roi_pool_backward",
)  # fmt: skip


def build(library: str, name: str) -> nn.Module:
    """A model with five classes, in train mode, with nothing dropped out."""
    # The wheel is made for torch with CUDA: beside one without, its operators do not load, but models need none.
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        if not hasattr(torch.ops.torchvision, operator):
            operators.define(f"{operator}(Tensor a) -> Tensor")
    module: Any = importlib.import_module(library)
    torch.manual_seed(0)
    model: nn.Module = (
        module.models.get_model(name, weights=None, num_classes=5)
        if library == "torchvision"
        else module.create_model(name, num_classes=5)
    )
    for inner in model.modules():
        for key, value in list(vars(inner).items()):
            if isinstance(value, float) and ("drop" in key or key == "p"):
                setattr(inner, key, 0.0)
    return model.train()


def compare_model(library: str, name: str) -> Row:
    """Its row; one in float64 where float32 is further apart than rounding."""
    size = SIZES.get(name) or (224 if any(part in name for part in WANT_224) and "mobilevit" not in name else 64)
    argument = next(iter(inspect.signature(build(library, name).forward).parameters))

    def row(dtype: torch.dtype) -> Row:
        def batch(seed: int) -> dict[str, Any]:
            generator = torch.Generator().manual_seed(seed)
            return {argument: torch.randn(2, 3, size, size, generator=generator).to(dtype)}

        return compare(build(library, name).to(dtype), batch)

    try:
        found = row(torch.float32)
        if found["train"] > ROUNDING:
            found["double"] = row(torch.float64)["train"]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:160]}
    return {"inputs": [argument], "class": f"{size} x {size}"} | found


def main(names: list[str]) -> None:
    """Measure, and keep the rows with the versions of the libraries."""
    record: dict[str, Any] = json.loads(VISION_RECORD.read_text()) if VISION_RECORD.exists() else {}
    for library, models in MODELS.items():
        for name in models:
            if names and name not in names:
                continue
            [row, _] = run_ranks(compare_model, 2, library, name, timeout=400)
            version = importlib.metadata.version(library)
            record[f"{library} {version} {name}"] = row
            print(library, name, row, flush=True)
            lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(record.items()))
            VISION_RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    importlib.import_module("tests.vision_models").main(sys.argv[1:])  # workers know it under this name

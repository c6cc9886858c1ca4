"""Runs a script as `__main__`, and keeps what its Accelerator saw: losses, and the weights it ends with.

    python tests/others/observed.py OUTPUT SCRIPT [ARGUMENT ...]

OUTPUT gets a file per rank, of `torch.save`: `losses`, `weights` (of rank 0) and `sharded`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Memory:
    """What an accelerator's memory counters would say, for scripts that cannot do without one."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0


def prepare_libraries() -> None:
    """What differs between two libraries by design is made equal: the order that a seed stands for, and where images
    are cut. And nothing is downloaded: a small model without training stands for timm's; nor measured: memory counters
    say nothing.
    """

    def order(self: Any) -> Iterator[int]:
        yield from torch.randperm(len(self.data_source), generator=torch.Generator().manual_seed(0)).tolist()

    torch.utils.data.RandomSampler.__iter__ = order  # type: ignore[method-assign]
    if "timm" in Path(sys.argv[0]).read_text():
        timm, create = importlib.import_module("timm"), importlib.import_module("timm").create_model
        timm.create_model = lambda _, pretrained, **options: create("test_resnet", **options)  # type: ignore[attr-defined]
        crop: Any = importlib.import_module("torchvision.transforms").RandomResizedCrop
        crop.get_params = staticmethod(lambda *_: (2, 3, 24, 20))
    if "peak_mem" in sys.argv[0]:
        helpers: Any = importlib.import_module("accelerate.utils")
        helpers.is_npu_available = lambda: True
        torch.npu = Memory()  # type: ignore[attr-defined]


def observe(module: str, output: str) -> None:
    """Wrap a package's Accelerator."""
    accelerator_class: Any = importlib.import_module(module).Accelerator
    backward, end_training = accelerator_class.backward, accelerator_class.end_training
    losses: list[float] = []

    def kept_backward(self: Any, loss: torch.Tensor, **options: Any) -> None:
        losses.append(loss.item())
        backward(self, loss, **options)

    def kept_end(self: Any) -> None:
        models = self._models
        weights = {k: v.clone() for model in models for k, v in self.get_state_dict(model).items()}
        sharded = any(isinstance(p, DTensor) for model in models for p in model.parameters())
        rank = os.environ.get("RANK", "0")
        torch.save({"losses": losses, "weights": weights, "sharded": sharded}, f"{output}/rank{rank}.pt")
        end_training(self)

    accelerator_class.backward, accelerator_class.end_training = kept_backward, kept_end


def main() -> None:
    output = sys.argv[1]
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).absolute().parent))  # as Python does for a script
    prepare_libraries()
    for module in ("accelerate", "fullshard"):
        observe(module, output)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

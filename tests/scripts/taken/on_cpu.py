"""Run a program that wants an accelerator on a CPU: `on_cpu.py SCRIPT.py ARGUMENTS` or `on_cpu.py -m MODULE ARGUMENTS`.

Functions that `torch.cpu` lacks do nothing or return a constant. The accelerator that torch reports is the CPU, and the
backend of process groups is Gloo. Tests use this file with both engines.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.fsdp
from torch import distributed as dist


def prepare() -> None:
    torch.manual_seed(0)
    answers: dict[str, Any] = {"get_device_name": "cpu", "get_device_properties": SimpleNamespace(total_memory=1)}
    answers |= {"memory_stats": {}, "empty_cache": None, "reset_peak_memory_stats": None, "manual_seed_all": None}
    answers |= dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_reserved", "max_memory_allocated"), 0)
    answers |= {"mem_get_info": (0, 1), "ipc_collect": None, "reset_max_memory_allocated": None}
    torch.cpu.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cpu.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *_, _answer=answer, **__: _answer)
    torch._utils._get_available_device_type = lambda: "cpu"
    begin = dist.init_process_group

    def begin_over_gloo(backend: str | None = None, *rest: Any, **options: Any) -> None:
        options.pop("device_id", None)
        begin("gloo", *rest, **options)

    dist.init_process_group = begin_over_gloo
    wait = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: wait(group, async_op)
    count = torch.histc  # of whole numbers a CPU makes no histogram
    torch.histc = lambda x, *rest, **options: count(x.double(), *rest, **options).to(x.dtype)
    unit = dist.fsdp.FSDPModule
    if unit.__module__.startswith("torch."):  # with a divide factor, torch's engine asks Gloo for a sum it cannot make
        divide = unit.set_gradient_divide_factor

        def divide_first(self: Any, factor: float) -> None:
            divide(self, factor)
            self.set_force_sum_reduction_for_comms(True)

        unit.set_gradient_divide_factor = divide_first


if __name__ == "__main__":
    prepare()
    module = sys.argv[1] == "-m"
    sys.argv[:] = sys.argv[2:] if module else sys.argv[1:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")

"""GRPO of TRL that generates with a real vLLM on CPUs: `grpo_vllm.py MODEL PLACE colocate|server all|lora DTYPE [URL]`.

Print, as JSON, the mean reward of each step and how far vLLM's log-probabilities are from the trainer's.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import peft
import torch
from grpo_trainer import grpo
from safetensors.torch import save_file
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from vllm_reload import reload

place, output, mode, what, dtype, *url = sys.argv[1:]


def sync_weights(self: Any) -> None:
    """Load the stream as a whole: TRL's `load_weights` of each tensor fails once vLLM on a CPU has packed weights."""
    reload(self.llm.llm_engine.model_executor.driver_worker.model_runner, self._iter_named_params())
    self.llm.reset_prefix_cache()


def update_named_params(self: Any, _metadata: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Send the stream as a file: TRL's own way is NCCL, which needs a CUDA device."""
    save_file(dict(weights), f"{output}/weights.safetensors")
    call = {"method": "reload_file", "args": [f"{output}/weights.safetensors"]}
    self._post(f"{self.base_url}/collective_rpc", json=call)


VLLMGeneration.sync_weights = sync_weights if mode == "colocate" else VLLMGeneration.sync_weights
VLLMClient.init_communicator, VLLMClient.update_named_params = lambda *_, **__: None, update_named_params
vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=dtype)  # vLLM would choose bfloat16


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: the share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


lora = peft.LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = grpo(
    place,
    prompts=64,
    reward=even,
    lora=lora if what == "lora" else None,
    output_dir=output,
    vllm_mode=mode,
    **({"vllm_server_base_url": url[0]} if url else {}),
    vllm_max_model_length=64,
    per_device_train_batch_size=16,
    num_generations=8,
    max_completion_length=8,
    max_steps=24 if what == "lora" else 16,
    lr_scheduler_type="constant",
)
trainer.train()
if trainer.is_world_process_zero():
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    found = [(entry["reward"], entry["sampling/sampling_logp_difference/max"]) for entry in history]
    print("STEPS", json.dumps(found), flush=True)
os._exit(0)  # vLLM's own end would destroy the group of the processes

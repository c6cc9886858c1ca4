"""GRPO that generates with vLLM, as people have it; each time the engine is sent weights they are exported, too."""

import sys

import peft
import torch
from grpo_trainer import grpo
from trl.generation.vllm_client import VLLMClient

from fullshard.checkpoint import export_hf

place, output, mode, what, *ports = sys.argv[1:]
connect = VLLMClient.init_communicator
# TRL sends weights over NCCL, and asks for a CUDA device before it does.
VLLMClient.init_communicator = lambda self, device: connect(self, device="cuda")
lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
trainer = grpo(
    place,
    prompts=16,
    reward=lambda completions, **_: [sum(map(ord, text)) % 7 / 7 for text in completions],
    lora=lora if what == "lora" else None,
    output_dir=output,
    vllm_mode=mode,
    **({"vllm_server_base_url": f"http://127.0.0.1:{ports[0]}", "vllm_group_port": int(ports[1])} if ports else {}),
    per_device_train_batch_size=2,
    num_generations=2,
    max_completion_length=5,
    max_steps=3,
)
count, sync = 0, trainer.vllm_generation.sync_weights


def watched():
    global count
    export_hf(f"{output}/expected-{count}", model=trainer.model)
    count += 1
    sync()


trainer.vllm_generation.sync_weights = watched
before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
trainer.train()
after = dict(trainer.model.named_parameters())
if not all(torch.equal(after[name].full_tensor(), weight) for name, weight in before.items()):
    raise SystemExit("the engine's weights were merged into those that train")
for entry in trainer.state.log_history:
    if trainer.is_world_process_zero() and "sampling/sampling_logp_difference/max" in entry:
        print("differs by", entry["sampling/sampling_logp_difference/max"], flush=True)

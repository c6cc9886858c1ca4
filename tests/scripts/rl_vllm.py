"""Train a model on every rank and generate with vLLM in the same processes: `rl_vllm.py MODEL PLACE WHAT DTYPE`.

WHAT is `all`, `merged` (LoRA, merged into what is sent) or `adapters` (vLLM reads the adapters alone). Print, as JSON,
the largest differences between vLLM's log-probabilities and the trainer's, before and after each update.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import peft
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm_reload import reload

import fullshard
from fullshard.checkpoint.adapters import save_adapters

STEPS, LENGTH = 3, 12
place, output, what, dtype = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)

model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
layers = model.model.layers
if what != "all":
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
for layer in layers:
    fullshard.fully_shard(layer)
fullshard.fully_shard(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
engine = LLM(
    place,
    skip_tokenizer_init=True,
    dtype=dtype,
    enforce_eager=True,
    max_model_len=64,
    max_num_seqs=8,
    enable_lora=what == "adapters",
    max_lora_rank=8,
    distributed_executor_backend="external_launcher",
    logprobs_mode="processed_logprobs",
)
sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, logprobs=0, detokenize=False)
prompts = torch.randint(3, model.config.vocab_size, (4, 6), generator=torch.Generator().manual_seed(rank))


def update(step: int) -> LoRARequest | None:
    """Send vLLM the weights. Return what its requests must name."""
    if what == "adapters":
        save_adapters(f"{output}/adapter-{step}", model)
        return LoRARequest(f"step {step}", step + 1, f"{output}/adapter-{step}")
    weights = fullshard.stream_weights(model, dtype=dtype)
    reload(engine.llm_engine.model_executor.driver_worker.model_runner, weights)
    engine.reset_prefix_cache()
    return None


def generate(adapters: LoRARequest | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate while the trainer sleeps. Return tokens, and the log-probabilities of the generated ones."""
    fullshard.park(model, optimizer)
    asked = [{"prompt_token_ids": row.tolist()} for row in prompts]
    answers = [one.outputs[0] for one in engine.generate(asked, sampling, use_tqdm=False, lora_request=adapters)]
    engine.sleep()
    fullshard.unpark(model, optimizer)
    engine.wake_up()
    tokens = torch.tensor([list(answer.token_ids) for answer in answers])
    theirs = [[place[int(t)].logprob for place, t in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
    return torch.cat([prompts, tokens], 1), torch.tensor(theirs)


def differs(tokens: torch.Tensor, theirs: torch.Tensor) -> float:
    logits = model(tokens[:, :-1]).logits[:, -LENGTH:].log_softmax(-1)
    return float((logits.gather(-1, tokens[:, -LENGTH:, None])[..., 0] - theirs).abs().max())


found, adapters = [], update(0)
for step in range(1, STEPS + 1):
    loss = model(tokens := generate(adapters)[0], labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        before = differs(*generate(adapters))  # with weights of the last step
        adapters = update(step)
        found.append((before, differs(*generate(adapters))))
every: list[Any] = [None] * dist.get_world_size()
dist.all_gather_object(every, found)
if rank == 0:
    print("DIFFERS", json.dumps(every), flush=True)
dist.barrier()
os._exit(0)  # vLLM's own end would destroy the group of the processes

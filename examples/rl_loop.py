"""Reinforcement learning in a loop of your own: GRPO, with the weights sent to an inference engine in every step.

    fullshard launch --num_processes 2 examples/rl_loop.py

The policy learns to answer with digits. It shares its device with the engine, so each of them sleeps while the other
one works. The engine is an unsharded copy of the model on every rank here. vLLM and SGLang take the same weights.
"""

import argparse
import os

import small
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fullshard
from fullshard.checkpoint import export_hf


class Policy:
    """The model that trains: six methods, which every loop of reinforcement learning needs."""

    def __init__(self, name: str, device: torch.device, learning_rate: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
        for layer in self.model.model.layers:
            fullshard.fully_shard(layer)
        fullshard.fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)

    def train(self, tokens: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: float = 0.2) -> None:
        """Update once on `tokens` [answers, length], whose last tokens had the log-probabilities `old`."""
        new = log_probabilities(self.model(tokens[:, :-1]).logits[:, -old.shape[1] :], tokens[:, -old.shape[1] :])
        ratio, advantages = (new - old).exp(), advantages[:, None]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update_weights(self, engine: "Engine") -> None:
        """Send all weights to the engine, one at a time."""
        for name, weight in fullshard.stream_weights(self.model):
            engine.load_weights([(name, weight)])

    def save(self, directory: str) -> None:
        """Write a directory that `from_pretrained` and inference engines read."""
        export_hf(directory, model=self.model)

    def sleep(self) -> None:
        """Leave the device to the engine: weights, gradients and optimizer state move to the host."""
        fullshard.park(self.model, self.optimizer)

    def wake(self) -> None:
        """Move everything back to the device."""
        fullshard.unpark(self.model, self.optimizer)


class Engine:
    """What generates. Yours: vLLM with `enable_sleep_mode`, or SGLang, whose methods have similar names."""

    def __init__(self, name: str) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name)).eval()

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.model.load_state_dict(dict(weights), strict=False)

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `prompts` with answers of `length` tokens, and the log-probabilities of these tokens."""
        self.model.to(prompts.device)  # wakes up
        words = {"do_sample": True, "top_k": 0, "max_new_tokens": length, "min_new_tokens": length}
        tokens = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), **words)
        logits = self.model(tokens[:, :-1]).logits[:, -length:]
        self.model.to("cpu")  # sleeps
        return tokens, log_probabilities(logits, tokens[:, -length:])


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def digits(answer: str) -> float:
    """The reward, yours to replace: the share of an answer's characters that are digits."""
    return sum(letter in "0123456789" for letter in answer) / max(1, len(answer))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--output", default="out/rl")
args = parser.parse_args()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(dist.get_rank())

name = small.model()  # yours: "Qwen/Qwen3-0.6B", or a directory
tokenizer = AutoTokenizer.from_pretrained(name)
questions = [row["prompt"] for row in small.prompts()][dist.get_rank() :: dist.get_world_size()]
policy, engine = Policy(name, device, learning_rate=1e-2), Engine(name)
if dist.get_rank() == 0:
    print(fullshard.describe(policy.model))
asked, group, length = 4, 8, 8  # questions in a step, answers to each of them, tokens of an answer

for step in range(1, args.steps + 1):
    policy.update_weights(engine)
    policy.sleep()
    batch = [question for question in questions[(step - 1) * asked : step * asked] for _ in range(group)]
    prompts = tokenizer(batch, return_tensors="pt")["input_ids"].to(device)
    tokens, old = engine.generate(prompts, length)
    policy.wake()
    answers = tokenizer.batch_decode(tokens[:, -length:])
    rewards = torch.tensor([digits(answer) for answer in answers], device=device).view(asked, group)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    policy.train(tokens, old, advantages.flatten())
    total = rewards.mean()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {step}  reward {total / dist.get_world_size():.3f}  {answers[0]!r}")
policy.save(args.output)
dist.destroy_process_group()

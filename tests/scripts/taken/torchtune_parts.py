"""Components for the configurations of torchtune's recipes: a small Llama, token lists, and constant adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from torchtune import training
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.modules.peft import lora as adapters

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32},
    **{"max_seq_len": 64, "intermediate_dim": 64},
}
training.get_memory_stats = lambda *_, **__: {}  # an error on CPUs
training.log_memory_stats = lambda *_, **__: None


def constant(self: Any) -> None:
    """Use constants, because the engines draw different random numbers for a sharded parameter."""
    with torch.no_grad():
        self.lora_a.weight.fill_(0.02)
        self.lora_b.weight.fill_(0.01)


adapters.LoRALinear.initialize_parameters = constant


def model() -> Any:
    return llama3_2(**SIZES)


def lora(**options: Any) -> Any:
    return lora_llama3_2(**options, **SIZES)


class Tokenizer:
    pad_id = 0
    max_seq_len = None


class Data(Dataset):
    """Return 32 samples or pairs of different lengths."""

    def __init__(self, tokenizer: Any = None, pairs: bool = False, packed: bool = False) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(index)
        found = {}
        for side in ("chosen", "rejected"):
            tokens = torch.randint(1, 64, (6 + index % 5,), generator=generator).tolist()
            found |= {f"{side}_input_ids": tokens, f"{side}_labels": [-100, -100, *tokens[2:]]}
        if self.pairs:
            return found
        return {"tokens": found["chosen_input_ids"], "labels": found["chosen_labels"]}


if __name__ == "__main__":
    import sys

    torch.manual_seed(0)
    state = model().state_dict()
    torch.save(
        {name: torch.randn_like(value) * 0.05 if value.dim() > 1 else value for name, value in state.items()},
        sys.argv[1],
    )

"""What the examples train on: a small model and small data, made on the spot, so that nothing is downloaded.

None of it is needed with a model and data of your own: each example says which line to change.
"""

from __future__ import annotations

import atexit
import random
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '=' }}{% endif %}{% endfor %}"
)


def model() -> str:
    """A directory with a small Llama, its weights the same on every rank, and a tokenizer whose tokens are bytes."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.1, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    directory = tempfile.mkdtemp(prefix="fullshard-example-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights = LlamaForCausalLM(config).state_dict()
    # Not by save_pretrained, which writes on rank 0 only.
    config.to_json_file(Path(directory, "config.json"))
    save_file(weights, Path(directory, "model.safetensors"), metadata={"format": "pt"})
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    return directory


def text(pieces: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Pieces of the standard library's source code; a token is a byte."""
    source = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source += path.read_bytes()
        if len(source) >= pieces * length:
            break
    rows = torch.frombuffer(source[: pieces * length], dtype=torch.uint8).long().view(pieces, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def chats(count: int = 512) -> Any:
    """A dataset of chats that add two digits."""
    from datasets import Dataset

    return Dataset.from_list(
        [{"messages": [_says("user", f"{a}+{b}"), _says("assistant", f"{a + b}")]} for a, b in _sums(count)]
    )


def preferences(count: int = 512) -> Any:
    """A dataset of pairs: an answer in digits is preferred to one in letters."""
    from datasets import Dataset

    return Dataset.from_list(
        [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": "I" * (a + b + 1)} for a, b in _sums(count)]
    )


def prompts(count: int = 512) -> Any:
    """A dataset of sums without their answers."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{a}+{b}="} for a, b in _sums(count)])


def images(count: int = 256, size: int = 32) -> list[dict[str, Any]]:
    """Noise in which one of the three colors is brighter; its number is the label."""
    generator = torch.Generator().manual_seed(0)
    made: list[dict[str, Any]] = []
    for i in range(count):
        picture = torch.rand(3, size, size, generator=generator)
        picture[i % 3] += 1.0
        made.append({"pixel_values": picture, "labels": i % 3})
    return made


def _sums(count: int) -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(draw.randrange(10), draw.randrange(10)) for _ in range(count)]


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}

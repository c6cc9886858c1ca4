"""Create small substitutes for files that programs would download: `small_files.py titan|verl|rl PLACE`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "user", "assistant", ":"]
CHAT = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"


def words(count: int) -> list[str]:
    return [f"w{index}" for index in range(count)]


def text(length: int, count: int) -> str:
    return " ".join(random.choices(words(count), k=length))


def tokenizer(count: int) -> Tokenizer:
    known = {word: index for index, word in enumerate([*SPECIAL, *words(count)])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<s>", "</s>"])
    return made


def titan(place: Path) -> None:
    (place / "tokens").mkdir(parents=True)
    tokenizer(2000).save(str(place / "tokens" / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (place / "tokens" / "tokenizer_config.json").write_text(json.dumps(ends))
    (place / "c4_test").mkdir()
    lines = [json.dumps({"text": text(80, 2000)}) for _ in range(200)]
    (place / "c4_test" / "data.json").write_text("\n".join(lines))


def fast_tokenizer(count: int) -> Any:
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(count), **names)
    fast.chat_template = CHAT + "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
    return fast


def rl(place: Path) -> None:
    """Write `llama`, a dense model, and `moe`, a mixture of experts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    fast = fast_tokenizer(57)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    sizes |= {"vocab_size": len(fast), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    for name, model in (
        ("llama", LlamaForCausalLM(LlamaConfig(**sizes))),
        ("moe", Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))),
    ):
        model.save_pretrained(place / name)
        fast.save_pretrained(place / name)


def verl(place: Path) -> None:
    import pandas as pd
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    place.mkdir(parents=True)
    fast = fast_tokenizer(90)
    fast.save_pretrained(place / "model")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(fast), pad_token_id=0, bos_token_id=2, eos_token_id=3, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(place / "model")
    roles = ("user", "assistant")
    said = [[{"role": role, "content": text(4 + row % 5, 90)} for role in roles] for row in range(32)]
    pd.DataFrame({"messages": said}).to_parquet(place / "train.parquet")


if __name__ == "__main__":
    random.seed(0)
    {"titan": titan, "verl": verl, "rl": rl}[sys.argv[1]](Path(sys.argv[2]))

"""Well-known models by name, with the fields of each published `config.json` that determine its shapes."""

import tomllib
from pathlib import Path
from typing import Any

Values = dict[str, Any]

_TABLE = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))

MODELS: dict[str, Values] = _TABLE["models"]
"""The fields of each model by its name."""

ALIASES: dict[str, str] = {alias: name for name, aliases in _TABLE["aliases"].items() for alias in aliases}
"""Other names for the same shapes: fine-tuned versions, and names without the size."""


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int = 32000, **more: Any) -> Values:
    """Return the `config.json` fields of a decoder like Llama. Fields in `more` are added or replace others."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }

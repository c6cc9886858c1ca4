"""The `fullshard chat` command, which talks to a trained model in the terminal."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import fullshard.recipes  # noqa: F401  # drops messages of other libraries
from fullshard.core.errors import ConfigError, own_errors
from fullshard.core.files import read_object
from fullshard.core.imports import import_extra, require_hub


def chat(
    model: Annotated[
        str, typer.Argument(help="The output of train or sft, an adapter, a Hugging Face directory, or a hub name.")
    ],
    *,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.", min=0.0)] = 0.7,
    top_p: Annotated[float, typer.Option(help="Probability of the tokens to sample from.", min=0.0, max=1.0)] = 0.9,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer in tokens.", min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Chat with a model that was trained. An empty line ends the chat.

    A model without a chat template continues the text that you enter.
    """
    transformers, network, tokenizer = _load(model)
    transformers.set_seed(seed)
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": max_new_tokens, "streamer": streamer}
    options |= {"temperature": temperature, "top_p": top_p} if temperature else {}
    has_template = tokenizer.chat_template is not None
    if system and not has_template:
        raise ConfigError(f"{model} has no chat template, so --system has no effect", hint="omit --system")
    turns = [{"role": "system", "content": system}] if system else []
    what = "answers" if has_template else "has no chat template and continues the text that you enter"
    typer.echo(f"{model} {what}; an empty line ends the chat", err=True)
    while said := _read():
        turns.append({"role": "user", "content": said})
        form = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        asked = tokenizer.apply_chat_template(turns, **form) if has_template else tokenizer(said, return_tensors="pt")
        inputs = {name: asked[name].to(network.device) for name in ("input_ids", "attention_mask")}
        answer = network.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
        turns.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})


def _load(name: str) -> tuple[Any, Any, Any]:
    """Return `transformers`, a model, with its adapter if it has one, and its tokenizer."""
    place = Path(name) / "export" if (Path(name) / "export").is_dir() else Path(name)
    source = str(place) if place.exists() else name
    if place.exists() and not any((place / file).exists() for file in ("config.json", "adapter_config.json")):
        raise ConfigError(
            f"{place} contains no model: neither config.json nor adapter_config.json",
            hint="pass the output of `fullshard train` or `fullshard sft`, or export a checkpoint with `ckpt export`",
        )
    hint = "pass the directory of a model or, if the hub can be reached, a hub name"
    settings = place / "adapter_config.json"
    base = str(read_object(settings).get("base_model_name_or_path")) if settings.exists() else None
    require_hub(partial(typer.echo, err=True), source, base or source)
    transformers: Any = import_extra("transformers", extra="hf", purpose="fullshard chat")
    transformers.logging.set_verbosity_error()
    kind = transformers.AutoModelForCausalLM
    if base is not None:
        kind = import_extra("peft", extra="sft", purpose="talking to an adapter").AutoPeftModelForCausalLM
        hint = f"set base_model_name_or_path in {settings} to its base model's absolute path"
    with own_errors(f"cannot load the model {name!r}", hint):
        network = kind.from_pretrained(source, dtype="auto")
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    from fullshard.checkpoint.offline.merged import align_tokens

    align_tokens(network, tokenizer)
    found = sys.modules["torch"].accelerator.current_accelerator(check_available=True)
    return transformers, network.to(found or "cpu").eval(), tokenizer


def _read() -> str:
    """Return the next line of the user, or an empty string at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""

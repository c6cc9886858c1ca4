"""Run supervised fine-tuning of all weights or of LoRA adapters, with TRL's SFTTrainer on fullshard's engine.

fullshard sft --model_name_or_path DIR --dataset_name DIR --output_dir OUT ...
fullshard launch --config_file FILE -m fullshard.recipes.sft --model_name_or_path ...
"""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProfileKwargs

from fullshard import checkpoint
from fullshard.checkpoint.lease import lease
from fullshard.checkpoint.offline.merged import write_merged
from fullshard.config.settings import closest
from fullshard.core.errors import ConfigError, DataError, HubError, own_errors, plural, shortened, tell
from fullshard.core.imports import import_extra, require_hub
from fullshard.integrations.transformers import SFTTrainer
from fullshard.integrations.transformers.trainer import complete_checkpoints
from fullshard.launch.environment import is_started_again, may_be_started_again, read_rank_environment, run_on_main
from fullshard.launch.preemption import should_stop
from fullshard.launch.worker import run_worker
from fullshard.observe import memory_nbytes
from fullshard.observe.report import write_report
from fullshard.plan.known_models import MODELS
from fullshard.recipes.formats import converted
from fullshard.recipes.model import muon
from fullshard.recipes.sft_arguments import SFTArguments, blamed, read_arguments

huggingface_hub: Any = import_extra("huggingface_hub", extra="sft", purpose="fullshard sft")
datasets: Any = import_extra("datasets", extra="sft", purpose="fullshard sft")
transformers: Any = import_extra("transformers", extra="sft", purpose="fullshard sft")
trl: Any = import_extra("trl", extra="sft", purpose="fullshard sft")

_IS_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE
_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_TEMPLATE = (  # `generation` marks the assistant's messages, for --assistant_only_loss
    "{% for message in messages %}{{ 'OPEN' + message['role'] + 'CLOSE\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + END }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + END + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'OPENassistantCLOSE\\n' }}{% endif %}"
)
_FORMATS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "chatml": ("<|im_start|>", "", "'<|im_end|>'",
               {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}),
    "zephyr": ("<|", "|>", "eos_token", {"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]}),
}  # fmt: skip


def run(arguments: SFTArguments) -> Any:
    """Train the model, save it, and push it to the hub if requested. Return the trainer."""
    environment, training = read_rank_environment(), arguments.training
    output, is_pushed = Path(training.output_dir), bool(training.push_to_hub)
    with contextlib.ExitStack() as held:
        run_on_main(environment, lambda: held.enter_context(lease(output)))
        resume = run_on_main(environment, lambda: _where_to_begin(training))
        training.push_to_hub = False  # pushed at the end, so that an unreachable hub loses no training
        require_hub(say, arguments.model.model_name_or_path, arguments.script.dataset_name)
        trainer = make_trainer(arguments)
        if arguments.own.profile:
            trainer.add_callback(_Profiling(trainer.accelerator, output / "profile"))
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_state()
        if importlib.util.find_spec("matplotlib") is not None:
            run_on_main(environment, lambda: write_report([output], output / "report.html"))
            say(f"report: {output / 'report.html'}")
        if should_stop():
            say("stopped by a signal after saving a checkpoint; --resume_from_checkpoint True continues from it")
            return trainer
        trainer.save_model()
        merge = f", merge it with: fullshard merge {arguments.model.model_name_or_path} {output} MERGED"
        what, more = ("adapter", merge) if arguments.model.use_peft else ("model", "")
        say(f"{what}: {output}; try it with: fullshard chat {output}{more}")
        if arguments.own.merge_adapter:
            base, hub = arguments.model.model_name_or_path, {"revision": arguments.model.model_revision}
            run_on_main(environment, lambda: write_merged(base, output, output / "merged", hub, overwrite=True))
            say(f"base model and adapter, merged: {output / 'merged'}")
        if is_pushed:
            training.push_to_hub, huggingface_hub.constants.HF_HUB_OFFLINE = True, _IS_OFFLINE
            try:
                trainer.push_to_hub(commit_message="End of training", revision=training.hub_revision)
            except Exception as error:  # any error of the network or the hub
                why = f"{type(error).__name__}: {shortened(str(error), 300)}"
                what = f"the model is saved in full in {output}, but pushing it to the hub failed: {why}"
                hint = f"push it later with: hf upload {training.hub_model_id or 'USER/NAME'} {output}"
                raise HubError(what, hint=hint) from None
        return trainer


class _Profiling(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that profiles steps 3 to 5 on this rank. The first two steps are slow and would not be typical."""

    def __init__(self, accelerator: Any, directory: Path) -> None:
        self._step, self._profile = 0, contextlib.ExitStack()
        self._begin = lambda: accelerator.profile(ProfileKwargs(output_trace_dir=str(directory)))

    def on_step_begin(self, *about: Any, **further: Any) -> None:
        self._step += 1
        if self._step == 3:
            self._profile.enter_context(self._begin())

    def on_step_end(self, *about: Any, **further: Any) -> None:
        if self._step == 5:
            self._profile.close()

    def on_train_end(self, *about: Any, **further: Any) -> None:
        self._profile.close()
        if self._step < 5:
            say(f"profile: fewer than three steps, because the run ended after step {self._step}")


def make_trainer(arguments: SFTArguments) -> Any:
    """Create TRL's trainer with the model, the data and the adapters, ready to train."""
    training, settings, name = arguments.training, arguments.model, arguments.model.model_name_or_path
    tokenizer, added = load_tokenizer(arguments)
    if training.assistant_only_loss:
        with blamed(arguments.own.entries):
            _require_marks(training, tokenizer)
    train, test = load_data(arguments, has_template=bool(tokenizer.chat_template or training.chat_template_path))
    quantization = trl.get_quantization_config(settings)
    if quantization is not None and (compute := arguments.own.bnb_4bit_compute_dtype) is not None:
        quantization.bnb_4bit_compute_dtype = getattr(torch, compute)
    before = memory_nbytes(torch.device("cpu"))
    model: Any = checkpoint.from_pretrained(  # each rank reads only what it owns after sharding
        transformers.AutoModelForCausalLM,
        str(Path(name).absolute()) if Path(name).is_dir() else name,  # adapters record it as their base
        dtype=settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype),
        quantization_config=quantization,
        dequantize=not settings.use_peft,  # quantized codes in the files cannot be trained
        revision=settings.model_revision,
        **({} if settings.attn_implementation is None else {"attn_implementation": settings.attn_implementation}),
    )
    model.config.use_cache = not training.gradient_checkpointing
    # A table that is longer than the vocabulary already has room and must not be shortened.
    if added and len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        rows = model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8, mean_resizing=False).weight.shape[0]
        # PEFT gives the base model as many rows as the tokenizer has tokens when it loads an adapter by its directory.
        tokenizer.add_tokens([f"<|extra_{number}|>" for number in range(rows - len(tokenizer))])
    if added and settings.use_peft and not settings.lora_modules_to_save:
        say(f"new tokens: {added}; their embeddings are trained only with --lora_modules_to_save embed_tokens lm_head")
    if training.packing and training.packing_strategy == "bfd" and "flash" not in (settings.attn_implementation or ""):
        say("packing without flash attention cuts texts into pieces of max_length (packing_strategy wrapped)")
        training.packing_strategy = "wrapped"
    try:
        trainer = SFTTrainer(
            model=model,
            args=training,
            train_dataset=train,
            eval_dataset=test,
            processing_class=tokenizer,
            peft_config=trl.get_peft_config(settings),
            optimizer_cls_and_kwargs=_muon(training) if arguments.own.muon else None,
        )
    except ValueError as error:
        if "ParamWrapper does not work with" not in str(error):
            raise
        raise ConfigError(
            f"some adapters are on stacked experts, and PEFT's {error}",
            hint="remove that option (--lora_dropout 0), or choose --lora_target_modules without experts",
        ) from error
    trainer.memory_before_model = before if trainer.accelerator.device.type == "cpu" else 0
    return trainer


def _muon(training: Any) -> tuple[Any, dict[str, Any]]:
    """Return a factory for the Muon optimizer and its options. Trainer calls the factory once the adapters exist."""

    def make(model: Any, **options: Any) -> torch.optim.Optimizer:
        return muon(model, say, **options)

    betas = (training.adam_beta1, training.adam_beta2)
    options = {"lr": training.learning_rate, "weight_decay": training.weight_decay, "adamw_betas": betas}
    return lambda: make, options | {"adamw_eps": training.adam_epsilon}


def load_tokenizer(arguments: SFTArguments) -> tuple[Any, int]:
    """Load the tokenizer, and add the chat format's special tokens. Also return how many are new."""
    name = arguments.model.model_name_or_path
    hint = "use a Hugging Face directory or a hub name as --model_name_or_path"
    if name in MODELS:
        hint = f"{name} is the planner's name; use its directory, or its name on the hub, such as OWNER/{name}"
    with own_errors(f"cannot read the tokenizer of {name!r}", hint=hint):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=arguments.model.model_revision)
    before = len(tokenizer)
    if arguments.own.chat_template_format != "none":
        start, close, end, tokens = _FORMATS[arguments.own.chat_template_format]
        tokenizer.add_special_tokens(dict(tokens))
        tokenizer.chat_template = _TEMPLATE.replace("OPEN", start).replace("CLOSE", close).replace("+ END", f"+ {end}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, len(tokenizer) - before


def _require_marks(training: Any, tokenizer: Any) -> None:
    """Raise `ConfigError` unless the chat template marks the assistant's messages, or TRL knows how to mark them."""
    path = str(training.chat_template_path or "")
    if path.endswith((".jinja", ".j2")):
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")  # as TRL does
    elif path or tokenizer.chat_template is None:
        return  # TRL copies another model's template; without a template, data with chats is refused
    try:
        importlib.import_module("trl.chat_template_utils").get_training_chat_template(tokenizer)
    except ValueError:
        what = f"the chat template of {path or tokenizer.name_or_path} does not mark the assistant's messages"
        hint = "use a --chat_template_path with {% generation %} around them, or --chat_template_format chatml"
        raise ConfigError(f"--assistant_only_loss: {what}", hint=hint) from None


def load_data(arguments: SFTArguments, *, has_template: bool = True) -> tuple[Any, Any]:
    """Load the training data and the evaluation data, or None, with only the columns to train on."""
    script, training, path = arguments.script, arguments.training, Path(arguments.script.dataset_name)
    files = {"data_files": str(path)} if path.is_file() else {}
    try:
        kind = _FILES.get(path.suffix, path.suffix) if files else script.dataset_name
        found = datasets.load_dataset(kind, script.dataset_config, **files)
    except Exception as error:  # from pyarrow, its JSON reader, the hub or the file system
        hint = "use a directory with train.jsonl or train.parquet, one such file, or a dataset on the hub"
        near = None if path.exists() else closest(str(path), (each.name for each in Path.cwd().iterdir()))
        hint = f"./{path} does not exist; did you mean {near}?" if near else hint
        raise DataError(f"{path} cannot be read: {error.__cause__ or error}", hint=hint) from error
    size, data = arguments.own.eval_split_size, []
    splits = [(script.dataset_train_split, True), (script.dataset_test_split, training.eval_strategy != "no")]
    for split, is_needed in splits[: 2 if size is None else 1]:
        if is_needed and split not in found:
            hint = "set --dataset_train_split and --dataset_test_split, or hold out rows with --eval_split_size 0.05"
            raise ConfigError(f"{path} has no split {split!r}, only {', '.join(found)}", hint=hint)
        rows, where = found.get(split), f"{path}, split {split}"
        if rows is not None:
            rows = converted(rows, where, say, has_template=has_template)
            rows = _checked(rows, where, training.dataset_text_field)
            say(f"{where}: {len(rows):,} rows with {' and '.join(rows.column_names)}")
            if not has_template and any(isinstance(rows[0].get(name), list) for name in ("messages", "prompt")):
                hint = "use --chat_template_format chatml or --chat_template_path, or a model trained for chats"
                raise ConfigError(f"{where} contains chats, but the tokenizer has no chat template", hint=hint)
        data.append(rows)
    if size is None:
        return data[0], data[1]
    with own_errors(f"--eval_split_size {size:g} does not fit {plural(len(data[0]), 'row')}"):
        parts = data[0].train_test_split(size if size < 1 else int(size), seed=training.seed)
    say(f"{len(parts['test']):,} rows are held out for evaluation, {len(parts['train']):,} remain")
    return parts["train"], parts["test"]


def _checked(rows: Any, where: str, text: str) -> Any:
    """Check every row, because TRL does not report which row is empty, and return only the columns to train on."""
    held = rows.column_names
    names = [name for name in ("messages", "prompt", "completion") if name in held] or [text]
    if text != "text" and text not in names:
        say(f"--dataset_text_field has no effect: the data has {' and '.join(names)}")
    if not len(rows):
        raise DataError(f"{where} has no rows")

    def check(row: dict[str, Any], number: int) -> None:
        for name in names:
            value = row.get(name)
            is_chat = isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value)
            if not (is_chat or (isinstance(value, str) and name != "messages")):
                raise DataError(
                    f"{where}: row {number + 1} has {shortened(repr(value), 200)} in the column {name}, "
                    f"expected text or a list of messages (the columns are {', '.join(held)})",
                    hint="fix or remove the row, or select a text column with --dataset_text_field",
                )

    rows.map(check, with_indices=True)
    return rows.select_columns([*names, *(["tools"] if "tools" in held else [])])


def _where_to_begin(training: Any) -> Any:
    """Return the value for Trainer's `resume_from_checkpoint`. Rank 0 calls this."""
    output, text = Path(training.output_dir), str(training.resume_from_checkpoint).lower()
    words = {"none": None, "": None, "false": False, "no": False, "true": True, "yes": True}
    asked = words.get(text, training.resume_from_checkpoint)
    held = [] if training.save_only_model else complete_checkpoints(output)  # these checkpoints cannot be resumed
    if is_started_again() and held:  # the newest is of this run, because it refused to start beside another's
        say(f"restarted: training continues from the newest checkpoint in {output}")
        return True
    is_other = asked is not True and held and Path(asked or "").resolve() != held[0].resolve()
    if held and (asked is None or (is_other and may_be_started_again())):
        what, hint = "this run would start at step 1 and replace it", "False starts at step 1"
        if may_be_started_again():
            what, hint = "a restart of this run would resume from it", "another --output_dir starts at step 1"
        raise ConfigError(
            f"{output} holds {held[0].name} from an earlier run, and {what}",
            hint=f"--resume_from_checkpoint True continues from it; {hint}",
        )
    if held and asked is False:
        say(f"starting at step 1, although {output} holds {held[0].name}: checkpoints of equal steps are replaced")
    return asked


def say(message: str) -> None:
    """Print one line for the user, but only on the main rank."""
    if read_rank_environment().is_main:
        tell(f"fullshard: {message}")


def main(words: list[str] | None = None) -> None:
    """Run the training job on this rank. `words` are its arguments, by default those on the command line."""
    run_worker(lambda: run(read_arguments(sys.argv[1:] if words is None else words, say)))


if __name__ == "__main__":
    main()

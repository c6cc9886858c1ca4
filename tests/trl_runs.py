"""Short runs of TRL's trainers, on fullshard's engine or as TRL has them; run on every rank."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from fullshard.api.sharding import is_sharded
from tests.distributed import preload
from tests.trainers import logged, result

preload("tests.trl_runs", "trl.trainer.grpo_trainer")

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GLOBAL_BATCH = 4
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def words(seed: int, count: int) -> str:
    """A sentence that is always the same."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(0, 100, (count,), generator=generator))


def write_model(directory: Path) -> None:
    """A small Llama, a reward model and their tokenizer, for `from_pretrained`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    learn = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([words(0, 500)], learn)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    for seed, name in enumerate(("model", "teacher", "reward")):
        torch.manual_seed(seed)
        judges = name == "reward"
        cls = LlamaForSequenceClassification if judges else LlamaForCausalLM
        cls(LlamaConfig(**SIZES, **({"num_labels": 1} if judges else {}))).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)


class Repeatable(LlamaForCausalLM):
    """Draws tokens by noise that follows from the text alone, so that any division over ranks draws the same."""

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        processors = super()._get_logits_processor(*args, **kwargs)
        processors.append(_noise)
        return processors


def _noise(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    rows = []
    for place, row in enumerate(input_ids):
        text = tuple(int(token) for token in row if token != 0)
        generator = torch.Generator().manual_seed(hash((text, place % 2)) % 2**31)
        rows.append(-torch.log(-torch.log(torch.rand(scores.shape[1], generator=generator))))
    drawn = scores.log_softmax(-1) + torch.stack(rows)
    drawn[:, :2] = -1e9  # never the pad token
    drawn[:, 2] += 3.0  # texts of different lengths
    return drawn


def reward(completions: list[str], **_: Any) -> list[float]:
    """Something that differs between completions."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def rows(kind: str, count: int = 16) -> list[dict[str, Any]]:
    """Samples of a kind."""
    made: list[dict[str, Any]] = []
    for i in range(count):
        prompt = words(3 * i, 3 + i % 3)
        good, bad = f" {words(3 * i + 1, 4 + i % 2)}", f" {words(3 * i + 2, 3 + i % 4)}"
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": good.strip()}]
        samples: dict[str, dict[str, Any]] = {
            "text": {"text": prompt + good},
            "pairs": {"prompt": prompt, "chosen": good, "rejected": bad},
            "triples": {"prompt": prompt, "chosen": good, "rejected": bad, "reference": f" {words(i + 999, 4)}"},
            "judged": {"prompt": prompt, "completion": good if i % 2 else bad, "label": bool(i % 2)},
            "prompts": {"prompt": prompt},
            "questions": {"prompt": chat[:1]},
            "chats": {"messages": chat},
            "privileged": {"prompt": prompt, "privileged_context": good},
        }
        made.append(samples[kind])
    return made


JUDGED: dict[str, Any] = {"reward_funcs": reward}
TEACHER: dict[str, Any] = {"teacher_model": "teacher"}
DRAWN: dict[str, Any] = {"num_generations": 2, "max_completion_length": 5, "temperature": 1.0}
# trainer: its module, the samples it wants, its settings, its further arguments
TRAINERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "SFT": ("trl", "text", {}, {}),
    "DPO": ("trl", "pairs", {}, {}),
    "KTO": ("trl", "judged", {}, {}),
    "Reward": ("trl", "pairs", {}, {}),
    "GRPO": ("trl", "prompts", {**DRAWN, "beta": 0.1}, JUDGED),
    "RLOO": ("trl", "prompts", {**DRAWN, "beta": 0.1}, JUDGED),
    "Distillation": ("trl", "questions", {"max_completion_length": 5}, TEACHER),
    "CPO": ("trl.experimental.cpo", "pairs", {}, {}),
    "ORPO": ("trl.experimental.orpo", "pairs", {}, {}),
    "TPO": ("trl.experimental.tpo", "triples", {}, {}),
    "OnlineDPO": ("trl.experimental.online_dpo", "prompts", {"max_new_tokens": 5}, JUDGED),
    "GKD": ("trl.experimental.gkd", "chats", {"max_new_tokens": 5, "lmbda": 0.0}, TEACHER),
    "GOLD": ("trl.experimental.gold", "chats", {"max_completion_length": 5, "lmbda": 0.0}, TEACHER),
    "IWOPD": ("trl.experimental.iw_opd", "chats", {"max_completion_length": 5}, TEACHER),
    "GMPO": ("trl.experimental.gmpo", "prompts", DRAWN, JUDGED),
    "A2PO": ("trl.experimental.a2po", "prompts", {"max_completion_length": 5, "num_value_samples": 2}, JUDGED),
    "SDFT": ("trl.experimental.sdft", "privileged", DRAWN, {}),
    "SDPO": ("trl.experimental.sdpo", "privileged", {**DRAWN, "success_reward_threshold": 0}, JUDGED),
}


def build(place: str, name: str, lora: bool, stock: bool, output: str, settings: dict[str, Any]) -> Any:
    """A trainer of TRL's: as it is, or on fullshard's engine.

    Args:
        place: directory with what `write_model` wrote.
        name: a key of `TRAINERS`.
        lora: train adapters instead of all weights.
        stock: TRL's own class.
        output: directory for what the trainer writes.
        settings: further training arguments; those that begin with `_` are further arguments of the trainer.
    """
    import peft
    from datasets import Dataset, load_from_disk

    from fullshard.integrations.transformers.classes import sharded

    module, kind, own, options = TRAINERS[name]
    home = importlib.import_module(module)
    trainer, config = getattr(home, f"{name}Trainer"), getattr(home, f"{name}Config")
    if not stock:
        trainer, config = sharded(trainer), sharded(config)
    size = dist.get_world_size()
    defaults = {
        "per_device_train_batch_size": GLOBAL_BATCH // size, "per_device_eval_batch_size": GLOBAL_BATCH // size,
        "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "log_level": "error", "save_strategy": "no", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    further = {key[1:]: value for key, value in settings.items() if key.startswith("_")}
    settings = {key: value for key, value in settings.items() if not key.startswith("_")}
    args = config(output, **defaults | own | settings)
    cls = LlamaForSequenceClassification if name == "Reward" else Repeatable
    model = cls.from_pretrained(f"{place}/{'reward' if name == 'Reward' else 'model'}", dtype=torch.float32)
    options = dict(options)
    if further.get("reward_funcs") == "REWARD":
        further["reward_funcs"] = f"{place}/reward"
    if count := further.pop("eval_rows", 0):
        options["eval_dataset"] = Dataset.from_list(rows(kind, count))
    for key in ("teacher_model", "ref_model"):
        if key in options or key in further:
            options[key] = LlamaForCausalLM.from_pretrained(f"{place}/teacher", dtype=torch.float32)
            further.pop(key, None)
    if lora:
        torch.manual_seed(5)
        kind_of_task = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        options["peft_config"] = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type=kind_of_task
        )
    data = f"{output}/data"  # a file: what TRL computes once for all ranks it writes beside it
    if dist.get_rank() == 0:
        Dataset.from_list(rows(kind)).save_to_disk(data)
    dist.barrier()
    return trainer(
        model=model,
        args=args,
        train_dataset=load_from_disk(data),
        processing_class=AutoTokenizer.from_pretrained(f"{place}/model"),
        **options | further,
    )


def run(place: str, name: str, lora: bool, stock: bool, output: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train, and say what came of it."""
    made = build(place, name, lora, stock, output, settings)
    made.train()
    if stock:
        weights = {name: value.detach().clone() for name, value in made.model.state_dict().items()}
        return logged(made) | {"weights": weights}
    others = [getattr(made, name, None) for name in ("ref_model", "teacher_model")]
    assert all(is_sharded(model) for model in others if model is not None)  # here, and not by torch
    return result(made)

"""The test scripts that Accelerate ships, on two processes; and that docs/compatibility.md says what came of each.

Nothing of theirs is here: they are read from the installed package, and only the package is changed that they import
their training from (`accelerate_script`). What they would download lies beside them under the same names: a small BERT,
a few sentence pairs, and a module `evaluate` that counts.

pytest tests/others/test_accelerate_scripts.py [-m full]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import environment, launch
from tests.others.accelerate_script import CALLED, functions

RUNNER = Path(__file__).with_name("accelerate_script.py")
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
REPLICATED = ["--fsdp_sharding_strategy", "NO_SHARD"]

# Functions in the order in which the script calls them, without those that docs/compatibility.md gives a reason for.
SCRIPT = """[
    Accelerator(), init_state_check(), process_execution_check(), test_split_between_processes_list(),
    test_split_between_processes_nested_dict(), test_split_between_processes_tensor(),
    test_split_between_processes_evenly(),
    test_split_between_processes_dataset(__import__("datasets").Dataset), rng_sync_check(), dl_preparation_check(),
    central_dl_preparation_check(), custom_sampler_check(), check_seedable_sampler(),
    check_seedable_sampler_with_data_seed(), check_seedable_sampler_in_batch_sampler_shard(),
    mock_training(32, 8, torch.Generator()), test_trigger(), test_reinstantiated_state(),
]"""
DATA_LOOP = """[
    accelerator := create_accelerator(), test_default_ensures_even_batch_sizes(), test_can_disable_even_batches(),
    test_join_can_override_even_batches(), test_join_can_override_for_mixed_type_dataloaders(),
    test_join_raises_warning_for_iterable_when_overriding_even_batches(),
    test_join_raises_warning_for_non_ddp_distributed(accelerator), test_pickle_accelerator(),
    sampler := BatchSampler(RandomSampler(range(22)), 4, False),
    test_data_loader(DataLoader(DummyDataset(), batch_size=4, num_workers=2), accelerator),
    test_data_loader(DataLoader(DummyDataset(), batch_size=4, shuffle=True), accelerator),
    test_data_loader(DataLoader(DummyDataset(), batch_sampler=sampler), accelerator),
    test_data_loader(
        DataLoader(DummyDataset(), sampler=sampler, batch_size=None, collate_fn=default_collate), accelerator
    ),
    test_stateful_dataloader(accelerator), test_stateful_dataloader_save_state(accelerator),
]"""
SYNC = "[test_dataloader_break(), *[test_gradient_accumulation(a, b, True) for a in (0, 1) for b in (0, 1)]]"
MERGE = "[model := setup()[0], mock_training(Accelerator(), TinyModel())]"
NOTEBOOK = """[
    test_can_initialize(), test_clean_cuda_fork(), test_static_rdzv_backend(), test_c10d_rdzv_backend(),
    test_monitoring(), test_problematic_imports(),
]"""
BERT = ["--model_name_or_path", "bert", "--output_dir", "out", "--num_epochs", "2"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with what the scripts of `external_deps` would download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[f"w{i}" for i in range(40)]]
    inner = Tokenizer(models.WordPiece(vocab=dict(zip(words, range(len(words)), strict=True)), unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    BertTokenizerFast(tokenizer_object=inner, model_max_length=32).save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertForSequenceClassification(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(tmp_path / "bert")
    glue = tmp_path / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    for split, count in (("train", 64), ("validation", 37)):
        rows = [f"w{i % 40} w{i % 7},w{i % 11} w{i % 3},{i % 2},{i}" for i in range(count)]
        (glue / f"{split}.csv").write_text("\n".join(["sentence1,sentence2,label,idx", *rows]))
    files = "".join(f"\n  - split: {split}\n    path: {split}.csv" for split in ("train", "validation"))
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:{files}\n---\n")
    (tmp_path / "evaluate.py").write_text(EVALUATE)
    (tmp_path / "out").mkdir()
    return tmp_path


EVALUATE = """
class load:
    def __init__(self, *names):
        self.pairs = []

    def add_batch(self, predictions, references):
        self.pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self):
        right = sum(a == b for a, b in self.pairs) / len(self.pairs)
        self.pairs = []
        return {"accuracy": right, "f1": right}
"""


def run(script: str, place: Path, expression: str = "", *arguments: str, flags: list[str] | None = None) -> set[str]:
    """Run a script of Accelerate's, or functions of it; the names of those of its functions that rank 0 called."""
    path = {"PYTHONPATH": f"{place}:{environment().get('PYTHONPATH', '')}", **OFFLINE}
    begin = ["--num_processes", "2", "--cpu", *(flags or [])]
    done = launch(*begin, str(RUNNER), script, expression, *arguments, cwd=place, timeout=280, **path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return called(done.stdout)


def called(output: str) -> set[str]:
    lines = re.findall(rf"{CALLED} (.*)", output)
    return {name for line in lines for name in line.split()}


def table() -> dict[str, dict[str, str]]:
    """What the page says: for each script, a verdict for each of its functions."""
    section = PAGE.read_text().partition("### Test scripts")[2].partition("\n## ")[0]
    verdicts: dict[str, dict[str, str]] = {}
    for script, names, verdict in re.findall(r"^\| `([\w/]+\.py)` \| (.*?) \| (.*?) \|$", section, flags=re.MULTILINE):
        verdicts.setdefault(script, {}).update(dict.fromkeys(re.findall(r"`(\w+)`", names), verdict))
    return verdicts


def passing(script: str) -> set[str]:
    return {name for name, verdict in table()[script].items() if verdict == "pass"}


def test_the_page_has_every_function_once() -> None:
    from tests.others.accelerate_script import scripts

    there = {path.relative_to(scripts()).as_posix() for path in scripts().rglob("test_*.py")}
    page = table()
    assert page.keys() == there
    for script in there:
        assert page[script].keys() == functions(script), script


@pytest.mark.full
def test_operations(tmp_path: Path) -> None:
    assert run("test_ops.py", tmp_path) == passing("test_ops.py")


@pytest.mark.full
def test_script(tmp_path: Path) -> None:
    assert run("test_script.py", tmp_path, SCRIPT) == passing("test_script.py")


@pytest.mark.full
def test_data_loop(tmp_path: Path) -> None:
    assert run("test_distributed_data_loop.py", tmp_path, DATA_LOOP) == passing("test_distributed_data_loop.py")


@pytest.mark.full
def test_synchronization(tmp_path: Path) -> None:
    assert run("test_sync.py", tmp_path, SYNC, flags=REPLICATED) == passing("test_sync.py")


@pytest.mark.full
def test_merged_weights(tmp_path: Path) -> None:
    assert run("test_merge_weights.py", tmp_path, MERGE) == passing("test_merge_weights.py")


@pytest.mark.full
def test_command_line(tmp_path: Path) -> None:
    assert run("test_cli.py", tmp_path) == passing("test_cli.py")


@pytest.mark.full
def test_notebook(tmp_path: Path) -> None:
    variables = {"ACCELERATE_NUM_PROCESSES": "2", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(RUNNER), "test_notebook.py", NOTEBOOK],
        cwd=tmp_path, env=environment(**variables), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Num processes: 2") == 6  # by three functions on two processes
    in_its_processes = {name for name in passing("test_notebook.py") if name.endswith("_function")}
    assert called(done.stdout) | in_its_processes == passing("test_notebook.py")


@pytest.mark.full
def test_checkpointing(place: Path) -> None:
    script = "external_deps/test_checkpointing.py"
    found = run(script, place, "", *BERT)
    assert json.loads((place / "out" / "state_0.json").read_text())["epoch"] == 0
    run(script, place, "", *BERT, "--resume_from_checkpoint", "out/epoch_0")
    assert found == passing(script)


@pytest.mark.full
def test_performance(place: Path) -> None:
    script = "external_deps/test_performance.py"
    assert run(script, place, "", *BERT, "--performance_lower_bound", "0.1") == passing(script)


@pytest.mark.full
def test_metrics(place: Path) -> None:
    script = "external_deps/test_metrics.py"
    more = "[test_gather_for_metrics_with_non_tensor_objects_iterable_dataset(), main()]"
    (place / "hf-internal-testing").mkdir()
    (place / "hf-internal-testing" / "mrpc-bert-base-cased").symlink_to(place / "bert")
    assert run(script, place, more) == passing(script)

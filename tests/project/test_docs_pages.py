"""The pages of docs/: their commands and code are right, their pictures are the layout's, and all are in the site.

pytest tests/project/test_docs_pages.py
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown.extensions.toc import slugify
from ruamel.yaml import YAML
from typer.testing import CliRunner

import fullshard
from fullshard.cli.main import COMMANDS, app, load_command
from fullshard.config.flags import FLAGS, OPTIONS
from fullshard.recipes.sft_arguments import make_parser
from tests.launching import environment
from tests.project.test_examples import make_place, run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "examples" / "README.md", ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
NAMES = {page: str(page.relative_to(ROOT)) for page in PAGES}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Blocks of code in one of these languages."""
    for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield code


def commands(page: Path) -> Iterator[list[str]]:
    """What begins with `fullshard` in blocks of a shell or of none."""
    for code in blocks(page, "", "bash"):
        for line in re.sub(r"\\\n\s*", "", code).splitlines():
            if line.startswith("fullshard ") and "usage" not in line.lower():
                for part in re.split(r" && | \|\| ", line.partition("  #")[0]):
                    if part.startswith("fullshard "):
                        yield shlex.split(part.partition(" > ")[0], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=list(NAMES.values()))
def test_blocks_are_well_formed(page: Path) -> None:
    for code in blocks(page, "python"):
        if not code.startswith((" ", "...")) and "docs/tour.md" not in NAMES[page]:  # the tour shows single lines
            ast.parse(code)
    for code in blocks(page, "yaml"):
        YAML(typ="safe").load(code)
    for code in blocks(page, "json"):
        json.loads(code)
    for code in blocks(page, "bash"):
        assert subprocess.run(["bash", "-n"], input=code, text=True, check=False).returncode == 0, code


PACKAGE_INDEX = re.compile(r"\b(pypi|pythonhosted|npmjs|rubygems|crates|anaconda)\.(org|com|io)\b")


def test_no_file_links_to_a_package_index() -> None:
    """A reader wants the project; an index may be another one where they are."""
    folders = (ROOT / name for name in ("benchmarks", "docs", "examples", "src", "tests"))
    for path in (*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))):
        if path.is_file() and path.suffix != ".pyc":
            found = PACKAGE_INDEX.search(path.read_bytes().decode(errors="replace"))
            assert found is None, f"{path} names {found[0]}"


def known_flags(words: list[str]) -> set[str]:
    """The flags of a command: `fullshard` and its subcommands."""
    launching = {f"--{name}" for name in (*FLAGS.spellings(), *(option.name for option in OPTIONS))}
    if words[0] == "launch":
        return launching
    if words[0] == "sft":
        return {
            *make_parser()._option_string_actions,
            *launching,
        }
    command = load_command(words[0])
    inner: Any = getattr(command, "commands", {}).get(words[1]) if len(words) > 1 else None
    return {flag.replace("-", "_").replace("__", "--", 1) for one in (command, inner) if one is not None
            for parameter in one.params for flag in (*parameter.opts, *parameter.secondary_opts)}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=list(NAMES.values()))
def test_commands_have_the_flags_that_are_shown(page: Path) -> None:
    for _, *words in commands(page):
        if words and words[0] in COMMANDS:
            ends = ("-m", "--")
            target = next((i for i, word in enumerate(words) if word.endswith((".py", ".sh")) or word in ends), None)
            own = words[:target] if words[0] in ("launch", "rehearse") and target is not None else words
            shown = {w.partition("=")[0] for w in own if w.startswith("--")}
            found = {"--" + word[2:].replace("-", "_") for word in shown}
            assert found <= {*known_flags(words), "--help"}, (words, found - known_flags(words))
        else:
            assert not words or words[0].startswith("-"), f"fullshard {words[0]} is no command"


LAUNCHES = sorted({shlex.join(words[1:]) for page in PAGES for words in commands(page) if words[1] == "launch"})


@pytest.mark.parametrize("command", LAUNCHES)
def test_launches_that_are_shown_would_start(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--dry_run`. The programs and files that they name are there, and empty, or a configuration."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    for word in words:
        if word.endswith((".py", ".yaml", ".json")):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).write_text({".yaml": "precision: {mode: bf16}\n", ".json": "{}"}.get(Path(word).suffix, ""))
    result = CliRunner().invoke(app, ["launch", "--dry_run", *words[1:]])
    assert result.exit_code == 0, (result.exception, result.output)


PLANS = sorted({shlex.join(words[1:]) for page in PAGES for words in commands(page) if words[1] == "plan"})


@pytest.mark.full
@pytest.mark.parametrize(
    "command", [plan for plan in PLANS if "..." not in plan and not re.search(r"\.json|\.yaml", plan)]
)
def test_plans_that_are_shown_are_made(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code in (0, 1), result.output


TRAININGS = sorted({shlex.join(words[1:]) for page in PAGES for words in commands(page) if words[1] == "train"})
FEW = {"--nproc": "2", "--steps": "2", "--seq-len": "16", "--batch-size": "4", "--max-data-mb": "0.5"}


@pytest.mark.full
@pytest.mark.parametrize("command", [line for line in TRAININGS if "s3://" not in line])
def test_trainings_that_are_shown_train(command: str, tmp_path: Path) -> None:
    """Two steps of each, on two ranks, without W&B; the model, the recipe and the texts of one's own are small ones."""
    place = make_place(tmp_path)
    (place / "my.yaml").write_text("train: {precision: bf16}\n")
    (place / "my" / "texts").mkdir(parents=True)
    (place / "my" / "texts" / "one.txt").write_text("to be sharded or not to be sharded\n" * 2000)
    (place / "my" / "config.json").write_text(json.dumps(UNTIED))
    words = shlex.split(command.replace("MODEL", "my/config.json").replace("wandb,", ""))
    for flag, value in FEW.items():
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    run(f"fullshard {shlex.join(words)}", place)


UNTIED: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.full
def test_the_first_run(tmp_path: Path) -> None:
    """Its commands, with fewer steps; the model that it leaves is read by the code that is shown."""
    place = make_place(tmp_path)
    text = (DOCS / "tutorials" / "first-run.md").read_text()
    text = text.replace("--steps 60\n", "--steps 4\n").replace("step-000060", "step-000004")
    shown = [line for _, code in BLOCK.findall(text) for line in code.splitlines()]
    wanted = [
        line.partition("  #")[0]
        for line in shown
        if re.match(r"fullshard (train --nproc 2 --steps 4$|ckpt .*000004)", line)
    ]
    assert len(wanted) == 3
    for command in wanted:
        run(f"{command} --seq-len 16" if " train " in command else command, place, proof=False)
    [code] = [code for language, code in BLOCK.findall(text) if language == "python"]
    subprocess.run([sys.executable, "-c", code], cwd=place, env=environment(), check=True, timeout=120)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_fine_tuning(tmp_path: Path) -> None:
    """All that the tutorial runs, on a small model: all weights, LoRA, QLoRA, and the adapters merged."""
    place = make_place(tmp_path)
    make = "import sys, shutil; sys.path.insert(0, 'examples'); import small; shutil.copytree(small.model(), 'base')"
    subprocess.run([sys.executable, "-c", make], cwd=place, env=environment(), check=True, timeout=120)
    page = DOCS / "tutorials" / "fine-tune.md"
    [data, *_] = blocks(page, "bash")
    subprocess.run(["bash", "-c", data], cwd=place, check=True, timeout=20)
    told = [words for words in commands(page) if words[1] in ("sft", "merge")]
    assert [words[1] for words in told] == ["sft", "sft", "sft", "merge"]
    for words in told:
        few = ["--max_steps", "2", "--report_to", "none"] if words[1] == "sft" else []
        command = [word.replace("Qwen/Qwen3-0.6B", "base") for word in (*words, *few)]
        run(shlex.join(command), place, proof=words[1] == "sft")
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(place / "out" / "merged")


def test_every_page_is_in_the_site_and_every_name_has_a_place() -> None:
    text = re.sub(r"!!python/name:\S+", "", (ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"([\w/-]+\.md)$", text[text.index("nav:") : text.index("not_in_nav:")], re.MULTILINE))
    elsewhere = {
        "index.md",
        "examples.md",
        "architecture.md",
        "changelog.md",
        "contributing.md",
        "security.md",
        "cli.md",
    }
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "decisions"}
    assert listed == pages | elsewhere | {"decisions/index.md"}
    api = set(re.findall(r"^::: fullshard\.(?:.*\.)?(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert {*fullshard.__all__} - {"__version__", "optim", "plan"} <= api


def test_the_pictures_are_those_of_the_layout() -> None:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "site" / "pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for name, draw in pictures.PICTURES.items():
        assert (DOCS / name).read_text() == draw(), "run `python docs/site/pictures.py`"


def test_tests_that_are_named_are_there() -> None:
    named = set(re.findall(r"`((?:others/)?test_\w+)`", (DOCS / "expected.md").read_text()))
    assert len(named) > 30
    assert [name for name in sorted(named) if not list((ROOT / "tests").rglob(f"{name}.py"))] == []


@pytest.mark.parametrize("page", PAGES, ids=list(NAMES.values()))
def test_links_lead_somewhere(page: Path) -> None:
    base = repository()
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        path = link.partition("#")[0]
        if path.startswith(f"{base}/blob/main/"):
            assert (ROOT / path.removeprefix(f"{base}/blob/main/")).exists(), link
        elif path and not re.match(r"https?:", path):
            assert (page.parent / path).exists(), link


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings in the site."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = (re.sub(r"`|\]\([^)]*\)|\[", "", title) for title in re.findall(r"^#+ (.*)", text, re.MULTILINE))
    return {slugify(title, "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=list(NAMES.values()))
def test_links_lead_to_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text().replace(f"{repository()}/blob/main/", f"{ROOT}/"), flags=re.DOTALL)
    for path, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", text):
        target = page.parent / path if path else page
        if target.suffix == ".md" and target.name != "api.md":  # whose anchors mkdocstrings makes
            assert anchor in anchors(target), f"{path}#{anchor}"


def repository() -> str:
    """Where the project says it lives."""
    import tomllib

    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Documentation"].startswith(urls["Repository"])
    return str(urls["Repository"])


def test_the_readme_is_short_and_its_links_hold_on_a_package_page() -> None:
    page = (ROOT / "README.md").read_text()
    assert len(page.splitlines()) <= 120, "move to docs/ what a newcomer does not need first"
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(f"{repository()}/")] == []
    assert f"repo_url: {repository()}\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs"), pytest.importorskip("mkdocstrings"), pytest.importorskip("material")
    (tmp_path / "0.0.9").mkdir()
    (tmp_path / "0.0.9" / "index.html").write_text("an earlier version")
    site = tmp_path / fullshard.__version__
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cli = (site / "cli.html").read_text()
    assert all(f"fullshard {name}" in cli for name in COMMANDS)
    assert "gradient_accumulation_steps" in (site / "api.html").read_text()
    outside = [
        page
        for page in site.rglob("*.html")
        if re.search(r'(src|stylesheet" href)="https?:|data-md-component="source"', page.read_text())
    ]
    assert outside == []
    assert "rendezvous" in (site / "search" / "search_index.js").read_text()  # which a page reads from a disk, too
    versions = [entry["version"] for entry in json.loads((tmp_path / "versions.json").read_text())]
    assert versions == [fullshard.__version__, "0.0.9"]
    assert f"url={fullshard.__version__}/index.html" in (tmp_path / "index.html").read_text()

"""Rules about the code base that no single file can keep: what may be imported, and what may not be known where."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

import fullshard
from fullshard.api.refused import ACCELERATES_OWN
from fullshard.core.strategy import STRATEGIES
from tests.sources import nodes, parsed

ROOT = Path(fullshard.__file__).parent
PROJECT = Path(__file__).parents[2]
UPPER_LAYERS = ["cli", "recipes", "integrations", "api", "checkpoint", "observe", "launch"]
LAYERS = [*UPPER_LAYERS, "optim", "features", "engine", "wrap", "plan", "comm", "config", "core"]
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "accelerate", "pandas")


def source_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def modules_of(folder: str) -> list[str]:
    dotted = (".".join(("fullshard", *path.relative_to(ROOT).with_suffix("").parts)) for path in source_files(folder))
    return [name.removesuffix(".__init__") for name in dotted]


@pytest.mark.parametrize("modules", [["fullshard"], ["fullshard.cli.main"]], ids=["fullshard", "cli"])
def test_starting_up_imports_nothing_heavy(modules: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    assert run_python(code) == ""


def test_help_runs_without_torch() -> None:
    """The whole command line, not only its imports, with torch made impossible to import."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['fullshard', '--help']\n"
        "from fullshard.cli.main import main\n"
        "main()"
    )
    assert "Usage" in run_python(code)


@pytest.mark.parametrize("folder", ["core", "config", "plan"])
def test_layers_that_answer_without_torch(folder: str) -> None:
    if not source_files(folder):
        pytest.skip(f"there is no {folder} layer yet")
    code = f"import sys; sys.modules['torch'] = None\nimport {', '.join(modules_of(folder))}\nprint('fine')"
    assert run_python(code) == "fine"


def test_the_public_names_are_sorted_and_exist() -> None:
    assert list(fullshard.__all__) == sorted(fullshard.__all__)
    assert len(set(fullshard.__all__)) == len(fullshard.__all__)
    missing = [name for name in fullshard.__all__ if getattr(fullshard, name, None) is None]
    assert missing == []
    assert set(fullshard.__all__) <= set(dir(fullshard))
    with pytest.raises(AttributeError, match="no attribute 'fully_shrad'"):
        fullshard.fully_shrad  # type: ignore[attr-defined]  # noqa: B018


def test_public_names_are_those_a_type_checker_sees() -> None:
    """`__getattr__` serves what the stub declares, and nothing else; each stub declares what its package has."""
    declared = {
        (str(node.module).partition(".")[0], alias.asname or alias.name)
        for node in ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    ours = {("fullshard", name) for name in fullshard.__all__ if name != "plan"}  # the stub defines it
    assert declared == ours | {("accelerate", name) for name in ACCELERATES_OWN}
    for stub in ROOT.rglob("*.pyi"):
        package = importlib.import_module(".".join(("fullshard", *stub.parent.relative_to(ROOT).parts)))
        assert package.__all__ and all(getattr(package, name, None) is not None for name in package.__all__)


def test_the_source_distribution_holds_what_its_tests_read() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    patterns = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    text = "\n".join(path.read_text() for path in (PROJECT / "tests").rglob("*.py"))
    words = {*re.findall(r"""[/(] ?["']([\w.]+)""", text), *re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)}
    left_out = {"out", "build", "dist", "pyproject.toml"}  # the last is always there
    read = {path.name for path in PROJECT.glob("[!.]*") if path.name in words} - left_out
    assert {"docs", "benchmarks", "examples", "ARCHITECTURE.md"} <= read
    assert [name for name in sorted(read) if not any(fnmatch(f"/{name}", p) for p in patterns)] == []


@pytest.mark.parametrize("path", source_files("engine", "comm"), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_no_runtime_code_compares_a_strategy_name(path: Path) -> None:
    """Strategies are rows of data. Their names may only be a default or part of a docstring."""
    allowed: set[int] = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            allowed |= {id(default) for default in (*node.args.defaults, *node.args.kw_defaults) if default}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in allowed:
            assert node.value not in STRATEGIES, f"{path}:{node.lineno} names {node.value}"
        if isinstance(node, ast.Compare):
            compared = [ast.unparse(part) for part in (node.left, *node.comparators)]
            assert not any(re.search(r"\b(strategy|row)\.(name|code)\b", text) for text in compared), path


def test_no_class_name_is_used_twice() -> None:
    """Whoever searches for a name finds one class. Private ones count, too: they are in tracebacks."""
    places: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


SCREEN = 60
"""Lines of a function, without its signature and its docstring."""


def test_no_function_is_longer_than_a_screen() -> None:
    long = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                if (node.end_lineno or 0) - body[0].lineno + 1 > SCREEN:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert long == []


def test_no_folder_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    named = [path for path in ROOT.rglob("*") if path.stem in drawers and "__pycache__" not in path.parts]
    assert named == []


def test_no_absolute_paths_in_the_sources() -> None:
    pattern = re.compile(r"""["'](/home/|/work/|/Users/|/root/)""")
    assert [path for path in ROOT.rglob("*.py") if pattern.search(path.read_text())] == []


UNPICKLES = {"pickle.load", "pickle.loads", "pickle.Unpickler"}


def test_no_pickle_on_a_load_path() -> None:
    """A checkpoint must not be able to run code. (`launch` pickles messages between this job's own ranks.)"""
    for path in (*source_files(*(layer for layer in LAYERS if layer != "launch")), *ROOT.glob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                found = {f"{node.module}.{alias.name}" for alias in node.names}
                assert not found & {*UNPICKLES, "torch.load"}, f"{path}:{node.lineno} hides what it calls"
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            function = ast.unparse(node.func)
            assert function not in UNPICKLES, f"{path}:{node.lineno}"
            if function == "torch.load":
                safe = [k for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
                assert safe, f"{path}:{node.lineno} loads without weights_only=True"


@pytest.mark.full
def test_imports_go_down_only() -> None:
    """The contracts in pyproject.toml, as `make lint` runs them."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_every_type_checked_import_points_down_too() -> None:
    """Imports for annotations are left out of the contracts above, because two files of one layer may name each other.

    Between layers they have to go down as well.
    """
    for folder in LAYERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in nodes(path):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fullshard."):
                    target = (node.module or "").split(".")[1]
                    assert LAYERS.index(target) >= LAYERS.index(folder), f"{path}:{node.lineno} imports {target}"


# -- torch's private names --------------------------------------------------------------------------------------

TORCH_PRIVATE = sorted(ROOT.rglob("torch_private.py"))


def is_private(name: str) -> bool:
    return name.startswith("_") and len(name) > 1 and not name.endswith("__")


def private_names(tree: ast.AST) -> set[str]:
    """Of attributes and texts."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {name for name in attributes | texts if is_private(name) and name.isidentifier()}


@functools.cache
def torchs_private_names() -> frozenset[str]:
    """What the objects of torch have that everybody holds, and what `torch_private` names, but for the semi-public."""
    import torch
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from fullshard.comm.torch_private import SEMI_PUBLIC

    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters())
    held = [torch, torch.distributed, torch.nn, torch.optim, layer, layer.weight, layer.weight.untyped_storage()]
    held += [optimizer, torch.optim.lr_scheduler.LRScheduler, torch.utils.data.DataLoader([1]), torch.amp.GradScaler]  # type: ignore[arg-type]
    held += [torch.autograd.graph.Node, torch.distributed.ProcessGroup, LocalElasticAgent]
    names = {name for thing in held for name in dir(thing) if is_private(name)}
    return frozenset(names.union(*(private_names(parsed(path)) for path in TORCH_PRIVATE)) - SEMI_PUBLIC)


@functools.cache
def overridden_methods() -> frozenset[str]:
    """Methods of torch's classes that a class of fullshard replaces."""
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in TORCH_PRIVATE]
    found = [getattr(importlib.import_module(name), "OVERRIDDEN", {}) for name in names]
    return frozenset().union(*(methods for each in found for methods in each.values()))


def uses_of_private_names(found_nodes: Sequence[ast.AST], own: set[str]) -> list[str]:
    """Where a file has a private name of torch; `own` are names that fullshard gives to attributes of its own."""
    overridden = overridden_methods()
    of_torch = {"torch"}
    found = []
    for node in found_nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            for alias, name in zip(node.names, names, strict=True):
                if name.split(".")[0] == "torch":
                    of_torch.add(alias.asname or alias.name.split(".")[0])
                    if any(is_private(part) for part in name.split(".")):
                        found.append(f"line {node.lineno}: import of {name}")
    for node in found_nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            is_own = owner in ("self", "cls", "super()") and node.attr in own | overridden
            if owner.split(".")[0] in of_torch or (node.attr in torchs_private_names() and not is_own):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in torchs_private_names():
            found.append(f"line {node.lineno}: the name {node.value!r}")
    return found


def nodes_in(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def own_names(found_nodes: Iterable[ast.AST]) -> set[str]:
    """What classes of fullshard define, or put into `self`."""
    own = set()
    for node in found_nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    return own


def test_torchs_private_names_are_in_files_of_their_own() -> None:
    files = {path: nodes(path) for path in ROOT.rglob("*.py") if path not in TORCH_PRIVATE}
    own = own_names(node for found_nodes in files.values() for node in found_nodes)
    found = [f"{path.relative_to(ROOT)} {use}" for path in files for use in uses_of_private_names(files[path], own)]
    assert found == [], "a private name of torch; put it into the torch_private.py of its folder, with a test"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._anything()",
        "from torch import nn\nnn.modules._something",
        "import torch.distributed as dist\ndist.distributed_c10d._anything",
        "from torch._anything import f",
        "from torch.nn.modules.batchnorm import _NormBase",
        "optimizer._optimizer_step_pre_hooks",
        "getattr(parameter, '_backward_hooks', None)",
        "module._non_persistent_buffers_set",
        "self._pcontext",
        "tensor.grad._values()",
    ],
)
def test_a_private_name_of_torch_is_found(source: str) -> None:
    assert uses_of_private_names(nodes_in(source), {"_values"}) != []


def test_what_is_semi_public_or_ones_own_is_not() -> None:
    source = "module._parameters\nparameter._bucket\nself._values\nsuper()._apply(fn)\nsuper().__init__()\nos._exit(1)"
    assert uses_of_private_names(nodes_in(source), {"_values"}) == []


def test_every_private_name_of_torch_is_used() -> None:
    text = "\n".join(path.read_text() for path in ROOT.rglob("*.py") if path not in TORCH_PRIVATE)
    body = [node for path in TORCH_PRIVATE for node in parsed(path).body]
    names = [node.name for node in body if isinstance(node, ast.FunctionDef) and not is_private(node.name)]
    for node in body:
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name) and not is_private(target.id)]
    assert [n for n in names if f"torch_private.{n}" not in text and n not in ("SEMI_PUBLIC", "OVERRIDDEN")] == []


def test_threads_that_may_be_in_torch_are_at_rest_at_the_end() -> None:
    """An interpreter that ends aborts the process if a daemon thread comes back to it from C++."""
    python_alone = [ROOT / "core" / "threads.py", ROOT / "checkpoint" / "lease.py", *(ROOT / "launch").glob("*.py")]
    daemons = [path for path in ROOT.rglob("*.py") if "daemon=True" in path.read_text()]
    assert set(daemons) <= set(python_alone)


def test_the_reading_path_is_as_long_as_it_says() -> None:
    text = (PROJECT / "ARCHITECTURE.md").read_text().partition("## Reading order")[2]
    found = re.search(r"about ([\d,]+) lines:\s(.*?)\.\n\nThen", text, re.DOTALL)
    assert found is not None
    files = re.findall(r"`([a-z_/]+)`", found[2])
    length = sum(len((ROOT / f"{name}.py").read_text().splitlines()) for name in files)
    assert len(files) == 14
    assert abs(length - int(found[1].replace(",", ""))) <= 100

"""Check the structure of the source against `budgets.toml`, whose numbers may only be lowered.

    python -m tests.budgets            # says what is over its budget, and which import, class or file did it
    python -m tests.budgets --lower    # writes today's numbers where they are lower

`make lint` runs the first.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[1]
SOURCE = PROJECT / "src" / "fullshard"
BUDGETS = PROJECT / "budgets.toml"
KERNEL = ("core", "comm", "engine", "wrap")
OPTIONS = (
    *("reshard_after_forward", "step_in_backward", "offload_activations", "gather_as", "forward_prefetch"),
    "nonfinite_gradients",
)
_LARGE_CLASSES = frozenset({"Accelerator", "FSDPModule"})
"""Their members are the names that users know; no budget counts them."""
_DOWNCAST = re.compile(r"\b(?:owner_of|schedule_of|bucket_of|gradient_of)\(")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Measure:
    """One number.

    Attributes:
        value: today's.
        causes: what it is made of, the most important first.
    """

    value: int
    causes: list[str]


class Source:
    """The files of the package, and what they import."""

    def __init__(self, folder: Path = SOURCE) -> None:
        self.texts = {self._name(path, folder): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    @staticmethod
    def _name(path: Path, folder: Path) -> str:
        parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
        return ".".join(parts).removesuffix(".__init__")

    def lines(self, names: Iterable[str]) -> int:
        """Lines of these modules."""
        return sum(self.texts[name].count("\n") for name in names)

    def below(self, *folders: str) -> list[str]:
        """Modules of these folders."""
        return [name for name in self.texts if any(f"{name}.".startswith(f"fullshard.{folder}.") for folder in folders)]

    def imports(self, name: str) -> set[str]:
        """Modules of the package that a module imports, inside functions and for annotations too."""
        found: set[str] = set()
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                found |= {whole if whole in self.texts else node.module for whole in inner.values()}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        return found & self.texts.keys()

    def chains(self, entry: str) -> dict[str, list[str]]:
        """All that importing a module brings in, each with the shortest chain of imports that leads to it."""
        chains, queue = {entry: [entry]}, deque([entry])
        while queue:
            name = queue.popleft()
            for imported in sorted(self.imports(name)):
                if imported not in chains:
                    chains[imported] = [*chains[name], imported]
                    queue.append(imported)
        return chains

    def members(self, *folders: str) -> Counter[str]:
        """Methods and attributes of each class, those set on `self` included."""
        found: Counter[str] = Counter()
        for name in self.below(*folders):
            for cls in ast.walk(self.trees[name]):
                if isinstance(cls, ast.ClassDef) and cls.name not in _LARGE_CLASSES:
                    found[f"{name}.{cls.name}"] = len(_members(cls))
        return found


def _members(cls: ast.ClassDef) -> set[str]:
    names = {node.name for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    names |= {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for node in ast.walk(cls):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def _closure(source: Source, entry: str) -> Measure:
    """Lines of all that importing a module brings in; modules outside its own layers come first among the causes."""
    chains = source.chains(entry)
    outside = [name for name in chains if name.split(".")[1:2] != entry.split(".")[1:2]]
    largest = sorted(outside, key=lambda name: -source.lines([name]))
    return Measure(
        source.lines(chains), [f"{source.lines([n])} lines: {' -> '.join(chains[n])}" for n in largest[:_SHOWN]]
    )


def _most(counts: Mapping[str, int]) -> Measure:
    largest = sorted(counts.items(), key=lambda item: -item[1])[:_SHOWN]
    return Measure(max(counts.values(), default=0), [f"{count}: {name}" for name, count in largest])


def _total(counts: Mapping[str, int]) -> Measure:
    return Measure(sum(counts.values()), _most(counts).causes)


def measures(source: Source) -> dict[str, Measure]:
    """Today's numbers, by their names in the file of budgets."""
    folders: Counter[str] = Counter()
    for name in source.texts:
        folders[name.split(".")[1] if "." in name else name] += source.lines([name])
    features: Counter[str] = Counter()
    for name in source.below("features"):
        if name != "fullshard.features":
            features[name.split(".")[2]] += source.lines([name])
    options = {o: sum(bool(re.search(rf"\b{o}\b", text)) for text in source.texts.values()) for o in OPTIONS}
    return {
        "lines": _total(folders),
        "lines_of_the_kernel": _total({folder: folders[folder] for folder in KERNEL}),
        "lines_of_a_feature": _most(features),
        "closure_of_fully_shard": _closure(source, "fullshard.engine.fully_shard"),
        "closure_of_save": _closure(source, "fullshard.checkpoint.save"),
        "closure_of_load": _closure(source, "fullshard.checkpoint.load"),
        "closure_of_accelerator": _closure(source, "fullshard.api.accelerator"),
        "closure_of_plan": _closure(source, "fullshard.cli.plan"),
        "members_of_a_kernel_class": _most(source.members(*KERNEL)),
        "files_that_name_an_option": _most(options),
        "downcasts_to_owners": _total(_counted(source, _DOWNCAST)),
        "frame_inspections": _total(_counted(source, re.compile(r"sys\._getframe"))),
        "imports_in_functions": _total({name: _inner_imports(tree) for name, tree in source.trees.items()}),
        "private_names_of_torch": _total(_counted(source, re.compile(r"^\s*(?:from|import) torch\S*\._\w+", re.M))),
    }


def _counted(source: Source, pattern: re.Pattern[str]) -> dict[str, int]:
    return {name: len(found) for name, text in source.texts.items() if (found := pattern.findall(text))}


def _inner_imports(tree: ast.Module) -> int:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum(isinstance(n, ast.Import | ast.ImportFrom) for function in functions for n in ast.walk(function))


def over(found: Mapping[str, Measure], budgets: Mapping[str, int]) -> list[str]:
    """What is over its budget, in words; and budgets that nothing is measured for, or measures without one."""
    lines = [f"{name}: no budget, or nothing is measured for it" for name in found.keys() ^ budgets.keys()]
    for name, measure in found.items():
        if name in budgets and measure.value > budgets[name]:
            lines += [f"{name} is {measure.value}, its budget {budgets[name]}:", *(f"  {c}" for c in measure.causes)]
    return lines


def main(arguments: list[str]) -> int:
    """Print what is over its budget; 1 if anything is."""
    found = measures(Source())
    text = BUDGETS.read_text(encoding="utf-8")
    budgets = tomllib.loads(text)
    if "--lower" in arguments:
        for name, measure in found.items():
            if measure.value < budgets[name]:
                text = re.sub(rf"(?m)^{name} = \d+", f"{name} = {measure.value}", text)
        BUDGETS.write_text(text, encoding="utf-8")
        return 0
    lines = over(found, budgets)
    print("\n".join(lines) or f"{len(found)} budgets kept")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

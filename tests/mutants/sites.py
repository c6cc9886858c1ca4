"""Where a line of Python can be changed so that it still runs but means something else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

_COMPARED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is not": "is", "is": "is not", "not in": "in", "in": "not in",
}  # fmt: skip
_COMPUTED = {"+": "-", "-": "+", "**": "*", "*": "//", "//": "*", "/": "*", "%": "//"}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr)
_TEXT = (ast.JoinedStr, ast.List, ast.Tuple)
_Placed = ast.expr | ast.stmt


@dataclass(frozen=True, order=True, slots=True)
class Mutant:
    """One change of one file: `old`, which begins at a line (from 1) and column (in bytes, from 0), becomes `new`."""

    file: str
    line: int
    column: int
    function: str
    old: str
    new: str
    statement: tuple[int, int]
    """First and last line of the statement, without its body."""
    at_import: bool
    """It is not in a function, so it runs as the module is imported."""

    @property
    def name(self) -> str:
        """What stays the same while other lines of the file come and go."""
        return f"{self.file}::{self.function}: {' '.join(self.old.split())} -> {self.new}"

    def apply(self, source: str) -> str:
        """The file's text with the change in it.

        Raises:
            ValueError: the text has something else there.
        """
        data, old = source.encode(), self.old.encode()
        begin = sum(len(line) for line in data.splitlines(keepends=True)[: self.line - 1]) + self.column
        if data[begin : begin + len(old)] != old:
            raise ValueError(f"{self.file}:{self.line} is not {self.old!r} any more")
        return (data[:begin] + self.new.encode() + data[begin + len(old) :]).decode()


def mutants(file: str, source: str) -> list[Mutant]:
    """All changes of a file, in order; none in annotations, assertions, texts of errors and what only types need."""
    text = _Text(source)
    found = {
        Mutant(file, part.lineno, part.col_offset, place.function, text.of(part), new, place.statement, place.at_import)
        for node, place in _nodes(ast.parse(source), _Place("", (1, 1), True))
        for part, new in _changes(node, text)
    }
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Place:
    function: str
    statement: tuple[int, int]
    at_import: bool


class _Text:
    """What is written where a node is; the tree itself forgets parentheses."""

    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._lines = list(accumulate((len(line) for line in self._data.splitlines(keepends=True)), initial=0))

    def of(self, node: _Placed) -> str:
        return self._data[self._begin(node) : self._end(node)].decode()

    def with_operator(self, node: _Placed, left: ast.expr, right: ast.expr, operators: dict[str, str]) -> str | None:
        """The operation with another operator between its operands; None if there is no other for it."""
        begin, end = self._end(left), self._begin(right)
        between = self._data[begin:end].decode()
        old = " ".join(between.strip("() \n").split())
        if old not in operators:
            return None
        changed = between.replace(old, operators[old], 1)
        return self._data[self._begin(node) : begin].decode() + changed + self._data[end : self._end(node)].decode()

    def _begin(self, node: _Placed) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: _Placed) -> int:
        return self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


def _nodes(tree: ast.AST, place: _Place) -> Iterator[tuple[ast.AST, _Place]]:
    """Every node that does something, and where it is."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, _LEFT_ALONE) or _only_for_types(node):
                continue
            if getattr(node, "name", None) in ("__repr__", "__str__") or getattr(node, "arg", None) == "strict":
                continue
            inner = _inner(place, node)
            yield node, inner
            yield from _nodes(node, inner)


def _inner(place: _Place, node: ast.AST) -> _Place:
    function, at_import, statement = place.function, place.at_import, place.statement
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".strip(".")
        at_import = at_import and isinstance(node, ast.ClassDef)
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        statement = node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
    return _Place(function, statement, at_import)


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _changes(node: ast.AST, text: _Text) -> Iterator[tuple[_Placed, str]]:
    """Pairs of what is replaced and by what."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.If(body=[ast.Raise()], orelse=[]):
            yield node.test, "False"
        case ast.If() | ast.IfExp():
            yield node.test, f"not ({text.of(node.test)})"
        case ast.comprehension(ifs=[test]):
            yield test, "True"
        case ast.Compare(left=left, comparators=[right]) | ast.BinOp(left=left, right=right):
            operators = _COMPARED if isinstance(node, ast.Compare) else _COMPUTED
            new = text.with_operator(node, left, right, operators)
            if new and not _is_text(left) and not _is_text(right):
                yield node, new
        case ast.BoolOp(values=[first, *_, last]):
            yield node, f"({text.of(first)})"
            yield node, f"({text.of(last)})"
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"({text.of(node.operand)})"
        case ast.Constant(value=bool() as truth):
            yield node, str(not truth)
        case ast.Constant(value=int() as number):
            yield node, str(number + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLED:
            yield node.func, _CALLED[name]
        case ast.Break():
            yield node, "pass"
        case ast.Continue():
            yield node, "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, "None"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, _TEXT) or (isinstance(node, ast.Constant) and isinstance(node.value, str))

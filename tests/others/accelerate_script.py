"""Runs a test script that Accelerate ships, with its imports from `accelerate` itself changed to `fullshard`.

    fullshard launch tests/others/accelerate_script.py test_ops.py
    fullshard launch tests/others/accelerate_script.py test_sync.py "test_dataloader_break()"

Alone it is run as a file; with an expression its functions are there, and that is evaluated. Further arguments are the
script's. At the end it prints which of the script's functions were called: all of them came to their end.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CALLED = "functions called:"


def scripts() -> Path:
    """Where the installed package has them."""
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "test_utils" / "scripts"


def functions(name: str) -> set[str]:
    """The functions that a script defines at its top level."""
    body = ast.parse((scripts() / name).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def changed(source: str) -> str:
    """A script with nothing but the package changed that it imports its training from."""
    return re.sub(r"^from accelerate(\.accelerator)? import ", "from fullshard import ", source, flags=re.MULTILINE)


def run(name: str, expression: str, arguments: list[str]) -> list[str]:
    """Run a script, or evaluate an expression in it; the names of its functions that were called."""
    path = scripts() / name
    code = compile(changed(path.read_text()), str(path), "exec")
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and _is_function_of(frame.f_code, str(path)):
            called[frame.f_code.co_name] = None

    namespace = {"__name__": "script" if expression else "__main__", "__file__": str(path)}
    sys.argv = [str(path), *arguments]
    sys.setprofile(note)
    try:
        exec(code, namespace)
        if expression:
            eval(expression, namespace)
    finally:
        sys.setprofile(None)
    return list(called)


def _is_function_of(code: CodeType, path: str) -> bool:
    is_function = code.co_flags & inspect.CO_OPTIMIZED  # and not the body of a class
    return bool(code.co_filename == path and is_function and "." not in code.co_qualname and code.co_name[0] != "<")


if __name__ == "__main__":
    script, wanted, *rest = [*sys.argv[1:], ""]
    # In one piece: unbuffered, `print` writes each word by itself, and another rank's line may fall between two.
    sys.stdout.write(" ".join([CALLED, *run(script, wanted, rest[:-1])]) + "\n")

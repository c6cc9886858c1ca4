"""Do all rows hold what is to be trained on? TRL fails at one that does not, and does not say which."""

from __future__ import annotations

import json
from typing import Any

from fullshard.core.errors import DataError, cut

_TEXT, _CHAT = "a text", "a list of messages"
_EXPECTED = {"messages": (_CHAT,), "prompt": (_TEXT, _CHAT), "completion": (_TEXT, _CHAT)}


def require_rows(data: Any, where: str) -> None:
    """Check every row of the columns that are trained on.

    Args:
        data: a data set with these columns and `tools`, which may be empty.
        where: the name of it, for errors.

    Raises:
        DataError: a row is neither text nor chat; with its number.
    """
    for name in data.column_names:
        if name == "tools":
            continue
        expected = _EXPECTED.get(name, (_TEXT,))
        row = _first_that_is_not(data, name, expected)
        if row is not None:
            got = cut(json.dumps(data[row][name], default=str), 200)
            raise DataError(
                f"{where}: row {row + 1} has {got} in the column {name}, expected {' or '.join(expected)}",
                hint="mend or remove it; rows are counted from 1, through all files of a split",
            )


def _first_that_is_not(data: Any, name: str, expected: tuple[str, ...]) -> int | None:
    import pyarrow.compute as pc
    from pyarrow import types

    # What has one type in all rows is looked at by Arrow: a million rows take milliseconds.
    column = data.with_format("arrow")[:][name]
    if _TEXT in expected and (types.is_string(column.type) or types.is_large_string(column.type)):
        is_wrong = pc.is_null(column)
    elif _CHAT in expected and types.is_list(column.type) and types.is_struct(column.type.value_type):
        is_wrong = pc.fill_null(pc.equal(pc.list_value_length(column), 0), True)
    else:
        return next((row for row, value in enumerate(data[name]) if _kind(value) not in expected), None)
    row = pc.index(is_wrong, True).as_py()
    return None if row < 0 else row


def _kind(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return _CHAT
    return _TEXT if isinstance(value, str) else ""

"""Convert datasets in other formats to the columns that TRL's SFTTrainer trains on.

ShareGPT      conversations, or messages with `from` and `value`       messages
Alpaca        instruction, output; input, system and history if given  messages, or prompt and completion as text
preferences   chosen and rejected; prompt if given                     the chosen answer
"""

from collections.abc import Callable, Mapping
from typing import Any

from fullshard.core.errors import DataError, shortened

Row = dict[str, Any]
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_KNOWN = ("system", "user", "assistant", "tool")
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}{further}\n\n### Response:\n"
)
"""The prompt that Stanford Alpaca was trained on."""


def converted(rows: Any, where: str, say: Callable[[str], None], *, has_template: bool) -> Any:
    """Return the rows with the columns that TRL expects, and print which format was found. Keep other rows unchanged.

    Without a chat template, Alpaca's rows become text in the form that Alpaca was trained on.

    Raises:
        DataError: A row does not fit the format; the error gives its number and the row.
    """
    held = set(rows.column_names)
    first = rows[0] if len(rows) else {}
    turn = next(iter(first.get("messages") or ()), None)
    if "conversations" in held or (isinstance(turn, Mapping) and "from" in turn):
        column = "conversations" if "conversations" in held else "messages"
        name, convert = "ShareGPT", lambda row: {"messages": [_turn(each) for each in row[column]]}
    elif {"instruction", "output"} <= held:
        name, convert = "Alpaca", lambda row: _alpaca(row, has_template=has_template)
    elif {"chosen", "rejected"} <= held:
        name, convert = "preference pairs, of which the chosen answers are trained on", _preferred
    else:
        return rows

    def checked(row: Row, number: int) -> Row:
        try:
            return convert(row)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: row {number + 1} does not fit {name.partition(',')[0]}: {error}, in "
                f"{shortened(repr(row), 200)}",
                hint="fix or remove the row, or write the data as `messages` with `role` and `content`",
            ) from error

    say(f"{where}: the format is {name}")
    kept = ("tools",) if "tools" in held else ()
    return rows.map(checked, with_indices=True, remove_columns=sorted(held - set(kept)), load_from_cache_file=False)


def _turn(turn: Mapping[str, Any]) -> dict[str, str]:
    """Return a message with a role that chat templates know."""
    role = turn["from"] if "from" in turn else turn["role"]
    role = _ROLES.get(role, role)
    if role not in _KNOWN:
        raise ValueError(f"unknown role {role!r}, expected one of {', '.join((*_KNOWN, *_ROLES))}")
    content = turn["value"] if "value" in turn else turn["content"]
    if not isinstance(content, str):
        raise TypeError(f"{role} has the content {content!r}, expected text")
    return {"role": role, "content": content}


def _alpaca(row: Row, *, has_template: bool) -> Row:
    for name in ("instruction", "output"):
        if not isinstance(row[name], str) or not row[name]:
            raise TypeError(f"{name} is {row[name]!r}, expected text")
    system, history = row.get("system") or "", row.get("history") or []
    if has_template:
        asked = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        said = [("system", system)] if system else []
        said += [pair for question, answer in history for pair in (("user", question), ("assistant", answer))]
        said += [("user", asked), ("assistant", row["output"])]
        return {"messages": [_turn({"role": role, "content": content}) for role, content in said]}
    if system or history:
        raise ValueError("a system prompt or a history needs a chat template (--chat_template_format chatml)")
    further = f"\n\n### Input:\n{row['input']}" if row.get("input") else ""
    paired = ", paired with an input that provides further context" if further else ""
    asked = _ALPACA.format(paired=paired, instruction=row["instruction"], further=further)
    return {"prompt": asked, "completion": row["output"]}


def _preferred(row: Row) -> Row:
    prompt, chosen = row.get("prompt"), row["chosen"]
    if isinstance(chosen, str):
        return {"text": chosen} if prompt is None else {"prompt": prompt, "completion": chosen}
    turns = [_turn(each) for each in chosen]
    if not turns or turns[0]["role"] == "assistant":  # the answer alone
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        turns = [*map(_turn, asked or ()), *turns]
    if len(turns) < 2:
        raise ValueError("there is no question before the chosen answer")
    return {"messages": turns}

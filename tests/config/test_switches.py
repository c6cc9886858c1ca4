"""The environment variables that are fullshard's own: rows of one table, and nothing else.

pytest tests/config/test_switches.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import fullshard
from fullshard.config.environment import load_environment
from fullshard.config.switches import CONFIG, SWITCHES, Switch, check_switches
from fullshard.config.tables import switches_table
from fullshard.core.errors import ConfigError
from fullshard.engine import extension
from fullshard.features import fully_shard

ROOT = Path(fullshard.__file__).parent
USERS = [switch for switch in SWITCHES.values() if switch.values]


def test_no_file_has_a_variable_that_is_in_no_row() -> None:
    """Only the first thing that a worker runs has names of its own: it imports nothing of fullshard."""
    for path in ROOT.rglob("*.py"):
        names = set(re.findall(r"""["'](FULLSHARD_\w+)["']""", path.read_text()))
        assert names <= set(SWITCHES), path
        assert not names or path.name in ("switches.py", "bootstrap.py"), f"{path}: read the row of config/switches.py"


@pytest.mark.parametrize("switch", USERS, ids=lambda switch: switch.name)
def test_values(switch: Switch) -> None:
    default, *others = switch.values
    assert others
    assert switch.read({}) == switch.read({switch.name: " "}) == default
    assert [switch.read({switch.name: value}) for value in others] == others
    with pytest.raises(
        ConfigError, match=rf"\${switch.name} has the invalid value 'sometimes'\nhint: use {default} or "
    ):
        switch.read({switch.name: "sometimes"})
    assert f"| `{switch.name}` |" in switches_table()
    assert all(f"`{value}`: " in switches_table() for value in switch.values)


def test_any_text_where_no_values_are_listed() -> None:
    assert CONFIG.read({CONFIG.name: "/some/file"}) == "/some/file"
    assert CONFIG.read({}) == ""


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FULLSHARD_COM", "gloo", "unknown variable FULLSHARD_COM = 'gloo'.*did you mean FULLSHARD_COMM"),
        (
            "FULLSHARD_ELSE",
            "1",
            "unknown variable FULLSHARD_ELSE = '1'.*unset it; the known variables are FULLSHARD_COMM, ",
        ),
        ("FULLSHARD_COMM", "glue", "FULLSHARD_COMM has the invalid value 'glue'.*use auto or gloo, or unset it"),
        *(
            ("FULLSHARD_ELASTIC", value, f"FULLSHARD_ELASTIC has the invalid value '{value}'.*use MIN:MAX, or unset it")
            for value in ("abc:3", "3:abc", "3", "0:2", "4:2", "-1:2", "1:2:3", "1:" + "9" * 20, "²:³")
        ),
        *(
            (
                "FULLSHARD_MAX_LOST_STEPS",
                value,
                f"FULLSHARD_MAX_LOST_STEPS has the invalid value '{value}'.*use a number of steps, or",
            )
            for value in ("abc", "-1", "1.5", "9" * 20)
        ),
        *(
            (
                "FULLSHARD_TIMEOUT",
                value,
                f"FULLSHARD_TIMEOUT has the invalid value '{value}'.*use a number of seconds, or unset it",
            )
            for value in ("abc", "-1", "0", "nan", "inf", "1e300", "9" * 20)
        ),
        ("FULLSHARD_STEP_IN_BACKWARD", "0", "FULLSHARD_STEP_IN_BACKWARD has the invalid value '0'.*use 1, or unset it"),
        (
            "FULLSHARD_LAUNCHER_PID",
            "me",
            "FULLSHARD_LAUNCHER_PID has the invalid value 'me'.*use a process ID, or unset it",
        ),
    ],
)
def test_what_is_not_understood_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    [problem] = load_environment({name: value, "FULLSHARD_OFFLOAD": "in-turn"}).problems
    assert re.search(message, f"{problem} {problem.hint}")
    assert str(problem).startswith(f"${name}: ")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check_switches()


def test_the_first_thing_sharded_looks_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is started without the launcher reads no other configuration."""
    monkeypatch.setattr(extension, "_has_begun", [])
    monkeypatch.setenv("FULLSHARD_OFLOAD", "in-turn")
    with pytest.raises(ConfigError, match="did you mean FULLSHARD_OFFLOAD"):
        fully_shard(nn.Linear(1, 1))
    monkeypatch.delenv("FULLSHARD_OFLOAD")
    fully_shard(nn.Linear(1, 1))

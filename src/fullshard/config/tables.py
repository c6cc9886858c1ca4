"""Generates the documentation's Markdown tables of dialects and of fullshard's own environment variables.

    python -m fullshard.config.tables docs/configuration.md

This command regenerates the tables between the marks `<!-- table NAME -->` and `<!-- end -->` of a page.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from fullshard.config.accelerate import DYNAMO_KEYS, PARALLELISM_KEYS
from fullshard.config.accelerate_file import ACCELERATE
from fullshard.config.deepspeed import DEEPSPEED, DEEPSPEED_SHORT
from fullshard.config.dialect import Dialect, Status
from fullshard.config.fsdp import FSDP
from fullshard.config.switches import HANDED_OVER, SWITCHES
from fullshard.config.xla import XLA_KEYS, XLA_SETTINGS

TABLES = {
    "accelerate": ACCELERATE,
    "fsdp_config": FSDP,
    "dynamo_config": Dialect("", DYNAMO_KEYS),
    "parallelism_config": Dialect("", PARALLELISM_KEYS),
    "xla": Dialect("", XLA_KEYS),
    "xla_fsdp_settings": XLA_SETTINGS,
    "deepspeed": DEEPSPEED,
    "deepspeed_config": DEEPSPEED_SHORT,
}
"""The tables of dialects on the page, by the name in their marks. The table of variables is named `switches`."""


def switches_table() -> str:
    """Return a table of fullshard's own environment variables, with their subjects and values. Defaults come first."""
    rows = ["| variable | meaning | values |", "|---|---|---|"]
    for switch in SWITCHES.values():
        values = "; ".join(f"`{value}`: {does}" for value, does in switch.values.items())
        values = values or ("set by the launcher" if switch in HANDED_OVER else switch.form)
        rows.append(f"| `{switch.name}` | {switch.about} | {values} |")
    return "\n".join(rows)


def _rows(dialect: Dialect, section: str = "") -> Iterator[str]:
    """Yield one row per key with its spellings, its effect, and its target or the reason."""
    for key in dialect.keys:
        if key.section is not None and key.name not in TABLES:
            yield from _rows(key.section, f"{section}{key.name}.")
            continue
        names = ", also ".join(f"`{section}{name}`" for name in (key.name, *key.spellings))
        target = f"`{key.target}`" if key.target and key.status is not Status.REFUSED else ""
        meaning = " - ".join(part for part in (target, key.because) if part)
        yield f"| {names} | {'section, see below' if key.section is not None else key.status.value} | {meaning} |"


def _table(name: str) -> str:
    if name == "switches":
        return switches_table()
    return "\n".join(["| key | here | setting, or reason |", "|---|---|---|", *_rows(TABLES[name])])


def fill_tables(page: str) -> str:
    """Return the page with every marked table regenerated."""
    pattern = r"(<!-- table (\w+) -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{_table(found[2])}\n{found[3]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(fill_tables(path.read_text(encoding="utf-8")), encoding="utf-8")

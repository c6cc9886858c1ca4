"""Run a program on this package's `fully_shard`: `torchrun --nproc_per_node 8 -m fullshard.take train.py ARGUMENTS`."""

import os
import sys

from fullshard.config.switches import TAKE
from fullshard.launch import bootstrap


def main() -> None:
    """Run the script or the module that the command line names, as `fullshard launch --take fully_shard` does."""
    words = sys.argv[1:]
    kind = "module" if words[:1] == ["-m"] else "script"
    words = words[1:] if kind == "module" else words
    if not words or words[0].startswith("-"):
        sys.exit("usage: python -m fullshard.take [-m MODULE | SCRIPT.py] [ARGUMENTS]")
    os.environ.setdefault(TAKE.name, "fully_shard")
    sys.argv[1:] = [kind, *words]
    bootstrap.main()


if __name__ == "__main__":
    main()

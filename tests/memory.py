"""How much memory this process needs beyond what it had."""

from __future__ import annotations

import re
from pathlib import Path


class PeakGrowth:
    """Measures the peak of resident memory inside a `with` block, over what was resident before it (Linux).

    Attributes:
        nbytes: the growth, once the block has ended. Mapped pages of files count.
    """

    nbytes = 0

    def __enter__(self) -> PeakGrowth:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.nbytes = _status("VmHWM") - self._before


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024

"""The rules for text that is used as a path. Every entry point that takes a path applies them.

A path refers to this host, and `~` is the user's home directory. Text that `pathlib` would misread is refused. This
applies to URLs, because output for `s3://bucket` would end up in a folder `./s3:`, and to empty text (from an unset
shell variable), which would mean the current folder.
"""

import os
import re
from pathlib import Path

from fullshard.core.errors import ConfigError, shortened

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash, because `pathlib` reduces two slashes to one
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_FILES = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".md", ".py", ".bin", ".safetensors", ".arrow")
_HINTS = {
    "file": "write only the path, without file://",
    "http": "pass a model or dataset on the hub without its address, as ORGANIZATION/NAME",
    "hf": "pass a model or dataset on the hub without its address, as ORGANIZATION/NAME",
}
_LONGEST_NAME = 255
_ELSEWHERE = (
    "mount the storage and use the path of the mount; only checkpoints may be at a URL (--checkpoint-dir, save_state)"
)


def check_path(written: str) -> None:
    """Raise `ConfigError` for text that is not a path on any host. A relative path that looks like a URL needs `./`."""
    if not written.strip():
        raise ConfigError(
            f"the path {written!r} is empty", hint="check whether a variable is empty; use . for the current folder"
        )
    if found := _URL.match(written):
        scheme = found[1].lower()
        raise ConfigError(
            f"{written!r} is a URL, but only paths on this host are supported, not {scheme}://",
            hint=_HINTS.get(scheme.removesuffix("s"), _ELSEWHERE),
        )
    for part in written.split("/"):
        if len(os.fsencode(part)) > _LONGEST_NAME:
            raise ConfigError(
                f"{shortened(written, 300)!r} contains a name of {len(part)} characters, but file systems allow "
                f"at most {_LONGEST_NAME} bytes",
                hint="check the quotes around the path and the arguments next to it",
            )
    if "\0" in written:
        raise ConfigError(
            f"{written!r} contains a NUL character, which is not allowed in paths", hint="check how the path was read"
        )


def looks_like_path(written: str) -> bool:
    """Return whether a name must be a path, because it cannot be a name on the hub (ORGANIZATION/NAME)."""
    return (
        written.startswith((".", "/", "~"))
        or "\\" in written
        or _DRIVE.match(written) is not None
        or written.rstrip("/").count("/") > 1
        or written.lower().endswith(_FILES)
    )


def require_there(written: str) -> None:
    """Raise `ConfigError` for a path that does not exist, before it is mistaken for a name and the hub is queried."""
    if looks_like_path(written) and not os.path.exists(written):  # noqa: PTH110 - a name of another system's is no Path
        is_of_windows = "\\" in written or _DRIVE.match(written)
        hint = "paths on this host have no drive letter and no \\" if is_of_windows else "check the path"
        raise ConfigError(f"the file or directory {written!r} does not exist", hint=hint)


def local_path(text: str | os.PathLike[str]) -> Path:
    """Check text from the user with `check_path`, and return it as a path on this host."""
    return Path(local_name(text))


def local_name(text: str | os.PathLike[str]) -> str:
    """Check text from the user, which may be a path or a name, with `check_path`. Return it with `~` expanded."""
    written = os.fspath(text) if isinstance(text, str | os.PathLike) else str(text)
    check_path(written)
    if not written.startswith("~"):
        return written
    try:
        return str(Path(written).expanduser())
    except RuntimeError:
        home = Path(written).parts[0]
        raise ConfigError(
            f"{written!r} cannot be expanded: this host has no home directory for {home}",
            hint=f"if the name itself begins with a tilde, write ./{home}",
        ) from None

"""The supported versions of torch, which fullshard checks when it is imported, without importing torch itself."""

import importlib.metadata

from fullshard.core.errors import VersionError
from fullshard.core.version import __version__

OLDEST_TORCH = (2, 11)
"""The oldest version that passes the tests, as in `pyproject.toml`. With 2.10, a rank cannot join part of a mesh."""


XLA_TORCH = (2, 9)
"""The torch version for which the last torch_xla was built. Other versions cannot load it."""


def is_too_old(version: str) -> bool:
    """Return whether a torch version, such as `2.13.0+cpu`, is older than the oldest supported one."""
    return _release(version) < OLDEST_TORCH


def require_torch() -> None:
    """Raise `VersionError` if torch is too old. The lowest-level packages that use torch call this first."""
    version = version_of("torch")
    if version is not None and is_too_old(version):  # without a version, the import reports errors
        oldest = ".".join(map(str, OLDEST_TORCH))
        hint = f"pip install 'torch>={oldest}'"
        if why_no_xla() is None:
            hint = "to train with PyTorch/XLA, use fullshard.integrations.xla and start the script with plain python"
        raise VersionError(f"fullshard needs torch {oldest} or later, got {version}", hint=hint)


def why_no_xla() -> str | None:
    """Return the reason why the installed packages cannot train through PyTorch/XLA, or None if they can."""
    xla, torch = version_of("torch_xla"), version_of("torch")
    if xla is None or torch is None:
        return f"{'torch_xla' if xla is None else 'torch'} is not installed"
    return None if _release(xla) == _release(torch) else f"torch_xla {xla} does not match torch {torch}"


def version_of(distribution: str) -> str | None:
    """Return the version of a package, or None if it is not installed. The version of fullshard is always known."""
    if distribution == "fullshard":
        return __version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Return the major and minor version numbers."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())

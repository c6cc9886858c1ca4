"""Messages of other libraries that the user cannot act on are not shown, and all others are.

pytest tests/recipes/test_other_libraries_messages.py
"""

from __future__ import annotations

import logging
import warnings

import pytest

from fullshard.recipes import NOISE, silence

SILENT = [
    ("torchao", "Failed to load /x/torchao/_C_mxfp8.so: Could not load this library: /x/torchao/_C_mxfp8.so"),
    ("torch.utils._pytree", "<enum 'A'> is an Enum. Calling register_constant() on Enum subclasses is deprecated"),
    ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: no module"),
]


@pytest.mark.parametrize(("logger", "silent"), SILENT)
def test_only_messages_without_a_remedy_are_silenced(
    logger: str, silent: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(logger), "propagate", True)  # torch turns it off
    assert logger in NOISE
    logging.getLogger(logger).warning(silent)
    logging.getLogger(logger).warning("Failed to load something else")
    assert caplog.messages == ["Failed to load something else"]


def test_another_deprecation_is_shown() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence()
        warnings.warn("`gradient_checkpointing` is deprecated and will be removed in v6.", FutureWarning, stacklevel=1)
        warnings.warn("`eval_on_start` is deprecated and will be removed in v6.", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in shown] == ["`eval_on_start` is deprecated and will be removed in v6."]

"""Complete training jobs as plain functions that use the engine. Start reading at `train` in `train.py`."""

import logging
import warnings

NOISE = {
    "torchao": "/_C_",  # kernels for newer GPUs, which are not loaded on other devices
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}
"""Words of messages that other libraries print when they are imported, by logger. The user cannot act on them."""


def silence() -> None:
    """Drop these messages, and TRL's and Transformers' own use of an older name."""
    for logger, words in NOISE.items():
        logging.getLogger(logger).addFilter(lambda record, words=words: words not in record.getMessage())  # type: ignore[misc]
    warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing` is deprecated", FutureWarning)


silence()

"""`EMACallback`, for `Trainer(..., callbacks=[EMACallback(0.999)])`."""

from __future__ import annotations

from typing import Any

from fullshard.core.imports import import_extra
from fullshard.integrations.transformers.averaging import KeepsAverage

_TrainerCallback: Any = import_extra("transformers", extra="hf", purpose="EMACallback").TrainerCallback


class EMACallback(KeepsAverage, _TrainerCallback):  # type: ignore[misc]
    """Keeps a moving average of the weights in fullshard's Trainers, which save it and evaluate with it.

        callback = EMACallback(0.999)
        trainer = Trainer(model, ..., callbacks=[callback])
        trainer.train()
        with callback.ema.swapped():  # on every rank
            trainer.save_model("averaged")

    See `KeepsAverage` for its arguments. After training the weights are the trained ones.
    """

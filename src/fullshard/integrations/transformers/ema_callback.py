"""`EMACallback`, for `Trainer(..., callbacks=[EMACallback(0.999)])`."""

from typing import Any

from fullshard.core.imports import import_extra
from fullshard.integrations.transformers.averaging import KeepsAverage

_TrainerCallback: Any = import_extra("transformers", extra="hf", purpose="EMACallback").TrainerCallback


class EMACallback(KeepsAverage, _TrainerCallback):  # type: ignore[misc]
    """A callback that keeps a moving average of the weights. fullshard's Trainers save it and evaluate with it.

        callback = EMACallback(0.999)
        trainer = Trainer(model, ..., callbacks=[callback])
        trainer.train()
        with callback.ema.swapped():  # on every rank
            trainer.save_model("averaged")

    The arguments are those of `KeepsAverage`. After training, the model has the trained weights, not the averages.
    """

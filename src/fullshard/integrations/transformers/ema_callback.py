"""`EMACallback`, for `Trainer(..., callbacks=[EMACallback(0.999)])`."""

from __future__ import annotations

from transformers import TrainerCallback

from fullshard.integrations.transformers.averaging import KeepsAverage


class EMACallback(KeepsAverage, TrainerCallback):  # type: ignore[misc]
    """Keeps a moving average of the weights in fullshard's Trainers, which save it and evaluate with it.

        callback = EMACallback(0.999)
        trainer = Trainer(model, ..., callbacks=[callback])
        trainer.train()
        with callback.ema.swapped():  # on every rank
            trainer.save_model("averaged")

    See `KeepsAverage` for its arguments. After training the weights are the trained ones.
    """

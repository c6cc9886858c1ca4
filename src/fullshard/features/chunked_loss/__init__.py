"""The loss of a language model in chunks of tokens, without all logits at once."""

from fullshard.features.chunked_loss.loss import use_chunked_loss

__all__ = ["use_chunked_loss"]

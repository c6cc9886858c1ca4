"""Specifies which parts of a rank's data are kept in host memory while another device computes."""

from dataclasses import dataclass, fields
from typing import Self

from fullshard.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Offload:
    """Four parts that can be kept in host memory, each with a separate switch.

    | on the host | goes to the device | goes to the host |
    |---|---|---|
    | compute shards | before every gather | - |
    | main weights | after every optimizer step, unless compute shards are on the host too | gradients, once reduced |
    | optimizer state alone | before every optimizer step | after it |
    | activations | in backward, one unit ahead | in forward, while the next unit computes |

    Attributes:
        compute_shards: The input of the units' gathers, in the compute dtype. A frozen parameter has no other storage.
            If only main weights are on the device, a trainable parameter is gathered from them, so nothing is copied.
        main_weights: The weights that the optimizer updates. If they are on the host, it updates them there.
        activations: The saved tensors of a unit. They are not sharded, so `everything` does not include them.
    """

    compute_shards: bool = False
    main_weights: bool = False
    optimizer_state: bool = False
    activations: bool = False

    def __post_init__(self) -> None:
        if self.main_weights and not self.optimizer_state:
            raise ConfigError(
                "main weights are on the host but optimizer state is on the device; an update needs both in one place",
                hint="offload the optimizer state too, or leave the main weights on the device",
            )

    @classmethod
    def of(
        cls,
        everything: bool,
        compute_shards: bool | None = None,
        main_weights: bool | None = None,
        optimizer_state: bool | None = None,
        activations: bool = False,
    ) -> Self:
        """Resolve the switches. None means `everything`, or for the optimizer state, `everything or main_weights`."""
        main = everything if main_weights is None else main_weights
        return cls(
            everything if compute_shards is None else compute_shards,
            main,
            (everything or main) if optimizer_state is None else optimizer_state,
            activations,
        )

    def __bool__(self) -> bool:
        """Return whether anything is on the host."""
        return self.has_shards or self.activations

    @property
    def has_shards(self) -> bool:
        """Return whether any sharded part is on the host."""
        return self.compute_shards or self.main_weights or self.optimizer_state

    @property
    def is_everything(self) -> bool:
        """Return whether every sharded part is on the host."""
        return self.compute_shards and self.main_weights

    def __str__(self) -> str:
        names = [field.name.replace("_", " ") for field in fields(self) if getattr(self, field.name)]
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "nothing"

"""The settings of the mesh's axes whose ranks get the same batch and divide its sequences."""

from typing import Literal, Self

from pydantic import Field, model_validator

from fullshard.config.settings import CombinationError, Settings

Rotation = Literal["allgather", "alltoall"]
SequenceBackend = Literal["deepspeed", "fullshard"]


class AxesConfig(Settings):
    """Settings for the division of long sequences over ranks. Parameters are sharded over these ranks, too."""

    cp_size: int = Field(default=1, ge=1, le=10**6)
    """Number of ranks over which context parallelism divides every sequence."""

    cp_comm_strategy: Rotation = "allgather"
    """How the ranks of context parallelism exchange keys and values: all at once, or one part at a time."""

    sp_size: int = Field(default=1, ge=1, le=10**6)
    """Number of ranks over which sequence parallelism (Ulysses) divides every sequence, and in attention the heads."""

    sp_backend: SequenceBackend = "deepspeed"
    """Implementation of sequence parallelism that exchanges the heads."""

    sp_seq_length: int | None = Field(default=None, ge=1)
    """Length of all sequences. None: the length of each batch."""

    sp_seq_length_is_variable: bool = True
    """Whether the length may differ between batches. Otherwise, `sp_seq_length` is required."""

    sp_attn_implementation: str | None = None
    """Attention that sequence parallelism computes. None: the model's own."""

    @property
    def ranks_per_sequence(self) -> int:
        """Return the number of ranks over which each sequence is divided."""
        return self.cp_size * self.sp_size

    def check_shards(self, shard_size: int) -> None:
        """Refuse shard groups that do not consist of whole groups of ranks that share sequences."""
        if shard_size % self.ranks_per_sequence:
            raise CombinationError(
                f"cp_size {self.cp_size} x sp_size {self.sp_size} ranks share each sequence, but {shard_size} ranks "
                "share the parameters",
                "parallelism.cp_size",
                "parallelism.sp_size",
                hint="shard over a multiple of these ranks",
            )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.cp_size > 1 and self.sp_size > 1:
            what = f"cp_size = {self.cp_size} and sp_size = {self.sp_size} both divide the sequences"
            raise CombinationError(what, "cp_size", "sp_size", hint="use one of the two")
        return self

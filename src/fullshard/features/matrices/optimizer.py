"""Optimizers that need complete matrices of sharded parameters. An owner rank computes with each matrix."""

from typing import Any, ClassVar

import torch

from fullshard.comm.mesh import Mesh
from fullshard.core.errors import OptimizerError
from fullshard.engine.parameter import ShardedParameter, are_same
from fullshard.engine.step.adapters import OptimizerAdapter
from fullshard.features.matrices.exchange import WholeMatrices
from fullshard.plan.dealing import matrix_shape


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer for sharded parameters in which the update of an element depends on its complete matrix.

    Elementwise computations run on each rank's part, and `WholeMatrices` handles computations on complete matrices.

    Attributes:
        name: name of the algorithm that updates matrices.
        keeps_matrices: whether owners keep state for their matrices. Keys of such state end with the number of the
            matrix within its parameter, as in `left.0`. All other state tensors have the same layout as the parameter.
    """

    name: str
    keeps_matrices: ClassVar[bool] = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._whole: list[WholeMatrices] = []
        self._dealt: list[ShardedParameter] = []
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state as torch does, and discard the matrix assignment. `load_state_dict` calls this last."""
        super().__setstate__(state)
        self._whole, self._dealt = [], []

    def _members(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the parameters that are updated as complete matrices, each with its parameter group."""
        return {}

    def is_owned(self, key: str) -> bool:
        """Return whether the state with this key belongs to one matrix, so that only its owner keeps it."""
        return self.keeps_matrices and key.rpartition(".")[2].isdigit()

    def owned(self, parameter: torch.Tensor) -> list[int]:
        """Return which of the parameter's matrices this rank owns, as numbers within the parameter."""
        members = self._members()
        if parameter not in members:
            return []
        if not isinstance(parameter, ShardedParameter):
            return list(range(matrix_shape(parameter.shape, flatten=members[parameter]["flatten"])[0]))
        own = parameter.mesh.replicate_rank, parameter.mesh.shard_rank
        owners = [o for whole in self._deal() for o in whole.owners().get(id(parameter), ())]
        return [number for number, owner in enumerate(owners) if owner == own]

    def _deal(self) -> list[WholeMatrices]:
        """Return the assignment of matrices to ranks, which is made again if the sharded parameters have changed."""
        members = self._members()
        parameters = [p for p in members if isinstance(p, ShardedParameter) and p.requires_grad]
        if are_same(parameters, self._dealt):
            return self._whole
        flattened = {id(p) for p in parameters if members[p]["flatten"]}
        meshes = list(dict.fromkeys(p.mesh for p in parameters))
        dealt = [WholeMatrices([p for p in parameters if p.mesh is mesh], flattened) for mesh in meshes]
        if self.keeps_matrices:
            self._check_owners(dealt)
        self._whole, self._dealt = dealt, parameters
        for parameter in parameters if self.keeps_matrices else ():
            # Drop state of other owners' matrices, which exists if it was created before sharding or loaded.
            own, state = set(self.owned(parameter)), self.state.get(parameter, {})
            for key in [key for key in state if self.is_owned(key) and int(key.rpartition(".")[2]) not in own]:
                del state[key]
        return dealt

    def _check_owners(self, dealt: list[WholeMatrices]) -> None:
        """Raise an error, on every rank, if a new assignment moves a matrix away from the rank that keeps its state."""
        before = {key: owners for whole in self._whole for key, owners in whole.owners().items()}
        after = {key: owners for whole in dealt for key, owners in whole.owners().items()}
        moved = [p for p in self._dealt if after.get(id(p), before[id(p)]) != before[id(p)]]
        if moved:
            raise OptimizerError(
                f"{self.name}: the trainable parameters have changed since the last step, and {moved[0].name} "
                f"{tuple(moved[0].shape)} would get a new owner that does not have its state",
                hint=(
                    "save a checkpoint, create the optimizer again with all trainable parameters, and load the "
                    "checkpoint, which sends the state to its owners"
                ),
            )


class MatrixAdapter(OptimizerAdapter):
    """The adapter for a `MatrixOptimizer`, which does not need some of the engine's checks and conversions."""

    works_on_parts = needs_plain_memory = True

    def takes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer is a `MatrixOptimizer`."""
        return isinstance(optimizer, MatrixOptimizer)

    def why_no_full_state(self, optimizer: Any, mesh: Mesh) -> str:
        """Return why the state cannot be unsharded: only owners keep the state for a matrix. Return "" if it can."""
        return "stored by the ranks that own its matrices" if optimizer.keeps_matrices and mesh.world_size > 1 else ""

    def is_laid_out(self, optimizer: Any, key: str) -> bool:
        """Return whether the state with this key has the same layout as the parameter."""
        return not optimizer.is_owned(key)

"""The rule that assigns each parameter of a model to a matrix optimizer such as Muon, or to AdamW."""

from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from fullshard.core.sizes import format_count
from fullshard.features.unit_selection import embeddings_of
from fullshard.plan.dealing import matrix_shape

HEAD_NAMES = frozenset({"classifier", "embed_out", "lm_head", "output_layer", "qa_outputs", "score", "unembed"})
"""The names of an output head at any place in the model."""
OUTER_HEAD_NAMES = frozenset({"fc", "head", "heads", "output"})
"""The names of an output head that is a direct part of the model."""
_WRAPPERS = ("module.", "base_model.", "model.")
_SHOWN = 3
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(slots=True)
class MatrixRule:
    """Holds the trainable parameters of a model by name, grouped by the optimizer that updates them.

    `str()` summarizes the rule in one line. The matrix optimizer updates hidden matrices, including convolutions,
    expert weights and LoRA factors. AdamW updates embeddings, the output head and vectors (norms, biases). This is the
    assignment that Keller Jordan published for Muon.
    """

    optimizer: str = "Muon"  # the name of the optimizer that updates the matrices
    matrices: dict[str, nn.Parameter] = field(default_factory=dict)  # matrices and batches of matrices
    convolutions: dict[str, nn.Parameter] = field(default_factory=dict)  # a matrix each, one row per output channel
    embeddings: dict[str, nn.Parameter] = field(default_factory=dict)  # AdamW updates this and the next two
    heads: dict[str, nn.Parameter] = field(default_factory=dict)
    vectors: dict[str, nn.Parameter] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, optimizer: str = "Muon") -> Self:
        """Return the rule for a model. A tied parameter appears once, as an embedding if it is also the output head."""
        rule = cls(optimizer)
        embedded: dict[int, bool] = {}
        for module in embeddings_of(model):
            for parameter in module.parameters(recurse=False):
                embedded.setdefault(id(parameter), isinstance(module, nn.Embedding))
        convolved = {
            id(p) for m in model.modules() if isinstance(m, _CONVOLUTIONS) for p in m.parameters(recurse=False)
        }
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                rule._class_of(name, parameter, embedded, convolved)[name] = parameter
        return rule

    def _class_of(
        self, name: str, parameter: nn.Parameter, embedded: dict[int, bool], convolved: set[int]
    ) -> dict[str, nn.Parameter]:
        path = name
        for wrapper in _WRAPPERS:
            path = path.removeprefix(wrapper)
        modules = path.split(".")[:-1]
        is_embedding = embedded.get(id(parameter))
        if is_embedding or "embed" in name.lower().replace("unembed", ""):
            return self.embeddings
        if is_embedding is False or HEAD_NAMES & set(modules) or (len(modules) == 1 and modules[0] in OUTER_HEAD_NAMES):
            return self.heads
        is_convolution = id(parameter) in convolved
        if parameter.dim() < 2 or 1 in matrix_shape(parameter.shape, flatten=is_convolution)[1:]:
            return self.vectors
        return self.convolutions if is_convolution else self.matrices

    def groups(self, *, decays_vectors: bool = True) -> list[dict[str, Any]]:
        """Return parameter groups for the optimizer. If `decays_vectors` is false, vectors get a weight decay of 0."""
        others = {**self.embeddings, **self.heads}
        algorithm = self.optimizer.lower()
        groups: list[dict[str, Any]] = [
            {"params": list(self.matrices.values()), "algorithm": algorithm},
            {"params": list(self.convolutions.values()), "algorithm": algorithm, "flatten": True},
            {"params": list(others.values()), "algorithm": "adamw"},
            {"params": list(self.vectors.values()), "algorithm": "adamw"},
        ]
        if not decays_vectors:
            groups[-1]["weight_decay"] = 0.0
        return [group for group in groups if group["params"]]

    def __str__(self) -> str:
        own, others = self._told("matrices", "convolutions"), self._told("embeddings", "heads", "vectors")
        return f"{self.optimizer} updates {own}; AdamW {others}"

    def _told(self, *kinds: str) -> str:
        told = []
        for kind in kinds:
            if parameters := getattr(self, kind):
                names = [*list(parameters)[:_SHOWN], *(["..."] if len(parameters) > _SHOWN else [])]
                elements = format_count(sum(p.numel() for p in parameters.values()))
                told.append(f"{len(parameters)} {kind} of {elements} elements ({', '.join(names)})")
        return ", ".join(told) or "nothing"

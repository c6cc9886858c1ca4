"""Complete matrices for optimizers: each is assembled on its owner rank, and its update is sent back in pieces."""

from fullshard.features.matrices.exchange import WholeMatrices
from fullshard.features.matrices.optimizer import MatrixAdapter, MatrixOptimizer

__all__ = ["MatrixAdapter", "MatrixOptimizer", "WholeMatrices"]

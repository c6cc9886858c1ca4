"""Complete matrices for optimizers. The rank that owns a matrix computes its update and sends each rank a piece."""

from fullshard.features.matrices.exchange import WholeMatrices
from fullshard.features.matrices.optimizer import MatrixAdapter, MatrixOptimizer

__all__ = ["MatrixAdapter", "MatrixOptimizer", "WholeMatrices"]

"""Whole matrices for optimizers: each on the rank that owns it, pieces of it sent there and back."""

from fullshard.features.matrices.exchange import WholeMatrices
from fullshard.features.matrices.optimizer import MatrixAdapter, MatrixOptimizer

__all__ = ["MatrixAdapter", "MatrixOptimizer", "WholeMatrices"]

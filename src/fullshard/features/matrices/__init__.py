"""Complete matrices for optimizers.

Each matrix is assembled on the rank that owns it. The owner computes the update and sends each rank its piece.
"""

from fullshard.features.matrices.exchange import WholeMatrices
from fullshard.features.matrices.optimizer import MatrixAdapter, MatrixOptimizer

__all__ = ["MatrixAdapter", "MatrixOptimizer", "WholeMatrices"]

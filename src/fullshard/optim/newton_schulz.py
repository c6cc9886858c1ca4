"""Compute an approximation of the nearest orthogonal matrix by Newton-Schulz iteration, with matrix products only.

The method was published by Keller Jordan, https://kellerjordan.github.io/posts/muon/. The products and their order are
the same as in `torch.optim.Muon`, so the results are bit-identical. Because some products are symmetric, a quarter of
such a result is copied instead of being computed twice.
"""

import torch

from fullshard.plan.dealing import HALVED_ROWS, NEWTON_SCHULZ_STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of the quintic polynomial, chosen for the steepest slope at zero."""
EPS = 1e-7
DTYPE = torch.bfloat16
"""The dtype of the iteration for every input. More precision need not be sent."""


def orthogonalized(
    matrix: torch.Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = NEWTON_SCHULZ_STEPS,
    eps: float = EPS,
) -> torch.Tensor:
    """Return U S' V^T for a matrix with the singular value decomposition U S V^T.

    The values of S' are between 0.5 and 1.5. The result has shape (rows, columns) and dtype bfloat16. First, the matrix
    is divided by its norm, or by `eps` if the norm is smaller.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(DTYPE)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = _symmetric(x, x.T)
        x = torch.addmm(x, _symmetric(gram, gram, added=gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _symmetric(
    x: torch.Tensor, y: torch.Tensor, *, added: torch.Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> torch.Tensor:
    """Return `alpha` * x @ y + `beta` * `added`, computing one half, because the caller knows that it is symmetric."""
    rows = len(x)
    result = x.new_empty(rows, rows)
    added = result if added is None else added

    def make(below: slice, beside: slice) -> None:
        block = result[below, beside]
        torch.addmm(added[below, beside], x[below], y[:, beside], beta=beta, alpha=alpha, out=block)

    if rows < HALVED_ROWS:
        make(slice(rows), slice(rows))
        return result
    half = rows // 2
    make(slice(half), slice(half))
    make(slice(half, rows), slice(rows))
    result[:half, half:] = result[half:, :half].T
    return result

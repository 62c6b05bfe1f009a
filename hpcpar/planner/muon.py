"""FLOPs and bytes of Muon's step, which makes each matrix's update orthogonal.

FLOPs     steps · (4m²n + 2m³) for a matrix of m by n, m ≤ n, on the one rank that owns it
bytes     stages 1 and 2: none beyond ZeRO's, whose gradients go to the owners and weights come from them
          stage 3, and matrices split over tp: 4(e - k) for e elements of which the owner has k
memory    of stage 3 and tp: at most three rounds of matrices in bfloat16 at once, one to a rank
"""

from __future__ import annotations

NEWTON_SCHULZ_STEPS = 5
"""Iterations that torch's Muon does by default."""

UPDATE_ITEMSIZE = 2
"""Bytes of an element of a matrix's update, which travels in bfloat16."""


def orthogonalization_flops(rows: int, columns: int, steps: int = NEWTON_SCHULZ_STEPS) -> int:
    """Return the FLOPs of Newton-Schulz iterations on a matrix.

    With m the shorter and n the longer side, X [m, n], an iteration has three matrix products, of 2abc FLOPs
    for [a, b] by [b, c]:

        A = X Xᵀ            [m, n] by [n, m]   2m²n
        B = bA + cA A       [m, m] by [m, m]   2m³
        X = aX + B X        [m, m] by [m, n]   2m²n

    returns  steps · (4m²n + 2m³)
    source   Jordan 2024, Muon, kellerjordan.github.io/posts/muon (FLOPs analysis)
    """
    m, n = sorted((rows, columns))
    return steps * (4 * m * m * n + 2 * m**3)


def matrix_exchange_nbytes(elements: int, own: int) -> int:
    """Count the bytes by which the update of a matrix goes to its owner, orthogonalized, and comes back.

    In ZeRO-3 over dp, and where the matrix is split over tp over that, by all-to-alls once a step.

    elements   of the matrix, or of its part where that is gathered over dp first
    own        those of them that the owner has anyhow
    """
    return 2 * (elements - own) * UPDATE_ITEMSIZE

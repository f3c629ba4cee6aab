"""What M_t looks like, measured on random inputs: the report of a transition that has no ``lower`` yet.

Identity, scalar, diagonal, diagonal plus rank r, block-diagonal or dense; symmetric or not; range of its eigenvalues.
From that follows whether the normal form, decay times (I - a b^T) factors, could hold it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Problem

TOLERANCE = 1e-9  # of float64 entries of order one, after a singular value decomposition
HIGHEST_RANK = 4


@dataclass(frozen=True)
class Structure:
    """Kind of M_t in words, its symmetry and spectrum, and whether a normal form could hold it."""

    kind: str
    is_symmetric: bool
    eigenvalues: str
    normal_form: str

    def __str__(self) -> str:
        symmetry = "symmetric" if self.is_symmetric else "not symmetric"
        return f"M_t measured: {self.kind}, {symmetry}, eigenvalues {self.eigenvalues}. {self.normal_form}"


def measure(problem: Problem) -> Structure:
    """The structure of the matrices of a problem."""
    key_dim = problem.q.shape[-1]
    matrix = problem.transition.materialize(key_dim).double().reshape(-1, key_dim, key_dim)
    eigenvalues = torch.linalg.eigvals(matrix)
    if eigenvalues.imag.abs().max() < TOLERANCE**0.5:
        spectrum = f"real in [{eigenvalues.real.min():.3g}, {eigenvalues.real.max():.3g}]"
    else:
        spectrum = f"complex with |lambda| <= {eigenvalues.abs().max():.3g}"
    kind, hint = _kind(matrix)
    return Structure(kind, _is_zero(matrix - matrix.mT), spectrum, hint)


def _kind(matrix: Tensor) -> tuple[str, str]:
    key_dim = matrix.shape[-1]
    diagonal = torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    if _is_zero(matrix - torch.eye(key_dim, dtype=matrix.dtype)):
        return "identity", "The normal form holds it: NormalForm()."
    if _is_zero(matrix - diagonal):
        first = matrix[:, :1, :1]
        if _is_zero(diagonal - first * torch.eye(key_dim, dtype=matrix.dtype)):
            return "scalar", _decay_hint(diagonal, "[B, T, HV]")
        return "diagonal", _decay_hint(diagonal, "[B, T, HV, K]")
    blocks = _num_blocks(matrix)
    size = key_dim // blocks
    block = matrix[:, :size, :size]
    rank = _rank_beyond_diagonal(block)
    where = f"block-diagonal with {blocks} blocks, each " if blocks > 1 else ""
    if rank is None:
        return f"{where}dense", "No normal form holds a dense M_t: it runs in form='recurrent'."
    erasures = "one erasure" if rank == 1 else f"{rank} erasures"
    inner = f"NormalForm(log_decay, erase=(a, b)) with {erasures} a token"
    hint = f"The normal form could hold it: {inner}{f', blocks={blocks}' if blocks > 1 else ''}."
    return f"{where}diagonal plus rank {rank}", hint


def _decay_hint(diagonal: Tensor, shape: str) -> str:
    values = diagonal.diagonal(dim1=-2, dim2=-1)
    if values.min() < 0 or values.max() > 1 + TOLERANCE:
        return "The normal form holds decays in (0, 1] only, as log_decay <= 0."
    return f"The normal form could hold it: NormalForm(log_decay) with log_decay {shape}."


def _num_blocks(matrix: Tensor) -> int:
    """The largest number of equal diagonal blocks outside which everything is zero."""
    key_dim = matrix.shape[-1]
    for blocks in range(key_dim // 2, 1, -1):
        if key_dim % blocks == 0:
            block = torch.arange(key_dim) // (key_dim // blocks)
            if _is_zero(matrix * (block[:, None] != block)):
                return blocks
    return 1


def _rank_beyond_diagonal(matrix: Tensor) -> int | None:
    """The least r <= 4 with M = Diag + rank r, read off an off-diagonal corner that no diagonal touches."""
    half = matrix.shape[-1] // 2
    if half < 2:
        return None
    corners = (matrix[:, half:, :half], matrix[:, :half, half:])
    ranks = [int(torch.linalg.matrix_rank(corner, tol=TOLERANCE).max()) for corner in corners]
    rank = max(ranks)
    return rank if 0 < rank < min(half, HIGHEST_RANK + 1) else None


def _is_zero(x: Tensor) -> bool:
    return bool(x.abs().max() < TOLERANCE)

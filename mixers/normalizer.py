"""The normaliser of linear attention: a read-out becomes the average of its values instead of their weighted sum.

    o_t = sum_s a_ts v_s / sum_s a_ts,        a_ts >= 0 the weight that the recurrence gives to token s at token t

The sum of weights is what the recurrence makes of a value that is 1 for every token. So values get one more channel of
ones, the state one more row, and gradients, chunks and decoding need nothing of their own.
Weights must not be negative, hence a feature map without signs and a transition that only lets decay.

Shapes: B batch, T time, HV value heads, V value_dim.
Source: arXiv:2006.16236 section 3.2.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statemix.transitions import BlockDiagonalModule, FactorConfig

DECAYS = ("identity", "fixed_decay", "scalar_gate", "diagonal_gate")


def only_decays(factors: Sequence[FactorConfig]) -> bool:
    """Whether M_t leaves every weight non-negative: decays, and blocks of decays."""
    return all(
        only_decays(factor.inner) if isinstance(factor, BlockDiagonalModule.Config) else factor.type in DECAYS
        for factor in factors
    )


class Normalizer(nn.Module):
    """Values get a channel of ones before the scan, and are divided by what became of it after.

    Attributes:
        num_rows: rows that the state has for it.
    """

    num_rows = 1

    def before(self, value: Tensor) -> Tensor:
        """[B, T, HV, V] to [B, T, HV, V + 1]."""
        return F.pad(value, (0, 1), value=1.0)

    def after(self, mixed: Tensor) -> Tensor:
        """[B, T, HV, V + 1] to [B, T, HV, V]: what the ones became divides the rest, which is 0 where that is 0."""
        weighted, total = mixed[..., :-1], mixed[..., -1:]
        return weighted / torch.where(total == 0, 1, total)


class NoNormalizer(nn.Module):
    """Read-outs stay weighted sums."""

    num_rows = 0

    def before(self, value: Tensor) -> Tensor:
        return value

    def after(self, mixed: Tensor) -> Tensor:
        return mixed

"""The decays inside a chunk against the sums they stand for."""

import pytest
import torch
from torch import Tensor

from statemix.kernels.decay import chunk_products

C, K = 8, 3


def dense(left: Tensor, right: Tensor, log_decay: Tensor, first_reads_before: bool) -> Tensor:
    """sum_c left_ic right_jc exp(sum of log_decay over tau(j) < s <= tau(i)), pair by pair."""
    num_left, num_right = left.shape[1], right.shape[1]
    pairs = torch.zeros(C * num_left, C * num_right, dtype=left.dtype)
    for t in range(C):
        for p in range(num_left):
            last = t if first_reads_before and p == 0 else t + 1
            for s in range(t + 1):
                decay = log_decay[s + 1 : last].sum(0).exp() if last > s + 1 else torch.ones(K, dtype=left.dtype)
                for n in range(num_right):
                    pairs[t * num_left + p, s * num_right + n] = (left[t, p] * right[s, n] * decay).sum()
    return pairs


@pytest.mark.parametrize("channels", [1, K])
@pytest.mark.parametrize(("num_left", "num_right", "first_reads_before"), [(1, 1, False), (3, 2, False), (2, 1, True)])
def test_products_carry_the_decay_between_their_tokens(
    channels: int, num_left: int, num_right: int, first_reads_before: bool
) -> None:
    left, right = torch.randn(C, num_left, K).double(), torch.randn(C, num_right, K).double()
    log_decay = -torch.rand(C, channels).double()
    products = chunk_products(left, right, log_decay, first_reads_before=first_reads_before)
    expected = dense(left, right, log_decay.expand(C, K), first_reads_before)
    read = torch.ones(C, num_left, C, num_right, dtype=torch.bool)
    if first_reads_before:
        read[torch.arange(C), 0, torch.arange(C)] = False  # before its own token's rows: never read
    read = read.flatten(2).flatten(0, 1)
    torch.testing.assert_close(products.pairs[read], expected[read])

    upto = log_decay.expand(C, K).cumsum(0)
    before = upto - log_decay
    rows = [before if first_reads_before and p == 0 else upto for p in range(num_left)]
    torch.testing.assert_close(products.left_from_start, left * torch.stack(rows, dim=1).exp())
    torch.testing.assert_close(products.right_to_end, right * (upto[-1] - upto).exp().unsqueeze(1))
    assert products.total is not None
    torch.testing.assert_close(products.total, log_decay.sum(0).exp())


@pytest.mark.parametrize("channels", [1, K])
def test_nothing_overflows_at_the_steepest_decays(channels: int) -> None:
    left = torch.randn(C, 1, K, requires_grad=True)
    log_decay = torch.full((C, channels), -1000.0, requires_grad=True)
    products = chunk_products(left, left, log_decay, first_reads_before=False)
    total = products.pairs.sum() + products.left_from_start.sum() + products.right_to_end.sum()
    grads = torch.autograd.grad(total, (left, log_decay))
    assert all(bool(x.isfinite().all()) for x in (total, *grads))

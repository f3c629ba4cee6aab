"""The matrix of a recurrence multiplies values into outputs, is causal, and forgets as the transition says."""

import pytest
import torch

from statemix import attention_matrix, scan
from statemix.harness import CATALOGUE, Sizes
from statemix.transitions import ScalarGate


@pytest.mark.parametrize("subject", CATALOGUE)
def test_the_matrix_times_the_values_is_the_output(subject: str) -> None:
    problem = CATALOGUE[subject].make(Sizes(seq_len=19), torch.Generator().manual_seed(0))
    matrix = attention_matrix(problem.q, problem.k, problem.transition, write=problem.write)
    future = torch.ones(19, 19).triu(1).bool()
    matrix = matrix.repeat_interleave(4 // matrix.shape[1], dim=1)
    assert matrix.shape[:4] == (2, 4, 19, 19)
    assert bool((matrix[:, :, future] == 0).all())
    values = problem.v.transpose(1, 2) if problem.v.ndim == 4 else problem.v.movedim(3, 1)
    equation = "bhts,bhsv->bthv" if problem.v.ndim == 4 else "bhtsn,bhsnv->bthv"
    torch.testing.assert_close(torch.einsum(equation, matrix, values), scan(**problem.arguments()).output)


def test_a_scalar_gate_forgets_by_the_sum_of_its_log_decays() -> None:
    log_decay = -torch.rand(1, 12, 1, dtype=torch.float64)
    ones = torch.ones(1, 12, 1, 1, dtype=torch.float64)
    matrix = attention_matrix(ones, ones, ScalarGate(log_decay))[0, 0]
    total = log_decay[0, :, 0].cumsum(0)
    torch.testing.assert_close(matrix, (total[:, None] - total).exp().tril())

"""The check that ``lower`` and ``apply`` mean one M_t: the normal form as a dense matrix against ``materialize``."""

import torch
from torch import Tensor

from statemix.harness.allowance import Reference
from statemix.harness.check import CheckFailure, check
from statemix.harness.source_lines import lines_of
from statemix.kernels import NormalForm, expand_heads

from .algebra import matrix_of
from .recurrence import Recurrence


@check("lower() is another way to write apply(): both stand for one M_t", needs=["has_chunk_form", "float64"])
def lower_is_apply(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    exact = matrix_of(problem)
    low = matrix_of(problem.to(torch.float32))
    _expect_equal(normal_form_matrix(problem.transition.lower(), exact), exact, low, type(problem.transition))


def _expect_equal(got: Tensor, exact: Tensor, low: Tensor, cls: type) -> None:
    excess = Reference(exact, low).excess(got)
    if excess is None:
        return
    batch, token, head, row = excess.index
    column = int((got - exact)[excess.index].abs().argmax())
    by_apply, lowered = (x[excess.index][column].item() for x in (exact, got))
    raise CheckFailure(
        f"lower() disagrees with apply(): M_t[{row}, {column}] at [batch {batch}, token {token}, head {head}]: "
        f"apply() gives {by_apply:.6g}, lower() gives {lowered:.6g}; "
        "apply() is the definition: S <- S Diag(e^log_decay), then S <- S - (S a) b^T, must do the same"
        f"{lines_of(cls, 'lower')}"
    )


def normal_form_matrix(form: NormalForm, like: Tensor) -> Tensor:
    """Dense M_t of a normal form, with the shape and dtype of ``like``, [B, T, HV, K, K].

    D (I - a_1 b_1^T) ... (I - a_m b_m^T), or (D - a_1 b_1^T) ... with ``reads_before_decay``; inside blocks only.
    """
    form, num_heads, key_dim = form.multiplied(), like.shape[-3], like.shape[-1]
    eye = torch.eye(key_dim, dtype=like.dtype, device=like.device)
    block = torch.arange(key_dim, device=like.device) // (key_dim // form.blocks)
    is_inside = block[:, None] == block
    matrix = eye.expand_as(like) if form.log_decay is None else eye * _by_channel(form, key_dim).exp().unsqueeze(-2)
    if form.erase is not None:
        read, direction = (x if x.ndim == 5 else x.unsqueeze(2) for x in form.erase)
        direction = expand_heads(direction, num_heads, dim=3)
        for j in range(read.shape[2]):
            erased = torch.where(is_inside, read[:, :, j, :, :, None] * direction[:, :, j, :, None, :], 0.0)
            matrix = matrix - (erased if form.reads_before_decay and j == 0 else matrix @ erased)
    return matrix.expand_as(like)


def _by_channel(form: NormalForm, key_dim: int) -> Tensor:
    """The log decay with a last axis K."""
    assert form.log_decay is not None
    log_decay = form.log_decay if form.log_decay.ndim in (2, 4) else form.log_decay.unsqueeze(-1)
    return log_decay.repeat_interleave(key_dim // log_decay.shape[-1], dim=-1)

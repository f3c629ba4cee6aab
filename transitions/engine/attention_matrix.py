"""The attention-like matrix of a recurrence: o_t = sum_s A_ts v_s.

    A_ts = scale * w_s k_s^T M_{s+1} ... M_t q_t   for s <= t, else 0

so a recurrence is a masked attention without softmax, whose weights forget as the transition does. O(T^2) memory: for
teaching and tests.

Shapes: B batch, T time, n writes a token, HV value heads.
Source: arXiv:2406.06484 section 3.1 and its fully parallel form.
"""

import torch
from torch import Tensor

from statemix.transitions.base import Transition

from .scan import scan


def attention_matrix(
    q: Tensor, k: Tensor, transition: Transition, *, write: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """A, [B, HV, T, T]; with n writes a token [B, HV, T, T, n], since each write has its own value.

    Where neither transition nor write has HV heads, the heads are the key heads.

    Args:
        q, k, transition, write, scale: as in ``scan``; a transition without a normal form runs token by token.

    >>> q = k = torch.ones(1, 3, 1, 1)
    >>> attention_matrix(q, k, FixedDecay(torch.tensor([0.5]).log()))[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 1.0000, 0.0000],
            [0.2500, 0.5000, 1.0000]])
    """
    (batch, seq_len, num_heads), count = q.shape[:3], tuple(k.shape[2:-2])
    if transition.num_value_heads is not None:
        num_heads = transition.num_value_heads
    elif write is not None:
        num_heads = write.shape[2 + len(count)]
    # The output is linear in v: a value of its own for every write reads off the whole matrix.
    values = torch.eye(seq_len * max([1, *count]), dtype=q.dtype, device=q.device)
    values = values.view(1, seq_len, *count, 1, -1).expand(batch, -1, *[-1 for _ in count], num_heads, -1)
    output = scan(q, k, values, transition, write=write, scale=scale).output
    matrix = output.movedim(1, 2)
    return matrix.unflatten(-1, (seq_len, *count)) if count else matrix

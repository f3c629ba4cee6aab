"""The tensors of a scan of the delta family, as every implementation of it takes them.

A head may have several blocks: states of K channels of their own for one value, whose read-outs are summed. Kernels
call a block a head, and the heads of values HO: HV = HO blocks.

Shapes: B batch, T time, n micro-steps a token, R = T n rows, HQ HA HB HV heads of keys and states, HO heads of values
and outputs, K key_dim, V value_dim, N sequences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch_config import DeltaConfig
from .spans import ceil_div


class DeltaOperands(NamedTuple):
    """Operands of n micro-steps a token, the decay before the first:

        S <- S Diag(e^{log_decay_t});   u_r = w_r v_r - r_r S a_r,   S <- S + u_r b_r^T   for each row r of the token;
        o_t = scale * S q_t, summed over the blocks of a head

    Attributes:
        q: [B, T, HQ, K].
        a: [B, R, HA, K], or None for b itself.
        b: [B, R, HB, K].
        v: [B, R, HO, V], of one dtype with q, a and b; HV is a multiple of HO, HQ, HA and HB.
        rate: r, [B, R, HV], or None for 1.
        weight: w, [B, R, HV], or None for 1.
        log_decay: None, [B, T, HV] or [B, T, HV, K].
        initial_state: [N, HV, V, K] in ``state_dtype``, or None for zeros.
        cu_seqlens: int32 [N + 1] in tokens, with B = 1, or None for a batch.
        reads_before_decay: the first row of a token reads the state before its decay.
        blocks: HV / HO.
    """

    q: Tensor
    a: Tensor | None
    b: Tensor
    v: Tensor
    rate: Tensor | None
    weight: Tensor | None
    log_decay: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    reads_before_decay: bool
    blocks: int = 1

    @property
    def num_heads(self) -> int:
        """HV, the heads that have a state."""
        return self.v.shape[2] * self.blocks

    @property
    def state_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def num_steps(self) -> int:
        """n."""
        return self.b.shape[1] // self.q.shape[1] if self.q.shape[1] else 1

    def empty_output(self) -> Tensor:
        """[B, T, HO, V] in the dtype of q, unwritten."""
        return self.q.new_empty(*self.q.shape[:2], *self.v.shape[2:])

    def empty_state(self) -> Tensor:
        """[N, HV, V, K], unwritten."""
        num_states = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        shape = (num_states, self.num_heads, self.v.shape[-1], self.q.shape[-1])
        return self.q.new_empty(shape, dtype=self.state_dtype)

    def whole_state(self, state: Tensor) -> Tensor:
        """[N, HV, V, K] as [N, HO, V, blocks K]."""
        return state if self.blocks == 1 else state.unflatten(1, (-1, self.blocks)).movedim(2, -2).flatten(-2, -1)

    def cast(self, dtype: torch.dtype) -> "DeltaOperands":
        """Every tensor but the offsets in ``dtype``."""
        return self._map(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def contiguous(self) -> "DeltaOperands":
        return self._map(Tensor.contiguous)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "DeltaOperands":
        """The same with every tensor changed."""
        values: list[Any] = [change(x) if isinstance(x, Tensor) else x for x in self]
        return DeltaOperands(*values)


def segments_of(operands: DeltaOperands, config: DeltaConfig) -> tuple[int, int]:
    """Segments of a walk over these rows and the rows of one; 0 and 0 where sequences stay whole.

    Sizes may be symbolic.
    """
    (batch, rows, _, value_dim), heads = operands.v.shape, operands.num_heads
    num_documents = None if operands.cu_seqlens is None else operands.cu_seqlens.shape[0] - 1
    programs = heads * ceil_div(value_dim, config.scan.block) * (batch if num_documents is None else num_documents)
    return config.partition_rule.segments(batch, rows, programs, num_documents)


class DeltaGradients(NamedTuple):
    """Gradients of the operands, each in the shape and dtype of its own; None where that is None.

    Attributes:
        a: None where ``DeltaOperands.a`` is None too: its share is then in ``b``.
        log_decay: None also where it is not wanted.
        initial_state: [N, HV, V, K] in ``state_dtype``, whether or not there is one.
    """

    q: Tensor
    a: Tensor | None
    b: Tensor
    v: Tensor
    rate: Tensor | None
    weight: Tensor | None
    log_decay: Tensor | None
    initial_state: Tensor

"""The tensors of a scan, as every implementation of it takes them, and how a normal form becomes them.

Without erase pairs little of the normal form is left: a write w is part of v, or of k where it differs between the
blocks of K; a decay per block is one per channel. A head of the delta family may have several blocks: states of K
channels of their own for one value, whose read-outs are summed. Kernels call a block a head, and the heads of values
HO: HV = HO blocks, and value head h has the heads h blocks to (h + 1) blocks - 1.

Shapes: B batch, T time, n micro-steps a token, R = T n, HQ HA HB HV heads of keys and states, HO heads of values and
outputs, K key_dim, V value_dim, N sequences.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .normal_form import NormalForm, expand_heads, num_micro_steps, repeat_to, with_last_axis, with_steps


class Decay(IntEnum):
    """What a decay depends on; kernels are compiled for its number."""

    NONE = 0
    FIXED = 1
    SCALAR = 2
    DIAGONAL = 3


_DECAY_BY_NDIM = {1: Decay.FIXED, 3: Decay.SCALAR, 4: Decay.DIAGONAL}


class ScanOperands(NamedTuple):
    """Operands of n micro-steps a token, the decay before the first:

        S <- S Diag(e^{log_decay_t});   u_r = w_r v_r - beta_r S a_r,   S <- S + u_r b_r^T   for each micro-step r of t;
        o_t = scale * S q_t, summed over the blocks of a head

    Without erase pairs u_r = v_r, and a, erase_beta and write are None.

    Attributes:
        q: [B, T, HQ, K].
        a: [B, R, HA, K], or None for b itself.
        b: [B, R, HB, K], the write keys.
        v: [B, R, HO, V], of one dtype with q, a and b; HV is a multiple of HO, HQ, HA and HB.
        erase_beta: [B, R, HV], or None for 1.
        write: w, [B, R, HV], or None for 1.
        log_decay: None, [HV] (without erase pairs, n = 1), [B, T, HV] or [B, T, HV, K].
        initial_state: [N, HV, V, K] in ``state_dtype``, or None for zeros.
        cu_seqlens: int32 [N + 1] in tokens, with B = 1, or None for a batch.
        erases: there are erase pairs: the delta family.
        reads_before_decay: the first micro-step of a token reads the state before its decay.
        blocks: HV / HO.
    """

    q: Tensor
    a: Tensor | None
    b: Tensor
    v: Tensor
    erase_beta: Tensor | None
    write: Tensor | None
    log_decay: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    erases: bool
    reads_before_decay: bool = False
    blocks: int = 1

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Every tensor that can have a gradient, in the order of ``Gradients``."""
        tensors: tuple[Any, ...] = self[:8]
        return tensors

    @property
    def decay(self) -> Decay:
        return Decay.NONE if self.log_decay is None else _DECAY_BY_NDIM[self.log_decay.ndim]

    @property
    def num_heads(self) -> int:
        """HV, the heads that have a state."""
        return self.v.shape[2] * self.blocks

    @property
    def num_steps(self) -> int:
        """n."""
        seq_len = self.q.shape[1]
        return self.b.shape[1] // seq_len if seq_len else 1

    @property
    def num_documents(self) -> int | None:
        return None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def empty_output(self) -> Tensor:
        """[B, T, HO, V] in the dtype of q, unwritten."""
        return self.q.new_empty(*self.q.shape[:2], *self.v.shape[2:])

    def empty_state(self) -> Tensor:
        """[N, HV, V, K], unwritten."""
        num_states = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        shape = (num_states, self.num_heads, self.v.shape[-1], self.q.shape[-1])
        return self.q.new_empty(shape, dtype=self.state_dtype)

    def start(self) -> Tensor:
        """The initial state, zeros where there is none."""
        return self.empty_state().zero_() if self.initial_state is None else self.initial_state

    def whole_state(self, state: Tensor) -> Tensor:
        """[N, HV, V, K] as [N, HO, V, blocks K]."""
        return state if self.blocks == 1 else state.unflatten(1, (-1, self.blocks)).movedim(2, -2).flatten(-2, -1)

    def cast(self, dtype: torch.dtype) -> "ScanOperands":
        """Every tensor but the offsets in ``dtype``."""
        return self.map(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def contiguous(self) -> "ScanOperands":
        for x in self[:9]:
            if isinstance(x, Tensor) and not x.is_contiguous():
                return self.map(Tensor.contiguous)
        return self  # most often; each call of a scan comes here

    def map(self, change: Callable[[Tensor], Tensor]) -> "ScanOperands":
        """The same with every tensor changed."""
        values: list[Any] = [change(x) if isinstance(x, Tensor) else x for x in self]
        return ScanOperands(*values)


class Gradients(NamedTuple):
    """Gradients of the operands, each in the shape and dtype of its own; None where that is None.

    Attributes:
        a: None where ``ScanOperands.a`` is None too: its share is then in ``b``.
        log_decay: None also where it is not asked for.
        initial_state: [N, HV, V, K] in ``state_dtype``, whether or not there is one.
    """

    q: Tensor
    a: Tensor | None
    b: Tensor
    v: Tensor
    erase_beta: Tensor | None
    write: Tensor | None
    log_decay: Tensor | None
    initial_state: Tensor | None


class Saved(NamedTuple):
    """What a backward pass needs besides the operands; None for what the family or the decay does not have.

    Attributes:
        states: at the start of every chunk, [chunks, HV, K, V].
        u: pseudo-values, [B, R, HV, V].
        maps: P of every segment, [segments, HV, K, K].
        scores: A_qk L^-1, or A_qk without erase pairs, [chunks, HV, C, C].
        query, erase, key: q, a and b with their decay, or with the UT transform of the chunk, [B, R, HV, K].
        gate: the summed decay, as the inter-chunk scan takes it.
        segment_length: micro-steps of a segment, 0 where sequences stay whole.
    """

    states: Tensor
    u: Tensor | None = None
    maps: Tensor | None = None
    scores: Tensor | None = None
    query: Tensor | None = None
    erase: Tensor | None = None
    key: Tensor | None = None
    gate: Tensor | None = None
    segment_length: int = 0

    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        return [x for x in self[:-1] if x is not None]

    @classmethod
    def of(cls, tensors: list[Tensor], operands: ScanOperands, segment_length: int) -> "Saved":
        """From ``tensors()`` of what was saved for ``operands``."""
        named: dict[str, Any] = dict(zip(_saved_names(operands.erases, operands.decay), tensors, strict=True))
        return cls(**named, segment_length=segment_length)


@cache
def _saved_names(erases: bool, decay: Decay) -> tuple[str, ...]:
    """Fields of ``Saved`` that are there."""
    is_diagonal = decay is Decay.DIAGONAL
    has = {
        "states": True,
        "u": erases,
        "maps": erases,
        "scores": erases or is_diagonal,
        "query": is_diagonal,
        "erase": erases and is_diagonal,
        "key": erases or is_diagonal,
        "gate": decay in (Decay.SCALAR, Decay.DIAGONAL),
    }
    return tuple(name for name, is_there in has.items() if is_there)


class _Steps(NamedTuple):
    """Micro-steps before blocks become heads.

    Attributes:
        a: [B, R, H or HO, K], or None for b itself.
        b: [B, R, H or HO, K].
        v: [B, R, HO, V].
        erase_beta, write: [B, R, HO], with or without a last axis of size 1 or blocks, or None for 1.
    """

    a: Tensor | None
    b: Tensor
    v: Tensor
    erase_beta: Tensor | None
    write: Tensor | None


def scan_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: NormalForm,
    *,
    write: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> ScanOperands:
    """Join the delta updates of ``form`` with the writes w v k^T of a token.

    Nothing is copied for erase pairs along the write key (``form.erase[1] is k``; see ``NormalForm.along``) with an
    ``erase_beta``, nor for writes of weight 1 without erase pairs, as long as there are no blocks.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K] or [B, T, n, H, K].
        v: [B, T, HO, V] or [B, T, n, HO, V].
        write: None, [B, T, HO] or [B, T, n, HO], with a last axis of blocks where they differ.
        initial_state: [N, HO, V, K], or None.
        cu_seqlens: [N + 1], or None.

    Raises:
        NotImplementedError: as ``num_micro_steps`` does.
    """
    num_steps, heads = num_micro_steps(form, k), v.shape[-2]
    lead, key_dim = (*q.shape[:2], heads), q.shape[-1]
    blocks = 1 if form.erase is None else form.blocks
    log_decay = _decay_of_heads(form.log_decay, lead, key_dim, blocks)
    if log_decay is not None and log_decay.ndim == 1 and (form.erase is not None or num_steps > 1):
        log_decay = log_decay.expand(*lead[:2], -1)
    if form.erase is None:
        k, v = _without_pairs(k, v, write, dtype=q.dtype)
        return ScanOperands(q, None, k, v, None, None, log_decay, initial_state, cu_seqlens, False)
    join = _along_the_write_key if form.erase[1] is k else _in_another_direction
    a, b, v, beta, write = join(form.erase, k, v, form.erase_beta, write, dtype=q.dtype)
    if blocks > 1:
        q, b = (_keys_of_blocks(x, heads, blocks) for x in (q, b))
        a = None if a is None else _keys_of_blocks(a, heads, blocks)
        if initial_state is not None:
            initial_state = fold_key(initial_state, blocks).movedim(-2, 2).flatten(1, 2)
    beta, write = (None if x is None else _factors_of_blocks(x, blocks) for x in (beta, write))
    tensors = (q, a, b, v, beta, write, log_decay, initial_state, cu_seqlens)
    return ScanOperands(*tensors, True, form.reads_before_decay, blocks)


def fold_key(x: Tensor, blocks: int) -> Tensor:
    """[..., K] -> [..., blocks, K / blocks]."""
    return x.unflatten(-1, (blocks, -1))


def _without_pairs(k: Tensor, v: Tensor, write: Tensor | None, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and w v, or w k and v: the product is rounded once, to ``dtype``."""
    if write is not None and write.ndim == v.ndim and write.shape[-1] > 1:
        k = (repeat_to(write, k.shape[-1]) * expand_heads(k, v.shape[-2], dim=k.ndim - 2)).to(dtype)
    elif write is not None:
        v = ((write if write.ndim == v.ndim else write.unsqueeze(-1)) * v).to(dtype)
    return (k, v) if k.ndim == 4 else (k.flatten(1, 2), v.flatten(1, 2))


def _along_the_write_key(
    erase: tuple[Tensor, Tensor], k: Tensor, v: Tensor, beta: Tensor | None, write: Tensor | None, *, dtype: torch.dtype
) -> _Steps:
    """Every tensor as it is, with an axis n joined to T: autograd walks back through each view that is made."""
    steps = _Steps(None if erase[0] is erase[1] else erase[0].to(dtype), k, v, beta, write)
    return steps if k.ndim == 4 else _Steps._make(None if x is None else x.flatten(1, 2) for x in steps)


def _in_another_direction(
    erase: tuple[Tensor, Tensor], k: Tensor, v: Tensor, beta: Tensor | None, write: Tensor | None, *, dtype: torch.dtype
) -> _Steps:
    """Erase pairs of a value 0 beside writes of an erase beta 0."""
    is_tied, beta, write = erase[0] is erase[1], _with_axes(beta, erase[0]), _with_axes(write, k)
    a, (key, direction) = with_steps(erase[0]).to(dtype), _equal_heads(with_steps(k), with_steps(erase[1]).to(dtype))
    value, num_pairs, num_writes = with_steps(v), direction.shape[2], key.shape[2]
    if beta is None and is_tied:
        beta = a.new_ones(*direction.shape[:3], v.shape[-2], 1)
    steps = _Steps(
        None if is_tied else _erase_then_write(a, _zeros(a, num_writes)),
        _erase_then_write(direction, key),
        _erase_then_write(_zeros(value, num_pairs), value),
        None if beta is None else _erase_then_write(beta, _zeros(beta, num_writes)),
        None if write is None else _erase_then_write(_zeros(write, num_pairs), write),
    )
    return _Steps._make(None if x is None else x.flatten(1, 2) for x in steps)


def _erase_then_write(pairs: Tensor, writes: Tensor) -> Tensor:
    """[B, T, m + n, ...] from m erase pairs and n = m writes, one after the other, or from m and then one write."""
    if pairs.shape[2] == writes.shape[2]:
        return torch.stack((pairs, writes), dim=3).flatten(2, 3)
    return torch.cat((pairs, writes), dim=2)


def _zeros(x: Tensor, count: int) -> Tensor:
    """Zeros like x [B, T, n, ...], with ``count`` in place of n."""
    return x.new_zeros(x.shape[:2] + (count,) + x.shape[3:])


def _equal_heads(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y [B, T, n, H or HV, K] with the more heads of the two."""
    heads = max(x.shape[3], y.shape[3])
    return expand_heads(x, heads, dim=3), expand_heads(y, heads, dim=3)


def _with_axes(x: Tensor | None, keys: Tensor) -> Tensor | None:
    """An erase beta or a write, with the axes that belong to ``keys``, as [B, T, n, HO, 1 or blocks]."""
    return None if x is None else with_steps(x if x.ndim == keys.ndim else x.unsqueeze(-1))


def _keys_of_blocks(x: Tensor, num_heads: int, blocks: int) -> Tensor:
    """[B, R, H or HO, K] as [B, R, HV, K / blocks]."""
    return fold_key(expand_heads(x, num_heads, dim=2), blocks).flatten(2, 3)


def _factors_of_blocks(x: Tensor, blocks: int) -> Tensor:
    """[B, R, HO], with or without a last axis of size 1 or blocks, as [B, R, HV]."""
    if blocks == 1:
        return x if x.ndim == 3 else x.squeeze(-1)
    x = x.unsqueeze(-1) if x.ndim == 3 else x
    return x.expand(*x.shape[:-1], blocks).flatten(2, 3)


def _decay_of_heads(log_decay: Tensor | None, lead: tuple[int, int, int], key_dim: int, blocks: int) -> Tensor | None:
    """Any log_decay of the normal form as None, [HV], [B, T, HV] or [B, T, HV, K / blocks]; ``lead`` is (B, T, HO)."""
    if log_decay is None:
        return None
    if blocks > 1:
        x = with_last_axis(log_decay)
        x = fold_key(x, blocks) if x.shape[-1] == key_dim else x.expand(*x.shape[:-1], blocks).unsqueeze(-1)
        x, lead, key_dim = x.flatten(-3, -2), (*lead[:2], lead[2] * blocks), key_dim // blocks
        log_decay = x.squeeze(-1) if x.shape[-1] == 1 else x
    if log_decay.ndim == 1 or log_decay.shape in (lead, (*lead, key_dim)):
        return log_decay  # no view of itself, which autograd would record
    if log_decay.ndim == 3:
        return log_decay.expand(lead)
    if log_decay.shape[-1] == 1 and key_dim > 1:
        shared = log_decay.squeeze(-1)
        return shared if shared.ndim == 1 or shared.shape == lead else shared.expand(lead)
    return repeat_to(log_decay, key_dim).expand(*lead, key_dim)

"""The normal form: what a kernel needs to know of a transition.

Every transition that has a chunk form lowers to n micro-steps a token, decay first, then read-erase-write:

    S <- S Diag(d_t);   for j = 1..n:   u = v_tj - S a_tj,   S <- S + u b_tj^T;      o_t = scale * S q_t

a = 0 gives linear attention and gates; a = beta k, b = k gives the delta rule. Either way
S_t = S_{t-1} Diag(d_t) + U_t^T B_t: the delta family is the additive family run on corrected values u.

Shapes: B batch, T time, N micro-steps a token, H key heads, HV value heads, K key_dim, V value_dim, blocks.
Source: arXiv:2406.06484 section 3 (delta rule), arXiv:2502.10297 section 3 (n micro-steps).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormalForm:
    """M_t as a decay followed by erasures S <- S (I - a b^T); the write is merged in by ``merge_write``.

    Attributes:
        log_decay: log d_t: None, [HV], [HV, blocks], [B, T, HV], [B, T, HV, blocks] or [B, T, HV, K].
        erase: (a, b), a [B, T, HV, K] and b [B, T, H or HV, K], each with an axis m after T for m erasures a token.
        reads_before_decay: the first erasure of a token reads the state before its decay.
        blocks: M_t is block-diagonal with this many blocks of K / blocks.
        rate: None, or r where ``erase`` is (c, b) with a = r c and c of H or HV heads. [B, T, HV], with the axis m if c
            has it, and with a last axis of size 1 or blocks if it then has as many axes as c. One tensor in both
            places of ``erase`` says that c is b: kernels then store neither r c nor b a second time.
    """

    log_decay: Tensor | None = None
    erase: tuple[Tensor, Tensor] | None = None
    reads_before_decay: bool = False
    blocks: int = 1
    rate: Tensor | None = None

    def multiplied(self) -> "NormalForm":
        """The same with ``rate`` multiplied into a."""
        if self.erase is None or self.rate is None:
            return self
        read, rate = self.erase[0], self.rate
        if rate.ndim < read.ndim:
            rate = rate.unsqueeze(-1)
        elif rate.shape[-1] > 1:
            rate = rate.repeat_interleave(read.shape[-1] // rate.shape[-1], dim=-1)
        read = rate * expand_heads(read, rate.shape[-2], dim=read.ndim - 2)
        return replace(self, erase=(read, self.erase[1]), rate=None)


@dataclass(frozen=True)
class MicroSteps:
    """Rows of the recurrence above, erasure and write together.

    Attributes:
        value: v, [B, T, N, HV, V], or [B, T, N, HV, blocks, V] when the write differs between blocks.
        read: a, [B, T, N, HV, K], or None for a = 0 (the additive family).
        key: b, [B, T, N, H or HV, K].
        log_decay, reads_before_decay, blocks: as in ``NormalForm``.
    """

    value: Tensor
    read: Tensor | None
    key: Tensor
    log_decay: Tensor | None
    reads_before_decay: bool
    blocks: int


def merge_write(form: NormalForm, k: Tensor, v: Tensor, write: Tensor | None) -> MicroSteps:
    """Join the erasures of ``form`` with the writes w v k^T of a token.

    An erasure along the write key itself (``form.erase[1] is k``) shares its micro-step with the write; any other
    direction takes two, first S <- S (I - a b^T), then the write.

    Args:
        k: [B, T, H, K], or [B, T, n, H, K] for n writes a token.
        v: [B, T, HV, V], or [B, T, n, HV, V].
        write: None for 1, [B, T, HV], or [B, T, n, HV]; with a last axis ``blocks`` when it differs between blocks.

    Raises:
        NotImplementedError: as ``num_micro_steps`` does.
    """
    num_micro_steps(form, k)
    form, (value, keys) = form.multiplied(), _write_rows(k, v, write)
    if form.erase is None:
        return MicroSteps(value, None, keys, form.log_decay, False, form.blocks)
    if form.erase[1] is k:
        return MicroSteps(value, with_rows(form.erase[0]), keys, form.log_decay, form.reads_before_decay, form.blocks)

    read, direction = (with_rows(x) for x in form.erase)
    keys, direction = equal_heads(keys, direction)
    erased, unread = zero_rows(value, read.shape[2]), zero_rows(read, keys.shape[2])
    value, read, keys = (erase_then_write(*pair) for pair in ((erased, value), (read, unread), (direction, keys)))
    return MicroSteps(value, read, keys, form.log_decay, form.reads_before_decay, form.blocks)


def num_micro_steps(form: NormalForm, k: Tensor) -> int:
    """N, how many micro-steps a token of ``form`` with the writes along k takes.

    Raises:
        NotImplementedError: the number of erasures a token is neither that of the writes nor met by a single write.
    """
    num_writes = 1 if k.ndim == 4 else k.shape[2]
    if form.erase is None or form.erase[1] is k:
        return num_writes
    num_erasures = with_rows(form.erase[1]).shape[2]
    if num_writes not in (1, num_erasures):
        raise NotImplementedError(f"erase: {num_erasures} erasures and {num_writes} writes a token have no normal form")
    return num_erasures + num_writes


def erase_then_write(erasures: Tensor, writes: Tensor) -> Tensor:
    """Rows [B, T, m + n, ...] from m erasures and n = m writes, one after the other, or from m and then one write."""
    if erasures.shape[2] == writes.shape[2]:
        return torch.stack((erasures, writes), dim=3).flatten(2, 3)
    return torch.cat((erasures, writes), dim=2)


def zero_rows(x: Tensor, count: int) -> Tensor:
    """Zeros like x [B, T, N, ...], with ``count`` in place of N."""
    return x.new_zeros(x.shape[:2] + (count,) + x.shape[3:])


def _write_rows(k: Tensor, v: Tensor, write: Tensor | None) -> tuple[Tensor, Tensor]:
    """w v and k with the axis N: a last axis of ``write`` beyond [B, T, N, HV] counts blocks."""
    if k.ndim == 4:
        k, v, write = k.unsqueeze(2), v.unsqueeze(2), None if write is None else write.unsqueeze(2)
    if write is None:
        return v, k
    if write.ndim == v.ndim:
        v = v.unsqueeze(-2)
    return write.unsqueeze(-1) * v, k


def with_rows(x: Tensor) -> Tensor:
    """x [B, T, HV, K] or [B, T, m, HV, K] with its axis m."""
    return x if x.ndim == 5 else x.unsqueeze(2)


def equal_heads(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y [B, T, N, H or HV, K] with the more heads of the two."""
    heads = max(x.shape[3], y.shape[3])
    return expand_heads(x, heads, dim=3), expand_heads(y, heads, dim=3)


def sum_groups(x: Tensor, shape: torch.Size) -> Tensor:
    """[B, T, HV, K] -> [B, T, H, K]: the gradient of what heads share, a key or a value, is the sum over them."""
    if x.shape == shape:
        return x
    return x.unflatten(2, (shape[2], -1)).sum(3, dtype=torch.float32).to(x.dtype)


def expand_heads(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """Repeat each head so that value head h reads key head h // (HV / H)."""
    return x if x.shape[dim] == num_heads else x.repeat_interleave(num_heads // x.shape[dim], dim)

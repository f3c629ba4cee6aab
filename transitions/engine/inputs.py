"""The arguments of a scan: their checks, and the views of them that the recurrent form needs.

Shapes are checked always, values only where that does not stall a device.

Shapes: B batch, T time, n writes a token, H key heads, HV value heads, K key_dim, V value_dim, N packed documents.
"""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from statemix.kernels import expand_heads, has_equal_values, is_same
from statemix.transitions.base import Transition
from statemix.transitions.block_diagonal import BlockDiagonal

UNIT_TOLERANCE = 2e-2  # a unit vector rounded to bfloat16 is off by up to 2^-8 in length


@dataclass(frozen=True)
class ScanInputs:
    """Checked arguments of ``scan``."""

    q: Tensor
    k: Tensor
    v: Tensor
    transition: Transition
    write: Tensor | None
    initial: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def seq_len(self) -> int:
        return self.q.shape[1]

    @property
    def key_dim(self) -> int:
        return self.q.shape[-1]

    def initial_state(self) -> Tensor:
        """[B or N, HV, V, K] in the dtype to compute in: float32, or float64 for float64 inputs."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        if self.initial is not None:
            return self.initial.to(dtype)
        num_states = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return self.q.new_zeros(num_states, *self.v.shape[-2:], self.key_dim, dtype=dtype)

    def in_state_dtype(self) -> "ScanInputs":
        """Everything in the dtype of the state; a transition that holds k or the write holds the cast one."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        if all(
            x.dtype == dtype
            for x in (self.q, self.write, *(x for _, x, _ in self.transition.tensors()))
            if x is not None
        ):
            return self
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        write = None if self.write is None else self.write.to(dtype)
        transition = self.transition.map_tensors(
            lambda _, x: k if is_same(x, self.k) else write if write is not None and x is self.write else x.to(dtype)
        )
        return replace(self, q=q, k=k, v=v, transition=transition, write=write)

    def writes(self) -> tuple[Tensor, Tensor]:
        """w k [B, T, n, HV, K] and v [B, T, n, HV, V]."""
        k, v, write = self.k, self.v, self.write
        if k.ndim == 4:
            k, v, write = k.unsqueeze(2), v.unsqueeze(2), None if write is None else write.unsqueeze(2)
        k = expand_heads(k, v.shape[3], dim=3)
        if write is None:
            return k, v
        if write.ndim < k.ndim:
            return write.unsqueeze(-1) * k, v
        return write.repeat_interleave(self.key_dim // write.shape[-1], dim=-1) * k, v

    def between(self, start: int, end: int) -> "ScanInputs":
        """The tokens start <= t < end as a batch of one."""

        def cut(x: Tensor) -> Tensor:
            return x[:, start:end]

        transition = self.transition.map_tensors(lambda kind, x: cut(x) if kind.is_per_token else x)
        write = None if self.write is None else cut(self.write)
        return replace(
            self, q=cut(self.q), k=cut(self.k), v=cut(self.v), transition=transition, write=write, cu_seqlens=None
        )


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    transition: Transition,
    write: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> ScanInputs:
    """The arguments as ``ScanInputs``; raises ValueError naming the one that does not fit."""
    if not isinstance(transition, Transition):
        raise ValueError(f"transition: expected a Transition, got {type(transition).__name__}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")
    for name, given in (("write", write), ("initial_state", initial_state), ("cu_seqlens", cu_seqlens)):
        if given is not None and not isinstance(given, Tensor):
            raise ValueError(f"{name}: expected a tensor or None, got {type(given).__name__}")
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q: expected [B, T, H, K], none of them 0, got {list(q.shape)}")
    (batch, seq_len, num_heads, key_dim), k_shape, v_shape = q.shape, k.shape, v.shape
    if len(k_shape) not in (4, 5) or 0 in k_shape:
        raise ValueError(f"k: expected [B, T, H, K] or [B, T, n, H, K], got {list(k_shape)}")
    lead = (batch, seq_len, *k_shape[2:-2])  # [B, T] or [B, T, n]
    _expect_shape("k", k, (*lead, num_heads, key_dim))
    if len(v_shape) != len(k_shape) or 0 in v_shape:
        raise ValueError(f"v: expected {len(k_shape)} axes as k has, got {list(v_shape)}")
    num_value_heads, value_dim = v_shape[-2:]
    _expect_shape("v", v, (*lead, num_value_heads, value_dim))
    if num_value_heads % num_heads:
        raise ValueError(
            f"v: expected value heads to be a multiple of the {num_heads} key heads, got {num_value_heads}"
        )
    if chunk_size not in (16, 32, 64, 128):
        raise ValueError(f"chunk_size: expected a power of two from 16 to 128, got {chunk_size}")
    _check_dtypes(q, k, v, {"write": write, "initial_state": initial_state}, transition)
    if write is not None:
        shape = (*lead, num_value_heads)
        _expect_shape("write", write, shape, (*shape, transition.num_blocks))
    _check_fields(transition, (batch, seq_len, num_heads, num_value_heads, key_dim))
    _check_writes(transition, lead[2] if len(lead) > 2 else 1)
    num_states = batch if cu_seqlens is None else _num_documents(cu_seqlens, q)
    if initial_state is not None:
        _expect_shape("initial_state", initial_state, (num_states, num_value_heads, value_dim, key_dim))
    return ScanInputs(q, k, v, transition, write, initial_state, cu_seqlens)


def check_values(transition: Transition) -> None:
    """Refuse log decays above 0; warn of directions longer than 1, with which the state can grow without bound."""
    for name, x, kind in transition.tensors():
        if kind.high == 0 and bool((x > 0).any()):
            raise ValueError(f"{name}: expected log decays <= 0, got {x.max().item():.4g}; take -x or a log-sigmoid")
        if kind.is_unit:
            blocks = x.detach().float().unflatten(-1, (transition.num_blocks, -1))
            longest = torch.linalg.vector_norm(blocks, dim=-1).amax().item()
            if longest > 1 + UNIT_TOLERANCE:
                warnings.warn(
                    f"{name}: expected vectors of length 1, got {longest:.4g}; beta |u|^2 > 2 lets the state grow "
                    "without bound; normalise the keys",
                    stacklevel=3,
                )


def check_offsets(inputs: ScanInputs) -> None:
    """Refuse offsets of documents that are out of order or beyond the sequence."""
    if inputs.cu_seqlens is None:
        return
    offsets = inputs.cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] > inputs.seq_len or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens: expected offsets that rise from 0 to at most T = {inputs.seq_len}, got {offsets}"
        )


def copied_key(inputs: ScanInputs, *, may_wait: bool = False) -> str | None:
    """The name of a field that holds a copy of the write key which kernels cannot take for that, or None.

    Args:
        may_wait: compare the values on a GPU as well, which stalls it.
    """
    for name, x, kind in inputs.transition.tensors():
        if kind.is_per_key_head and not is_same(x, inputs.k) and has_equal_values(x, inputs.k, may_wait=may_wait):
            return name
    return None


def warn_of_a_copied_key(inputs: ScanInputs) -> None:
    """Warn of a direction equal to k that gets a gradient of its own: it takes a micro-step of its own as well."""
    name = copied_key(inputs, may_wait=True)
    if name is not None:
        warnings.warn(
            f"{name}: expected the write key k itself, got a copy with a gradient of its own, which takes two "
            f"micro-steps a token in place of one; give {name} the tensor that is given as k",
            stacklevel=3,
        )


def warn_of_swapped_axes(inputs: ScanInputs) -> None:
    """Warn where [B, H, T, D] in place of [B, T, H, D] would run and give nonsense: no gate says which axis is time."""
    _, seq_len, num_heads, _ = inputs.q.shape
    says_time = inputs.write is not None or any(kind.is_per_token for _, _, kind in inputs.transition.tensors())
    if 1 < seq_len < num_heads and not says_time and inputs.initial is None and inputs.cu_seqlens is None:
        warnings.warn(
            f"q: expected [B, T, H, D], got {list(inputs.q.shape)}, fewer tokens than heads; transpose if these are "
            "[B, H, T, D]",
            stacklevel=3,
        )


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor | None], transition: Transition) -> None:
    if not q.dtype.is_floating_point:
        raise ValueError(f"q: expected a floating-point dtype, got {q.dtype}")
    _expect_like(q, "k", k, q.dtype)
    _expect_like(q, "v", v, q.dtype)
    for name, gate in gates.items():
        if gate is not None:
            _expect_like(q, name, gate, q.dtype, torch.float32)
    for name, x, _ in transition.tensors():
        _expect_like(q, f"{type(transition).__name__}.{name}", x, q.dtype, torch.float32)


def _expect_like(q: Tensor, name: str, x: Tensor, *dtypes: torch.dtype) -> None:
    if x.dtype not in dtypes:
        wanted = " or ".join(sorted(map(str, set(dtypes))))
        raise ValueError(f"{name}: expected {wanted} beside q of {q.dtype}, got {x.dtype}; cast it")
    if x.device != q.device:
        raise ValueError(f"{name}: expected device {q.device} as q has, got {x.device}; move it")


def _check_fields(transition: Transition, sizes: tuple[int, int, int, int, int], blocks: int = 0) -> None:
    """Every tensor of a transition has the shape of its kind, with an axis n after T where its erasures are n."""
    if isinstance(transition, BlockDiagonal):
        blocks = transition.num_blocks
        if sizes[-1] % transition.blocks:
            raise ValueError(f"blocks: expected a divisor of key_dim {sizes[-1]}, got {transition.blocks}")
    layout = transition.layout()
    keys = [getattr(transition, name) for name, kind in layout if kind is not None and kind.is_per_key_head]
    count = tuple(keys[0].shape[2:-2]) if keys else ()  # (n,) where the keys have the axis n
    for name, kind in layout:
        x = getattr(transition, name)
        if kind is None:
            if isinstance(x, Transition):
                _check_fields(x, sizes, blocks)
            continue
        shape = kind.shape(*sizes)
        if count and kind.is_per_token and kind.high != 0:
            shape = (*shape[:2], *count, *shape[2:])
        allowed = (shape,) if not blocks or kind.has_channels else ((*shape, 1), (*shape, blocks))
        _expect_shape(f"{type(transition).__name__}.{name}", x, *allowed)


def _check_writes(transition: Transition, num_writes: int) -> None:
    if num_writes == 1:
        return
    num_steps = len(transition.steps())
    if num_writes == num_steps or (num_steps == 1 and transition.is_diagonal):
        return
    raise ValueError(
        f"k: expected {num_steps} writes a token or one, as {type(transition).__name__} takes {num_steps} steps, "
        f"got {num_writes}; give k, v and write {num_steps} on the axis after T"
    )


def _num_documents(cu_seqlens: Tensor, q: Tensor) -> int:
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected batch 1, got {q.shape[0]}; pack the rows into one, [1, T_1 + ..., ...]")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens: expected int32 [N + 1] with N >= 1, got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens: expected device {q.device} as q has, got {cu_seqlens.device}; move it")
    return cu_seqlens.shape[0] - 1


def _expect_shape(name: str, x: Tensor, *allowed: tuple[int, ...]) -> None:
    if tuple(x.shape) not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"{name}: expected {wanted}, got {list(x.shape)}; the layout is [B, T, H, D]")

"""Block-diagonal transitions: M_t = diag(T_1, ..., T_b), each block of key_dim / b acting by itself.

The hidden state grows with K while no block outgrows on-chip memory. It equals b separate heads that share one value
and whose read-outs are summed. The blocks are cut from one inner transition: block j sees channels
[j K / b, (j + 1) K / b) of its keys and gates; beta, write and scalar decays may differ from block to block.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim, b blocks.
Source: arXiv:2406.06484 section 6, proposed as future work.
"""

from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from statemix.kernels import NormalForm

from .base import Transition
from .householder import Householder
from .kinds import Kind
from .modules.module import FactorConfig, HeadSizes, TransitionModule
from .modules.registry import TransitionSpec, register
from .product import build_transition


class BlockDiagonal(Transition):
    """M_t = diag(T_1, ..., T_b).

    Attributes:
        inner: the transition all blocks are cut from. Its rates and scalar decays are [B, T, HV] where the blocks share
            them, else [B, T, HV, b]; a fixed decay [HV] or [HV, b]. Unit keys have length one in each block.
        blocks: b, divides K.
    """

    inner: Transition
    blocks: int

    def __post_init__(self) -> None:
        if isinstance(self.blocks, bool) or not isinstance(self.blocks, int) or self.blocks < 1:
            raise ValueError(f"blocks: expected a positive integer, got {self.blocks!r}")
        key_dim = self.inner.key_dim
        if key_dim is not None and key_dim % self.blocks:
            raise ValueError(f"blocks: expected a divisor of key_dim {key_dim}, got {self.blocks}")
        if self.inner.num_blocks > 1:
            raise ValueError("inner: expected a transition without blocks, got a block-diagonal one; use more blocks")
        object.__setattr__(self, "inner", _with_block_axis(self.inner))

    @property
    def num_value_heads(self) -> int | None:
        """HV: in the inner tensors, the axis before channels or blocks."""
        return max((x.shape[-2] for _, x, _ in self.inner.tensors()), default=None)

    @property
    def is_diagonal(self) -> bool:  # type: ignore[override]
        return self.inner.is_diagonal

    @property
    def num_blocks(self) -> int:
        return self.blocks

    @property
    def write_key(self) -> Tensor | None:
        return self.inner.write_key

    @property
    def natural_write(self) -> Tensor | None:
        if self.inner.lowers_blocks:
            return self.inner.natural_write
        write = self._whole()._blocks_as_heads().natural_write
        return None if write is None else self._per_block(write)

    @property
    def eigenvalue_range(self) -> tuple[float, float] | None:
        return self.inner.eigenvalue_range

    @property
    def spectral_radius(self) -> float | None:
        return self.inner.spectral_radius

    def apply(self, state: Tensor) -> Tensor:
        by_block = state.unflatten(-1, (self.blocks, -1)).movedim(-2, -3).flatten(-4, -3)  # [..., HV * b, V, K / b]
        changed = self._blocks_as_heads().apply(by_block)
        return changed.unflatten(-3, (-1, self.blocks)).movedim(-3, -2).flatten(-2, -1)

    def matrix(self, key_dim: int) -> Tensor:
        by_block = self._whole()._blocks_as_heads().matrix(key_dim // self.blocks)  # [..., HV * b, K / b, K / b]
        if by_block.ndim == 2:
            by_block = by_block.expand(self.blocks, -1, -1)
        by_block = by_block.unflatten(-3, (-1, self.blocks))
        own = torch.eye(self.blocks, dtype=by_block.dtype, device=by_block.device)
        spread = by_block.unsqueeze(-2) * own[:, None, :, None]  # [..., HV, b, K / b, b, K / b]
        return spread.flatten(-2, -1).flatten(-3, -2)

    def steps(self) -> tuple[Transition, ...]:
        steps = self.inner.steps()
        return (self,) if steps[0] is self.inner else tuple(self._rebuild((step, self.blocks)) for step in steps)

    def lower(self) -> NormalForm:
        """The inner normal form, of whole heads where it takes blocks and else of blocks as heads, put together."""
        if self.inner.lowers_blocks:
            return replace(self.inner.lower(), blocks=self.blocks)
        heads = self._whole()._blocks_as_heads()
        form, erase, decay = heads.lower(), None, None
        if form.erase is not None:
            # the write key itself, and one tensor in both places, tell kernels what they need not store
            direction = self._erased(form.erase[1], heads)
            erase = direction if form.erase[0] is form.erase[1] else self._erased(form.erase[0], heads), direction
        if form.log_decay is not None:
            decay = self._channels(form.log_decay) if form.log_decay.ndim == 4 else self._per_block(form.log_decay)
        beta = None if form.erase_beta is None else self._per_block(form.erase_beta)
        return replace(form, log_decay=decay, erase=erase, erase_beta=beta, blocks=self.blocks)

    @classmethod
    def example(
        cls, batch: int, seq_len: int, num_heads: int, key_dim: int, generator: torch.Generator | None = None
    ) -> Self:
        """Two blocks of a Householder, its directions of length one in each."""
        whole = Householder.example(batch, seq_len, num_heads, key_dim, generator)
        by_block = whole.direction.unflatten(-1, (2, -1))
        return cls(Householder((by_block / by_block.norm(dim=-1, keepdim=True)).flatten(-2, -1), whole.beta), 2)

    def _erased(self, x: Tensor, heads: Transition) -> Tensor:
        """A direction of ``heads``, blocks as heads, as one of whole heads: where it is the write key, that itself."""
        write_key = self.inner.write_key
        return write_key if write_key is not None and x is heads.write_key else self._channels(x)

    def _whole(self) -> Self:
        """The same with its key heads repeated."""
        return self if self.num_value_heads is None else self.expand_heads(self.num_value_heads)

    def _per_block(self, x: Tensor) -> Tensor:
        """[..., HV * b] as [..., HV, b]."""
        return x.unflatten(-1, (-1, self.blocks))

    def _channels(self, x: Tensor) -> Tensor:
        """[..., HV * b, K / b] as [..., HV, K]."""
        return x.unflatten(-2, (-1, self.blocks)).flatten(-2, -1)

    def _blocks_as_heads(self) -> Transition:
        """The inner transition on HV * b heads of K / b channels; its key heads are repeated already."""

        def split(kind: Kind, x: Tensor) -> Tensor:
            if kind.has_channels:
                return x.unflatten(-1, (self.blocks, -1)).flatten(-3, -2)
            return x.expand(*x.shape[:-1], self.blocks).flatten(-2, -1)

        return self.inner.map_tensors(split)


def _with_block_axis(transition: Transition) -> Transition:
    """Give rates and scalar decays their last axis of blocks, of size 1 where the blocks share.

    From then on it is always there, with or without the axes T and n.
    """
    has_count = any(kind.is_per_key_head and x.ndim == 5 for _, x, kind in transition.own_tensors())
    values = []
    for name, kind in transition.layout():
        x = getattr(transition, name)
        if isinstance(x, Transition):
            x = _with_block_axis(x)
        elif kind is not None and not kind.has_channels:
            is_shared = x.ndim == (3 + has_count if kind.is_per_token else 1)
            x = x.unsqueeze(-1) if is_shared else x
        values.append(x)
    return transition._rebuild(values)


@register
class BlockDiagonalModule(TransitionModule):
    """b blocks of one inner module, which makes its own rates and scalar decays for every block."""

    class Config(FactorConfig):
        type: Literal["block_diagonal"] = "block_diagonal"
        blocks: int = Field(2, ge=1, description="b, divides key_dim")
        inner: TransitionSpec = Field(description="the transition all blocks are cut from")

    def __init__(self, config: Config, sizes: HeadSizes) -> None:
        super().__init__()
        if sizes.blocks > 1:
            raise ValueError("inner: expected a transition without blocks, got block_diagonal; use more blocks")
        if sizes.key_dim % config.blocks:
            raise ValueError(f"blocks: expected a divisor of key_dim {sizes.key_dim}, got {config.blocks}")
        self.blocks = config.blocks
        self.inner = build_transition(config.inner, replace(sizes, blocks=config.blocks))
        self.num_writes, self.needs_unit_keys = self.inner.num_writes, self.inner.needs_unit_keys
        self.formula = f"diag({config.blocks} x [{self.inner.formula}])"

    def reset_parameters(self) -> None:
        self.inner.reset_parameters()

    def forward(self, hidden: Tensor, key: Tensor) -> tuple[Transition, Tensor | None]:
        transition, write = self.inner(hidden, key)
        return BlockDiagonal(transition, self.blocks), write

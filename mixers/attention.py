"""Softmax attention: causal, full or within a window, grouped key heads, rotary positions.

    q, k, v = norm(W_q x), norm(W_k x), W_v x            RMS norm per head, or none
    y = W_o softmax(q k^T / sqrt(D)) v                   q and k turned to their positions, or not

A window of w lets a token see itself and the w - 1 tokens before it, in training and in decoding.
Shapes: B batch, T time, H heads, Hkv key and value heads, D head_dim, L cached keys, N packed documents.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from statemix.plugins import PartConfig

from .mixer import MIXERS, Mixer
from .packing import document_bounds, num_sequences, positions
from .rms_norm import RMSNorm
from .rotary import rotate
from .softmax import attend
from .state import AttentionState, check_state, keep_last


@MIXERS.register
class Attention(Mixer):
    """Causal softmax attention with a key/value cache as its state."""

    class Config(PartConfig):
        type: Literal["attention"] = "attention"
        num_heads: int = Field(gt=0, description="query heads")
        num_kv_heads: int | None = Field(None, gt=0, description="key and value heads; null means num_heads")
        head_dim: int | None = Field(None, gt=0, description="channels a head; null means hidden_size / num_heads")
        window: int | None = Field(None, gt=0, description="keys that a token sees, its own included; null means all")
        rotary: bool = Field(True, description="rotary positions on queries and keys")
        rotary_base: float = Field(10000.0, gt=0, description="wavelength of the slowest pair is 2 pi times about this")
        qk_norm: bool = Field(False, description="RMS norm of queries and keys, per head, before rotary positions")

        @model_validator(mode="after")
        def _heads_divide(self) -> "Attention.Config":
            if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
                raise ValueError(
                    f"num_kv_heads: expected a divisor of num_heads {self.num_heads}, got {self.num_kv_heads}; "
                    "every key head serves the same number of query heads"
                )
            return self

    def __init__(self, config: Config, *, hidden_size: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = _head_dim(config, hidden_size=hidden_size)
        self.window = config.window
        self.rotary_base = config.rotary_base if config.rotary else None
        self.formula = "softmax over all keys" if self.window is None else f"softmax over keys t-{self.window}+1..t"
        self.query = nn.Linear(hidden_size, self.num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.query_norm, self.key_norm = (
            RMSNorm(self.head_dim, eps=norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.output = nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        """Draw all parameters anew: normal(0, init_std), the output projection times output_scale."""
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, std=init_std)
        nn.init.normal_(self.output.weight, std=init_std * output_scale)
        for norm in (self.query_norm, self.key_norm):
            if isinstance(norm, RMSNorm):
                norm.reset_parameters()

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the state of one sequence after ``seq_len`` tokens, keys and values in ``dtype``."""
        cached = seq_len if self.window is None else min(seq_len, self.window - 1)
        return 2 * cached * self.num_kv_heads * self.head_dim * dtype.itemsize + torch.int64.itemsize

    def kernel(self, seq_len: int, device: torch.device) -> str:
        """What runs the softmax: torch on every device and for every length."""
        return "torch softmax"

    def forward(
        self, hidden: Tensor, state: AttentionState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        query = self.query_norm(self.query(hidden).unflatten(-1, (self.num_heads, self.head_dim)))
        key = self.key_norm(self.key(hidden).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        value = self.value(hidden).unflatten(-1, (self.num_kv_heads, self.head_dim))
        state = self._open(state, key, rows=num_sequences(hidden, cu_seqlens))
        if cu_seqlens is None:
            heads, state = self._mix(query, key, value, state)
        else:
            heads, state = self._mix_documents(query, key, value, state, cu_seqlens)
        return self.output(heads.flatten(-2)), state

    def _open(self, state: AttentionState | None, key: Tensor, *, rows: int) -> AttentionState:
        if state is None:
            empty = key.new_empty(rows, 0, self.num_kv_heads, self.head_dim)
            return AttentionState(empty, empty, torch.zeros(rows, dtype=torch.int64, device=key.device))
        cache = (rows, None, self.num_kv_heads, self.head_dim)
        state = check_state(state, AttentionState, shapes={"key": cache, "value": cache, "length": (rows,)})
        return AttentionState(state.key.to(key.dtype), state.value.to(key.dtype), state.length)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        if self.rotary_base is not None:
            position, _ = positions(state.length, seq_len=query.shape[1], cu_seqlens=None)
            query = rotate(query, position, base=self.rotary_base)
            key = rotate(key, position, base=self.rotary_base)
        key = torch.cat([state.key, key], dim=1)
        value = torch.cat([state.value, value], dim=1)
        heads = attend(query, key, value, filled=state.length, window=self.window)
        length = state.length + query.shape[1]
        if self.window is None:
            return heads, AttentionState(key, value, length)
        return heads, AttentionState(keep_last(key, self.window - 1), keep_last(value, self.window - 1), length)

    def _mix_documents(
        self, query: Tensor, key: Tensor, value: Tensor, state: AttentionState, cu_seqlens: Tensor
    ) -> tuple[Tensor, AttentionState]:
        heads, states = [], []
        lengths = state.length.tolist()
        bounds = document_bounds(cu_seqlens, seq_len=query.shape[1])
        for row, (start, stop) in enumerate(bounds):
            past = state.key.shape[1] - min(lengths[row], state.key.shape[1])
            this = slice(row, row + 1)
            one = AttentionState(state.key[this, past:], state.value[this, past:], state.length[this])
            if stop > start:
                mixed, one = self._mix(query[:, start:stop], key[:, start:stop], value[:, start:stop], one)
                heads.append(mixed)
            states.append(one)
        heads.append(torch.zeros_like(query[:, bounds[-1][1] :]))
        return torch.cat(heads, dim=1), _join(states)


def _join(states: list[AttentionState]) -> AttentionState:
    """One state of all rows, the shorter caches padded at the left."""
    size = max(state.key.shape[1] for state in states)

    def stacked(caches: list[Tensor]) -> Tensor:
        return torch.cat([F.pad(cache, (0, 0, 0, 0, size - cache.shape[1], 0)) for cache in caches])

    key, value = stacked([state.key for state in states]), stacked([state.value for state in states])
    return AttentionState(key, value, torch.cat([state.length for state in states]))


def _head_dim(config: Attention.Config, *, hidden_size: int) -> int:
    if config.head_dim is None and hidden_size % config.num_heads:
        raise ValueError(
            f"num_heads: expected a divisor of hidden_size {hidden_size}, got {config.num_heads}; "
            "change one of them or set head_dim"
        )
    head_dim = config.head_dim or hidden_size // config.num_heads
    if config.rotary and head_dim % 2:
        raise ValueError(f"head_dim: expected an even number for rotary positions, got {head_dim}; or rotary: false")
    return head_dim

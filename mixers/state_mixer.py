"""The state mixer: one recurrence, S_t = S_{t-1} M_t + w_t v_t k_t^T, o_t = scale * S_t q_t, with its surroundings.

    q, k, v = convolution(W_q x, W_k x, W_v x)           depthwise, causal, a few tokens wide
    q, k = unit_length(feature_map(q), feature_map(k))   per head, and per block of a block-diagonal transition
    M, w = transition(x, k)                              what distinguishes DeltaNet, GLA, Mamba-2, ...
    y = W_o (norm(scan(q, k, v, M, w)) * gate(W_g x))    RMS norm per head

Shapes: B batch, T time, H key heads, HV value heads, K key_dim, V value_dim, n writes a token, W convolution width.
"""

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from statemix.transitions import HeadSizes, TransitionSpec, build_transition, scan

from .convolution import ShortConvolution
from .packing import num_sequences
from .rms_norm import RMSNorm
from .state import StateMixerState, check_state

Map = Literal["silu", "identity"]
_MAPS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "sigmoid": nn.Sigmoid, "identity": nn.Identity}


class StateMixer(nn.Module):
    """A recurrence over matrix states with any transition."""

    class Config(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        type: Literal["state"] = "state"
        num_heads: int = Field(gt=0, description="query and key heads")
        num_value_heads: int | None = Field(None, gt=0, description="value heads, states; null means num_heads")
        key_dim: int = Field(gt=0, description="channels of a query and key head")
        value_dim: int = Field(gt=0, description="channels of a value head")
        transition: TransitionSpec = Field(description="a name, a mapping with options, or a list of factors of M_t")
        conv_size: int = Field(0, ge=0, description="tokens that the short convolution spans; 0 means none, 4 is usual")
        conv_bias: bool = Field(False, description="bias in the short convolution")
        feature_map: Map = Field("silu", description="on queries and keys, after the convolution")
        value_map: Map = Field("identity", description="on values, after the convolution")
        key_norm: Literal["l2", "none"] = Field("l2", description="length of queries and keys, per head and block")
        output_norm: Literal["rms", "none"] = Field("rms", description="norm of the read-out, per head")
        output_gate: Literal["none", "silu", "sigmoid"] = Field("none", description="gate on the read-out")
        chunk_size: Literal[16, 32, 64, 128] = Field(64, description="tokens that the chunk form takes at once")

        @model_validator(mode="after")
        def _heads_divide(self) -> "StateMixer.Config":
            if self.num_value_heads is not None and self.num_value_heads % self.num_heads:
                raise ValueError(
                    f"num_value_heads: expected a multiple of num_heads {self.num_heads}, got {self.num_value_heads}; "
                    "every key head serves the same number of value heads"
                )
            return self

    def __init__(self, config: Config, *, hidden_size: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_value_heads = config.num_value_heads or config.num_heads
        self.key_dim, self.value_dim, self.chunk_size = config.key_dim, config.value_dim, config.chunk_size
        sizes = HeadSizes(hidden_size, self.num_heads, self.num_value_heads, self.key_dim)
        self.transition = build_transition(config.transition, sizes)
        if self.transition.needs_unit_keys and config.key_norm != "l2":
            raise ValueError(
                f"key_norm: expected l2 for a transition along unit keys ({self.transition.formula}), "
                f"got {config.key_norm}; set key_norm: l2"
            )
        self.has_unit_keys = config.key_norm == "l2"
        writes = self.transition.num_writes
        self.channels = [
            self.num_heads * self.key_dim,
            writes * self.num_heads * self.key_dim,
            writes * self.num_value_heads * self.value_dim,
        ]
        self.query, self.key, self.value = (nn.Linear(hidden_size, size, bias=False) for size in self.channels)
        self.history = max(config.conv_size - 1, 0)
        self.convolution = None
        if config.conv_size > 0:
            self.convolution = ShortConvolution(sum(self.channels), width=config.conv_size, has_bias=config.conv_bias)
        self.feature_map, self.value_map = _MAPS[config.feature_map](), _MAPS[config.value_map]()
        self.norm = RMSNorm(self.value_dim, eps=norm_eps) if config.output_norm == "rms" else None
        self.gate = None
        if config.output_gate != "none":
            self.gate = nn.Linear(hidden_size, self.num_value_heads * self.value_dim, bias=False)
            self.gate_map = _MAPS[config.output_gate]()
        self.output = nn.Linear(self.num_value_heads * self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    @property
    def formula(self) -> str:
        """M_t in words."""
        return self.transition.formula

    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        """Draw all parameters anew: projections normal(0, init_std), the output projection times output_scale.

        Transition and convolution have initialisations of their own.
        """
        self.transition.reset_parameters()
        for module in (self.convolution, self.norm):
            if module is not None:
                module.reset_parameters()
        for linear in (self.query, self.key, self.value, self.gate):
            if linear is not None:
                nn.init.normal_(linear.weight, std=init_std)
        nn.init.normal_(self.output.weight, std=init_std * output_scale)

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the state of one sequence, the same after any ``seq_len``; the convolution's part in ``dtype``."""
        recurrent = self.num_value_heads * self.value_dim * self.key_dim
        conv = self.history * sum(self.channels)
        return recurrent * torch.promote_types(dtype, torch.float32).itemsize + conv * dtype.itemsize

    def forward(
        self, hidden: Tensor, state: StateMixerState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, StateMixerState]:
        """Mix ``hidden`` [B, T, hidden_size] along T, after the tokens that ``state`` has seen.

        Args:
            hidden: new tokens.
            state: what this layer returned for the tokens before; None starts afresh.
            cu_seqlens: offsets of packed documents, int32 [N + 1], B = 1; the state then has N rows.

        Returns:
            y [B, T, hidden_size], zeros after the last document, and the next state.

        Raises:
            StateError: a state of another layer or batch.
            ValueError: cu_seqlens of a wrong form.
        """
        recurrent, conv = self._open(state, rows=num_sequences(hidden, cu_seqlens))
        streams = torch.cat([self.query(hidden), self.key(hidden), self.value(hidden)], dim=-1)
        streams, conv = self._convolve(streams, conv, cu_seqlens)
        query, key, value = self._split_heads(streams)
        query, key = self._normalise(self.feature_map(query)), self._normalise(self.feature_map(key))
        value = self.value_map(value)
        transition, write = self.transition(hidden, key)
        mixed, recurrent = scan(
            query,
            key,
            value,
            transition,
            write=write,
            initial_state=recurrent,
            cu_seqlens=cu_seqlens,
            chunk_size=self.chunk_size,
        )
        if self.norm is not None:
            mixed = self.norm(mixed)
        if self.gate is not None:
            mixed = mixed * self.gate_map(self.gate(hidden)).unflatten(-1, mixed.shape[-2:])
        return self.output(mixed.flatten(-2)), StateMixerState(recurrent, conv)

    def _open(self, state: StateMixerState | None, *, rows: int) -> tuple[Tensor | None, Tensor | None]:
        if state is None:
            return None, None
        shapes: dict[str, tuple[int | None, ...]] = {
            "recurrent": (rows, self.num_value_heads, self.value_dim, self.key_dim),
            "conv": (rows, self.history, sum(self.channels)),
        }
        state = check_state(state, StateMixerState, shapes=shapes)
        return state.recurrent, state.conv

    def _convolve(self, streams: Tensor, conv: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.convolution is None:
            return streams, streams.new_empty(num_sequences(streams, cu_seqlens), 0, streams.shape[-1])
        filtered: tuple[Tensor, Tensor] = self.convolution(streams, conv, cu_seqlens=cu_seqlens)
        return filtered

    def _split_heads(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, H, K], [B, T, (n,) H, K], [B, T, (n,) HV, V]: the axis n is there when n > 1."""
        query, key, value = streams.split(self.channels, dim=-1)
        writes = self.transition.num_writes
        lead = (writes,) if writes > 1 else ()
        return (
            query.unflatten(-1, (self.num_heads, self.key_dim)),
            key.unflatten(-1, (*lead, self.num_heads, self.key_dim)),
            value.unflatten(-1, (*lead, self.num_value_heads, self.value_dim)),
        )

    def _normalise(self, x: Tensor) -> Tensor:
        if not self.has_unit_keys:
            return x
        return unit_length(x.unflatten(-1, (self.transition.blocks, -1))).flatten(-2)


def unit_length(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis, in float32 (float64 for float64); a zero row stays zero."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)

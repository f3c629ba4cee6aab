"""The state mixer: one recurrence, S_t = S_{t-1} M_t + w_t v_t k_t^T, o_t = scale * S_t q_t, with its surroundings.

    q, k, v = convolution(W_q x, W_k x, W_v x)           depthwise, causal, a few tokens wide
    q, k = key_norm(feature_map(q), feature_map(k))      per head, and per block of a block-diagonal transition
    q, k = rotary(q, k)                                  RetNet's positions
    M, w = transition(x, k)                              what distinguishes DeltaNet, GLA, Mamba-2, ...
    o = scan(q, k, v, M, w) + D v                        over the sum of weights where the config says so
    y = W_o (norm(o) * gate(W_g x))                      RMS norm per head

Shapes: B batch, T time, H key heads, HV value heads, K key_dim, V value_dim, n writes a token, W convolution width.
"""

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from statemix.plugins import PartConfig
from statemix.transitions import HeadSizes, TransitionSpec, build_transition, explain, scan

from .capabilities import Capabilities
from .convolution import NoConvolution, ShortConvolution
from .feature_map import FEATURE_MAPS, FeatureMapSpec, SiLU, build_feature_map, non_negative_maps
from .key_norm import KEY_NORMS, KeyNorm
from .mixer import MIXERS, Mixer
from .normalizer import NoNormalizer, Normalizer, only_decays
from .output_gate import NoGate, OutputGate
from .packing import num_sequences
from .rms_norm import RMSNorm
from .rotary import NoPositions, Rotary
from .skip import add_skip
from .state import StateMixerState, check_state

_ROTARY_BASE = 10000.0


@MIXERS.register
class StateMixer(Mixer):
    """A recurrence over matrix states with any transition."""

    capabilities = Capabilities(has_constant_state=True)

    class Config(PartConfig):
        type: Literal["state"] = "state"
        num_heads: int = Field(gt=0, description="query and key heads")
        num_value_heads: int | None = Field(None, gt=0, description="value heads, states; null means num_heads")
        key_dim: int = Field(gt=0, description="channels of a query and key head")
        value_dim: int = Field(gt=0, description="channels of a value head")
        transition: TransitionSpec = Field(description="a name, a mapping with options, or a list of factors of M_t")
        conv_size: int = Field(0, ge=0, description="tokens that the short convolution spans; 0 means none, 4 is usual")
        conv_bias: bool = Field(False, description="bias in the short convolution")
        feature_map: FeatureMapSpec = Field(
            SiLU.Config(), description="on queries and keys, after the convolution, per head"
        )
        value_map: Literal["silu", "identity"] = Field("identity", description="on values, after the convolution")
        key_norm: KeyNorm = Field("l2", description="length of queries and keys, per head and block")
        rotary: bool = Field(False, description="rotary positions on queries and keys, after their norm (RetNet)")
        is_normalized: bool = Field(False, description="read-outs are averages: divided by the sum of their weights")
        has_skip: bool = Field(False, description="D v_t is added to the read-out, D one number a value head (Mamba-2)")
        output_norm: Literal["rms", "none"] = Field("rms", description="norm of the read-out, per head")
        output_gate: Literal["none", "silu", "sigmoid"] = Field("none", description="gate on the read-out")
        chunk_size: Literal[16, 32, 64, 128] = Field(64, description="tokens that the torch chunk form takes at once")
        recompute: bool = Field(False, description="states are computed again for gradients: less memory, more time")

        @model_validator(mode="after")
        def _heads_divide(self) -> "StateMixer.Config":
            if self.num_value_heads is not None and self.num_value_heads % self.num_heads:
                raise ValueError(
                    f"num_value_heads: expected a multiple of num_heads {self.num_heads}, got {self.num_value_heads}; "
                    "every key head serves the same number of value heads"
                )
            return self

        @model_validator(mode="after")
        def _weights_can_be_summed(self) -> "StateMixer.Config":
            reason = None
            if not FEATURE_MAPS.class_of(self.feature_map).is_non_negative:
                reason = f"feature_map {self.feature_map.type}; take one of {', '.join(non_negative_maps())}"
            elif self.rotary:
                reason = "rotary positions; leave one of the two out"
            elif not only_decays(self.transition):
                reason = "a transition that does more than let decay; take identity, fixed_decay or a gate"
            if self.is_normalized and reason is not None:
                raise ValueError(f"is_normalized: expected false, as weights may be negative beside {reason}")
            return self

    def __init__(self, config: Config, *, hidden_size: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_value_heads = config.num_value_heads or config.num_heads
        self.key_dim, self.value_dim = config.key_dim, config.value_dim
        self.chunk_size, self.recompute = config.chunk_size, config.recompute
        sizes = HeadSizes(hidden_size, self.num_heads, self.num_value_heads, self.key_dim)
        self.transition = build_transition(config.transition, sizes)
        self.formula = self.transition.formula
        self.num_writes, self.blocks = self.transition.num_writes, self.transition.blocks
        self._check(config)
        self.channels = [
            self.num_heads * self.key_dim,
            self.num_writes * self.num_heads * self.key_dim,
            self.num_writes * self.num_value_heads * self.value_dim,
        ]
        self.query, self.key, self.value = (nn.Linear(hidden_size, size, bias=False) for size in self.channels)
        self.history = max(config.conv_size - 1, 0)
        self.convolution = (
            ShortConvolution(sum(self.channels), width=config.conv_size, has_bias=config.conv_bias)
            if config.conv_size > 0
            else NoConvolution()
        )
        self.query_map, self.key_map = (
            build_feature_map(config.feature_map, size=self.key_dim // self.blocks) for _ in range(2)
        )
        self.value_map = nn.SiLU() if config.value_map == "silu" else nn.Identity()
        self.key_norm = KEY_NORMS[config.key_norm]
        self.rotary = Rotary(_ROTARY_BASE) if config.rotary else NoPositions()
        self.normalizer = Normalizer() if config.is_normalized else NoNormalizer()
        self.skip = nn.Parameter(torch.empty(self.num_value_heads)) if config.has_skip else None
        self.norm = RMSNorm(self.value_dim, eps=norm_eps) if config.output_norm == "rms" else nn.Identity()
        size = self.num_value_heads * self.value_dim
        self.gate = NoGate() if config.output_gate == "none" else OutputGate(hidden_size, size, kind=config.output_gate)
        self.output = nn.Linear(size, hidden_size, bias=False)
        self.reset_parameters()

    def _check(self, config: Config) -> None:
        """Refuse what does not go together with the transition."""
        if self.transition.needs_unit_keys and config.key_norm == "none":
            raise ValueError(
                "key_norm: expected l2 or l1, for keys of length 1 at most in a transition along them "
                f"({self.transition.formula}), got none; set key_norm: l2"
            )
        if config.has_skip and self.num_writes > 1:
            raise ValueError(
                f"has_skip: expected false, got true with {self.num_writes} values a token; leave it out or write once"
            )
        if config.rotary and self.key_dim // self.blocks % 2:
            raise ValueError(
                f"key_dim: expected an even number of channels a block for rotary positions, got {self.key_dim} "
                f"in {self.blocks}; change one of them or set rotary: false"
            )

    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        """Draw all parameters anew: projections normal(0, init_std), the output projection times output_scale.

        Transition, learned feature maps and convolution have initialisations of their own; D starts at 1.
        """
        for part in (self.transition, self.convolution, self.query_map, self.key_map):
            part.reset_parameters()
        if isinstance(self.norm, RMSNorm):
            self.norm.reset_parameters()
        for linear in (self.query, self.key, self.value, self.gate):
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=init_std)
        nn.init.normal_(self.output.weight, std=init_std * output_scale)
        if self.skip is not None:
            # Set here and not in __init__: to_empty makes new Parameters when the module was built on meta.
            self.skip.no_weight_decay = True  # type: ignore[attr-defined]
            nn.init.ones_(self.skip)

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the state of one sequence, the same after any ``seq_len``; the convolution's part in ``dtype``."""
        recurrent = self.num_value_heads * (self.value_dim + self.normalizer.num_rows) * self.key_dim
        conv = self.history * sum(self.channels)
        position = self.rotary.num_counts * torch.int64.itemsize
        return recurrent * torch.promote_types(dtype, torch.float32).itemsize + conv * dtype.itemsize + position

    def kernel(self, seq_len: int, device: torch.device) -> str:
        """What runs the recurrence in training on ``device``, such as "torch chunk"; a mixer on meta can answer too."""
        hidden = self.query.weight.new_empty(1, seq_len, self.query.in_features)
        query, key, value = self._split_heads(hidden.new_empty(1, seq_len, sum(self.channels), requires_grad=True))
        key = key.flatten(-2)
        transition, write = self.transition(hidden, key)
        chosen = explain(query.flatten(-2), key, value, transition, write=write, device=device)
        return f"{chosen.backend} {chosen.form}"

    def forward(
        self, hidden: Tensor, state: StateMixerState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, StateMixerState]:
        recurrent, conv, seen = self._open(state, hidden, rows=num_sequences(hidden, cu_seqlens))
        streams = torch.cat([self.query(hidden), self.key(hidden), self.value(hidden)], dim=-1)
        streams, conv = self.convolution(streams, conv, cu_seqlens=cu_seqlens)
        query, key, value = self._split_heads(streams)
        query, key = self.key_norm(self.query_map(query)), self.key_norm(self.key_map(key))
        query, key, seen = self.rotary(query, key, seen, cu_seqlens=cu_seqlens)
        query, key, value = query.flatten(-2), key.flatten(-2), self.value_map(value)
        transition, write = self.transition(hidden, key)
        mixed, recurrent = scan(
            query,
            key,
            self.normalizer.before(value),
            transition,
            write=write,
            initial_state=recurrent,
            cu_seqlens=cu_seqlens,
            chunk_size=self.chunk_size,
            recompute=self.recompute,
        )
        mixed = add_skip(self.normalizer.after(mixed), value, self.skip, cu_seqlens=cu_seqlens)
        mixed = self.gate(self.norm(mixed), hidden)
        return self.output(mixed.flatten(-2)), StateMixerState(recurrent, conv, seen)

    def _open(
        self, state: StateMixerState | None, hidden: Tensor, *, rows: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        if state is None:
            return None, None, torch.zeros(rows, self.rotary.num_counts, dtype=torch.int64, device=hidden.device)
        shapes: dict[str, tuple[int | None, ...]] = {
            "recurrent": (rows, self.num_value_heads, self.value_dim + self.normalizer.num_rows, self.key_dim),
            "conv": (rows, self.history, sum(self.channels)),
            "position": (rows, self.rotary.num_counts),
        }
        state = check_state(state, StateMixerState, shapes=shapes)
        return state.recurrent, state.conv, state.position

    def _split_heads(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, H, b, K/b], [B, T, (n,) H, b, K/b], [B, T, (n,) HV, V]: the axis n is there when n > 1, b blocks."""
        query, key, value = streams.split(self.channels, dim=-1)
        lead = (self.num_writes,) if self.num_writes > 1 else ()
        return (
            query.unflatten(-1, (self.num_heads, self.blocks, -1)),
            key.unflatten(-1, (*lead, self.num_heads, self.blocks, -1)),
            value.unflatten(-1, (*lead, self.num_value_heads, self.value_dim)),
        )

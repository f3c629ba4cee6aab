"""The causal language model: embedding, blocks, norm, head.

    x = E[tokens]        x <- block_i(x), i = 1..num_layers        logits = W norm(x), W = E when tied

Shapes: B batch, T time, N packed documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from statemix.mixers import MixerState, RMSNorm, StateError

from .block import Block
from .norm import NormSpec, build_norm
from .padding import Packing


@dataclass(frozen=True)
class ModelState:
    """What a model carries from one call to the next: the state of each layer.

    Attributes:
        layers: one state a layer, each with a row a sequence.
    """

    layers: tuple[MixerState, ...]

    def select(self, index: Tensor | Sequence[int]) -> "ModelState":
        """Rows ``index`` of every layer: reorders, repeats or drops sequences."""
        return ModelState(tuple(layer.select(index) for layer in self.layers))


class CausalLM(nn.Module):
    """A stack of blocks over tokens.

    ``CausalLM(config, layers)`` makes the same weights under the same seed as building on the meta device, then
    ``to_empty`` and ``reset_parameters``.
    """

    class Config(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        vocab_size: int = Field(gt=0, description="number of different tokens")
        hidden_size: int = Field(gt=0, description="channels of the residual stream")
        tie_embeddings: bool = Field(False, description="the head is the embedding matrix")
        norm: NormSpec = Field(RMSNorm.Config(), description="before every mixer and MLP, and before the head")
        norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in every norm")
        init_std: float = Field(0.02, gt=0, description="standard deviation of embedding and projections at the start")

    def __init__(self, config: Config, layers: Sequence[Block.Config]) -> None:
        super().__init__()
        self.config = config
        self.layer_configs = tuple(layers)
        device = torch.get_default_device()
        # Modules draw their weights when they are made; on meta that costs no time and no random numbers.
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.blocks = nn.ModuleList(
                Block(layer, hidden_size=config.hidden_size, norm_eps=config.norm_eps, norm=config.norm)
                for layer in layers
            )
            self.norm = build_norm(config.norm, config.hidden_size, eps=config.norm_eps)
            # A tied head is not registered a second time: to_empty, deepcopy and safetensors would split or refuse it.
            self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to_empty(device=device)
        self.reset_parameters()

    @property
    def head_weight(self) -> nn.Parameter:
        """[vocab_size, hidden_size]: the embedding's own Parameter when tied."""
        layer = self.embedding if self.head is None else self.head
        return cast(nn.Parameter, layer.weight)

    def reset_parameters(self) -> None:
        """Draw all parameters anew: normal(0, init_std), over sqrt(2 num_layers) where a layer adds to the stream."""
        output_scale = (2 * max(len(self.blocks), 1)) ** -0.5
        nn.init.normal_(self.embedding.weight, std=self.config.init_std)
        for block in cast(Iterable[Block], self.blocks):
            block.reset_parameters(init_std=self.config.init_std, output_scale=output_scale)
        self.norm.reset_parameters()
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=self.config.init_std)

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Logits for the token after each of ``tokens``, which follow those that ``state`` has seen.

        Args:
            tokens: new tokens, [B, T] int64.
            state: what the model returned for the tokens before; None starts afresh.
            mask: [B, T] bool, True = real; pads at the left, at the right or both, in each row as it comes.
            cu_seqlens: offsets of packed documents, int32 [N + 1], B = 1; the state then has N rows.

        Returns:
            logits [B, T, vocab_size], zeros at pads and after the last document, and the next state.

        Raises:
            StateError: a state of another model or batch.
            ValueError: tokens, mask or cu_seqlens of a wrong form, or a mask with pads beside cu_seqlens.
        """
        _check_tokens(tokens, mask, cu_seqlens)
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_vocabulary(tokens if mask is None else tokens[mask], self.config.vocab_size)
        if mask is None or cu_seqlens is not None:
            return self._run(tokens, state, cu_seqlens)
        packing = Packing.of(mask)
        logits, state = self._run(packing.pack(tokens), state, packing.cu_seqlens)
        return packing.unpack(logits), state

    def _run(self, tokens: Tensor, state: ModelState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, ModelState]:
        before = self._layer_states(state)
        after = []
        hidden = self.embedding(tokens)
        for block, layer_state in zip(self.blocks, before, strict=True):
            hidden, layer_state = block(hidden, layer_state, cu_seqlens=cu_seqlens)
            after.append(layer_state)
        logits = F.linear(self.norm(hidden), self.head_weight)
        if cu_seqlens is not None:
            outside = torch.arange(tokens.shape[1], device=tokens.device) >= cu_seqlens[-1]
            logits = logits.masked_fill(outside[:, None], 0)
        return logits, ModelState(tuple(after))

    def _layer_states(self, state: ModelState | None) -> Sequence[MixerState | None]:
        if state is None:
            return [None] * len(self.blocks)
        if not isinstance(state, ModelState):
            raise StateError(f"state: expected ModelState, got {type(state).__name__}; pass what this model returned")
        if len(state.layers) != len(self.blocks):
            raise StateError(
                f"state: expected {len(self.blocks)} layers, got {len(state.layers)}; pass what this model returned"
            )
        return state.layers


def _check_vocabulary(tokens: Tensor, vocab_size: int) -> None:
    """Refuse ids that have no embedding; what stands at a pad is never read. Called where it stalls no device."""
    if tokens.numel() == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"tokens: expected ids from 0 to {vocab_size - 1} (vocab_size), got {low} to {high}")


def _check_tokens(tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if tokens.ndim != 2 or tokens.numel() == 0 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"tokens: expected int64 [batch, seq_len], neither of them 0, got {tokens.dtype} {list(tokens.shape)}; "
            "a single sequence is tokens[None]"
        )
    if mask is None:
        return
    if mask.dtype != torch.bool or mask.shape != tokens.shape:
        raise ValueError(
            f"mask: expected bool {list(tokens.shape)} as the tokens, got {mask.dtype} {list(mask.shape)}; "
            "it covers the new tokens only, True = real"
        )
    if cu_seqlens is not None and not bool(mask.all()):
        raise ValueError(
            f"mask: expected None or all True beside cu_seqlens, got {int((~mask).sum())} pads; "
            "packed documents have no pads, leave one of the two out"
        )

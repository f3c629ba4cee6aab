"""A hybrid of four layers at small odd sizes, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from statemix.blocks import Block, CausalLM

VOCAB = 23

DELTA: dict[str, Any] = {
    "type": "state",
    "num_heads": 2,
    "num_value_heads": 4,
    "key_dim": 6,
    "value_dim": 5,
    "transition": "gated_deltanet",
    "conv_size": 4,
    "conv_bias": True,
    "output_gate": "silu",
}
GATED: dict[str, Any] = {"type": "state", "num_heads": 3, "key_dim": 4, "value_dim": 7, "transition": "gla"}
WINDOW: dict[str, Any] = {"type": "attention", "num_heads": 2, "window": 5}
GLOBAL: dict[str, Any] = {"type": "attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}

STACKS: dict[str, list[dict[str, Any]]] = {
    "hybrid": [DELTA, WINDOW, GATED, GLOBAL],
    "pair": [DELTA, WINDOW],
    "only_state": [DELTA, GATED],
    "only_attention": [WINDOW, GLOBAL],
}


def build(stack: str = "hybrid", *, tie_embeddings: bool = False) -> CausalLM:
    """A model in float32, as drawn."""
    config = CausalLM.Config(vocab_size=VOCAB, hidden_size=20, tie_embeddings=tie_embeddings)
    layers = [Block.Config.model_validate({"mixer": mixer, "mlp": {"width": 17}}) for mixer in STACKS[stack]]
    return CausalLM(config, layers)


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    torch.zeros(4).exp()  # the first vectorised exp of a process can be slightly off on some CPUs
    torch.manual_seed(0)


@pytest.fixture
def make_model() -> Callable[..., CausalLM]:
    """make_model(stack, tie_embeddings=False): as its constructor makes it."""
    return build


@pytest.fixture
def make_lively_model() -> Callable[..., CausalLM]:
    """In float64, weights large and biases not zero, so that nothing hides behind a small or neutral number."""

    def make(stack: str = "hybrid", *, tie_embeddings: bool = False) -> CausalLM:
        model = build(stack, tie_embeddings=tie_embeddings).double()
        for name, parameter in model.named_parameters():
            if "decay" not in name:
                mean = 0.5 if name.endswith(("bias", "norm.weight")) else 0.0
                nn.init.normal_(parameter, mean=mean, std=0.3)
        return model

    return make

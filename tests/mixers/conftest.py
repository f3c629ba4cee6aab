"""Mixers at small odd sizes, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from statemix.mixers import MixerSpec, build_mixer

HIDDEN = 20


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    torch.zeros(4).exp()  # the first vectorised exp of a process can be slightly off on some CPUs
    torch.manual_seed(0)


@pytest.fixture
def make_mixer() -> Callable[..., nn.Module]:
    """make_mixer(type=..., option=...): a mixer on 20 channels whose biases and norm weights are drawn too."""

    def make(**options: Any) -> nn.Module:
        if options["type"] == "state":
            options = {"num_heads": 2, "num_value_heads": 4, "key_dim": 6, "value_dim": 5, "chunk_size": 16} | options
        config = TypeAdapter(MixerSpec).validate_python(options)
        mixer = build_mixer(config, hidden_size=HIDDEN).double()
        mixer.reset_parameters(init_std=0.3)
        for name, parameter in mixer.named_parameters():
            if name.endswith(("bias", "norm.weight")) and "dt_bias" not in name:
                nn.init.normal_(parameter, mean=0.5)
        return mixer

    return make

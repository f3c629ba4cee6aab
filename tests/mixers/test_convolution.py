"""The short convolution against its definition; splits and packed documents are in test_splitting.py."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from statemix.mixers import ShortConvolution


@pytest.mark.parametrize("seq_len", [1, 3, 4, 17])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_it_equals_a_padded_depthwise_convolution(seq_len: int, width: int) -> None:
    module = ShortConvolution(5, width=width, has_bias=True).double()
    nn.init.normal_(module.bias)
    x = torch.randn(2, seq_len, 5, dtype=torch.float64)
    y, history = module(x, None)
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    expected = F.conv1d(padded, module.weight.t()[:, None], module.bias, groups=5).transpose(1, 2)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    assert torch.equal(history, padded[:, :, seq_len:].transpose(1, 2))


@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_prompts_shorter_than_the_filter_are_remembered_in_place(prompt: int) -> None:
    module = ShortConvolution(3, width=4).double()
    x = torch.randn(1, prompt + 5, 3, dtype=torch.float64)
    whole, _ = module(x, None)
    with torch.no_grad():
        size = F.conv1d(F.pad(x.abs().mT, (3, 0)), module.weight.abs().t()[:, None], groups=3).mT
    allowed = 2 * 4 * torch.finfo(torch.float64).eps * size  # four roundings of up to ``size`` on either side
    _, history = module(x[:, :prompt], None)
    assert history.shape == (1, 3, 3)
    assert torch.equal(history[:, : 3 - prompt], torch.zeros(1, 3 - prompt, 3, dtype=torch.float64))
    for t in range(prompt, prompt + 5):
        y, history = module(x[:, t : t + 1], history)
        assert bool(((y - whole[:, t : t + 1]).abs() <= allowed[:, t : t + 1]).all())


def test_the_history_does_not_keep_the_sequence_alive() -> None:
    _, history = ShortConvolution(3, width=4)(torch.randn(1, 100, 3), None)
    assert history.untyped_storage().nbytes() == history.nbytes


def test_filters_take_no_weight_decay_also_after_a_build_on_meta() -> None:
    with torch.device("meta"):
        module = ShortConvolution(3, width=4)
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert module.weight.no_weight_decay

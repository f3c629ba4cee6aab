"""Pads anywhere, and documents packed into one row: each sequence comes out as if it were alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from statemix.blocks import CausalLM

TOLERANCE = 1e-11  # float64 sums of a few hundred terms of size one, in another order
Make = Callable[..., CausalLM]

MASKS = {
    "left_alone": ["0001111111"],
    "right_alone": ["1111111000"],
    "no_pads": ["1111111111", "1111111111"],
    "mixed": ["0001111111", "1111110000", "0110000000"],
    "shorter_than_the_convolution": ["0000000001", "1100000000", "0001110000"],
    "one_row_without_tokens": ["1111100000", "0000000000", "0000000111"],
    "holes": ["1011001110", "0111111111"],
}


def mask_of(name: str) -> Tensor:
    return torch.tensor([[place == "1" for place in row] for row in MASKS[name]])


@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_padded_rows_equal_unpadded_prompts_now_and_later(make_lively_model: Make, name: str) -> None:
    """Prefill under a mask, three plain tokens, then tokens under another mask: all against each row alone."""
    model, mask = make_lively_model(), mask_of(name)
    batch = len(mask)
    tokens, follow, last = (torch.randint(23, (batch, size)) for size in (10, 3, 10))
    later = mask.flip(1)
    first, state = model(tokens, mask=mask)
    second, state = model(follow, state)
    third, state = model(last, state, mask=later)
    fourth, _ = model(follow[:, :1], state)

    for row in range(batch):
        prompt, rest = tokens[row][mask[row]], last[row][later[row]]
        alone = model(torch.cat([prompt, follow[row], rest, follow[row, :1]])[None])[0][0]
        got = [first[row][mask[row]], second[row], third[row][later[row]], fourth[row]]
        torch.testing.assert_close(torch.cat(got), alone, rtol=0, atol=TOLERANCE)
        assert not first[row][~mask[row]].any() and not third[row][~later[row]].any()


@torch.no_grad()
def test_what_stands_at_a_pad_is_never_read(make_lively_model: Make) -> None:
    model, mask = make_lively_model(), mask_of("mixed")
    tokens = torch.randint(23, mask.shape)
    nonsense = torch.where(mask, tokens, -100)
    assert torch.equal(model(tokens, mask=mask)[0], model(nonsense, mask=mask)[0])  # bits: one call made twice


def test_pads_and_rows_without_tokens_train_without_a_trace(make_lively_model: Make) -> None:
    """Gradients of a padded batch are the sum of those of its rows, and finite."""
    model, mask = make_lively_model(), mask_of("one_row_without_tokens")
    tokens, weight = torch.randint(23, mask.shape), torch.randn(*mask.shape, 23, dtype=torch.float64)
    (model(tokens, mask=mask)[0] * weight).sum().backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for row in (0, 2):
        logits, _ = model(tokens[row][mask[row]][None])
        (logits[0] * weight[row][mask[row]]).sum().backward()
    for one, parameter in zip(got, model.parameters(), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, parameter.grad, rtol=1e-9, atol=1e-10)


def test_a_batch_of_pads_alone_gives_zeros(make_lively_model: Make) -> None:
    model = make_lively_model()
    tokens = torch.randint(23, (2, 4))
    logits, state = model(tokens, mask=torch.zeros(2, 4, dtype=torch.bool))
    assert torch.equal(logits, torch.zeros(2, 4, 23, dtype=torch.float64))
    logits.sum().backward()
    torch.testing.assert_close(model(tokens, state)[0], model(tokens)[0], rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_scores_depend_neither_on_the_batch_nor_on_its_padding(make_lively_model: Make) -> None:
    model = make_lively_model()
    prompts = [torch.randint(23, (length,)) for length in (1, 3, 17, 29, 40)]

    def score(logits: Tensor, prompt: Tensor) -> Tensor:
        return -F.cross_entropy(logits[:-1], prompt[1:], reduction="sum")

    alone = [score(model(prompt[None])[0][0], prompt) for prompt in prompts]
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        rows = [F.pad(prompts[n], (40 - len(prompts[n]), 0), value=-1) for n in order]
        mask = torch.stack(rows) >= 0
        logits, _ = model(torch.stack(rows).clamp(min=0), mask=mask)
        for row, n in enumerate(order):
            torch.testing.assert_close(score(logits[row][mask[row]], prompts[n]), alone[n], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("stack", ["hybrid", "only_state", "only_attention"])
def test_packed_documents_equal_separate_ones(make_lively_model: Make, stack: str) -> None:
    """Logits, every parameter's gradient, and the tokens that follow; rows after the last document give zeros."""
    model, lengths, tail = make_lively_model(stack), [37, 1, 0, 51, 2], 5
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    tokens = torch.randint(23, (1, offsets[-1] + tail))
    weight = torch.randn(1, tokens.shape[1], 23, dtype=torch.float64)
    logits, state = model(tokens, cu_seqlens=cu_seqlens)
    assert torch.equal(logits[:, offsets[-1] :], torch.zeros(1, tail, 23, dtype=torch.float64))
    got = torch.autograd.grad((logits * weight).sum(), list(model.parameters()))

    loss, follow = torch.zeros((), dtype=torch.float64), torch.randint(23, (1, 3))
    for n, (start, stop) in enumerate(zip(offsets, offsets[1:], strict=False)):
        own = None
        if start < stop:
            alone, own = model(tokens[:, start:stop])
            torch.testing.assert_close(logits[:, start:stop], alone, rtol=0, atol=TOLERANCE)
            loss = loss + (alone * weight[:, start:stop]).sum()
        with torch.no_grad():
            later = model(follow, state.select([n]))[0], model(follow, own)[0]
        torch.testing.assert_close(*later, rtol=0, atol=TOLERANCE)
    for one, other in zip(got, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_a_mask_beside_cu_seqlens_must_not_contradict_it(make_lively_model: Make) -> None:
    model, tokens = make_lively_model(), torch.randint(23, (1, 9))
    cu_seqlens, mask = torch.tensor([0, 4, 9], dtype=torch.int32), torch.ones(1, 9, dtype=torch.bool)
    expected = model(tokens, cu_seqlens=cu_seqlens)[0]
    assert torch.equal(model(tokens, mask=mask, cu_seqlens=cu_seqlens)[0], expected)
    mask[0, 2] = False
    with pytest.raises(ValueError, match="mask: expected None or all True beside cu_seqlens, got 1 pads"):
        model(tokens, mask=mask, cu_seqlens=cu_seqlens)


def test_masks_and_offsets_of_a_wrong_form_are_refused(make_lively_model: Make) -> None:
    model, tokens = make_lively_model(), torch.randint(23, (2, 9))
    with pytest.raises(ValueError, match=r"mask: expected bool \[2, 9\]"):
        model(tokens, mask=torch.ones(2, 9))
    with pytest.raises(ValueError, match=r"mask: expected bool \[2, 9\]"):
        model(tokens, mask=torch.ones(2, 12, dtype=torch.bool))
    with pytest.raises(ValueError, match="cu_seqlens: expected a batch of 1"):
        model(tokens, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32))

"""The loss is a mean over labelled positions, however a step is cut into micro-batches."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from statemix.tasks import IGNORE, Batch
from statemix.training.objective import accumulate_gradients, autocast, evaluate

VOCAB = 11


class Bigram(nn.Module):
    """Logits of the next token from the token alone, in float64 so that sums in another order agree."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, VOCAB, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.table(tokens), None


def gradients(model: nn.Module, batches: list[Batch]) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = accumulate_gradients(model, batches)
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return loss, gradient.clone()


def uneven_batch() -> Batch:
    """Four rows with 7, 1, 0 and 3 labels."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (4, 7), generator=generator)
    labels = torch.randint(VOCAB, (4, 7), generator=generator)
    for row, count in enumerate((7, 1, 0, 3)):
        labels[row, count:] = IGNORE
    return Batch(tokens, labels)


def test_four_micro_batches_of_one_are_one_batch_of_four() -> None:
    model, batch = Bigram(), uneven_batch()
    loss, gradient = gradients(model, [batch])
    split_loss, split_gradient = gradients(model, batch.split(1))
    # cross_entropy runs in float32: one rounding of 2^-24 for each of 11 terms.
    assert torch.allclose(split_loss, loss, rtol=1e-6)
    assert torch.allclose(split_gradient, gradient, rtol=1e-6, atol=1e-8)


def test_the_loss_is_the_mean_over_labelled_positions() -> None:
    model, batch = Bigram(), uneven_batch()
    loss, _ = gradients(model, batch.split(3))
    log_p = model.table(batch.tokens).log_softmax(-1)
    asked = batch.labels != IGNORE
    expected = -log_p[asked].gather(1, batch.labels[asked][:, None]).mean()
    assert torch.allclose(loss.double(), expected, rtol=1e-6)
    assert batch.num_valid() == 11


def test_positions_without_a_label_have_no_gradient() -> None:
    model = Bigram()
    tokens = torch.tensor([[1, 2, 3]])
    _, gradient = gradients(model, [Batch(tokens, torch.tensor([[4, IGNORE, 5]]))])
    assert bool((gradient[2] == 0).all())
    assert bool((gradient[[1, 3]] != 0).any())


def test_products_are_bfloat16_on_a_gpu_and_float32_on_a_cpu() -> None:
    with autocast(torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")
    with warnings.catch_warnings(action="ignore"):  # where there is no GPU
        assert autocast(torch.device("cuda")).fast_dtype == torch.bfloat16  # type: ignore[attr-defined]


def test_nothing_to_score_is_refused_by_name() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    for batches in ([], [Batch(tokens, torch.full_like(tokens, IGNORE))]):
        with pytest.raises(ValueError, match="expected held-out batches with a label"):
            evaluate(Bigram(), batches, device=torch.device("cpu"))

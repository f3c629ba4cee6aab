"""A run that leaves the finite numbers stops, names the step and the layer, and keeps its checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from statemix.recipes import Recipe, build
from statemix.tasks import Batch
from statemix.training import NonFiniteError, load_model, train
from statemix.training.nonfinite import first_nonfinite_layer
from statemix.training.objective import accumulate_gradients
from statemix.training.trainer import Trainer

MakeRecipe = Callable[..., Recipe]


def batches() -> list[Batch]:
    tokens = torch.arange(12).reshape(2, 6)
    return Batch(tokens, tokens + 1).split(1)


@pytest.mark.parametrize("name", ["embedding.weight", "blocks.0.mixer.key.weight", "blocks.1.mlp", "norm.weight"])
def test_a_broken_parameter_is_named(name: str, make_recipe: MakeRecipe) -> None:
    model = build(make_recipe())
    broken = next(full for full, _ in model.named_parameters() if full.startswith(name))
    with torch.no_grad():
        model.get_parameter(broken).view(-1)[3] = float("nan")
    assert first_nonfinite_layer(model, batches()) == f"{broken} (parameter)"


def test_the_first_layer_to_overflow_is_named_not_the_loss_behind_it(make_recipe: MakeRecipe) -> None:
    model = build(make_recipe())
    with torch.no_grad():
        model.blocks[1].mixer.value.weight.fill_(1e30)
        model.blocks[1].mixer.output.weight.fill_(1e30)
    name = first_nonfinite_layer(model, batches())
    assert name == "blocks.1.mixer.output (output)"


def test_only_a_gradient_that_is_not_finite_is_named() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(8))

        def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
            return self.scale.abs().sqrt().expand(*tokens.shape, 8), None

    model, data = Root(), [Batch(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))]
    assert accumulate_gradients(model, data).isfinite()
    assert first_nonfinite_layer(model, data) == "scale (gradient)"


def test_looking_for_the_layer_leaves_no_hooks(make_recipe: MakeRecipe) -> None:
    model = build(make_recipe())
    first_nonfinite_layer(model, batches())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_loss_that_explodes_stops_the_run_and_the_last_good_checkpoint_stays(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Trainer.advance

    def sabotaged(self: Trainer) -> object:
        if self.step == 4:
            with torch.no_grad():
                self.model.blocks[1].mixer.query.weight[0, 0] = float("inf")
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", sabotaged)
    recipe = make_recipe("training.checkpoint_every=3")
    with pytest.raises(NonFiniteError, match=r"step 5: loss is nan; first .*blocks\.1\.mixer\.query\.weight") as error:
        train(recipe, tmp_path / "run", progress=False, device="cpu")
    assert "step 3, stays in" in str(error.value)
    assert all(parameter.isfinite().all() for parameter in load_model(tmp_path / "run").parameters())
    monkeypatch.undo()
    assert train(recipe, tmp_path / "run", resume=True, progress=False, device="cpu").steps == 6


def test_one_bad_gradient_is_named_although_the_norm_of_all_is_bad(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Trainer.advance

    def sabotaged(self: Trainer) -> object:
        if self.step == 1:
            weight = self.model.get_parameter("blocks.0.mixer.key.weight")
            weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), float("inf")))
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", sabotaged)
    message = r"step 2: gradient norm is inf; first non-finite value in blocks\.0\.mixer\.key\.weight \(gradient\)"
    with pytest.raises(NonFiniteError, match=message):
        train(make_recipe(), tmp_path / "run", progress=False, device="cpu")


def test_broken_parameters_never_replace_a_good_checkpoint(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Trainer.advance

    def sabotaged(self: Trainer) -> object:
        record = advance(self)
        with torch.no_grad():
            self.model.norm.weight[0] = float("nan")
        return record

    monkeypatch.setattr(Trainer, "advance", sabotaged)
    with pytest.raises(NonFiniteError, match=r"step 1: the update left a non-finite value in norm\.weight"):
        train(make_recipe("training.checkpoint_every=1"), tmp_path / "run", progress=False, device="cpu")
    assert all(parameter.isfinite().all() for parameter in load_model(tmp_path / "run").parameters())

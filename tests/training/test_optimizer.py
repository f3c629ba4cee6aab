"""Parameter groups and the learning rate."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from statemix.recipes import Recipe, TrainingConfig, build
from statemix.training.optimizer import build_optimizer, decayed, learning_rate

MakeRecipe = Callable[..., Recipe]

ALIASES = ["linear_attention", "retnet", "mamba2", "gla", "deltanet", "gated_deltanet", "kda", "gated_deltaproduct"]
DECAYED = ("query.weight", "key.weight", "value.weight", "output.weight", "gate.weight", "head.weight")


@pytest.mark.parametrize("alias", ALIASES)
def test_only_projections_take_weight_decay(alias: str, make_recipe: MakeRecipe) -> None:
    model = build(make_recipe(f"layers.delta.mixer.transition={alias}", "layers.delta.mixer.output_gate=silu"))
    takes = decayed(model)
    for name, decays in takes.items():
        is_projection = name.endswith(DECAYED) and ".transition." not in name or ".mlp." in name
        assert decays is is_projection, name
    assert sum(takes.values()) > 8


def test_every_parameter_is_in_exactly_one_group(make_recipe: MakeRecipe) -> None:
    for tied in ("true", "false"):
        recipe = make_recipe(f"model.tie_embeddings={tied}", "training.weight_decay=0.25")
        model = build(recipe)
        groups = build_optimizer(model, recipe.training).param_groups
        grouped = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
        assert [group["weight_decay"] for group in groups] == [0.25, 0.0]


def test_a_marked_matrix_takes_no_decay() -> None:
    model = nn.Linear(3, 3)
    assert decayed(model) == {"weight": True, "bias": False}
    model.weight.no_weight_decay = True  # type: ignore[assignment]
    assert decayed(model) == {"weight": False, "bias": False}


def test_a_step_with_zero_gradients_shrinks_decayed_parameters_alone() -> None:
    training = TrainingConfig(lr=0.1, weight_decay=0.5)
    model = nn.Linear(3, 3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model, training).step()
    assert torch.allclose(model.weight, before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias, before["bias"])


def test_the_learning_rate_rises_to_its_peak_then_falls_to_the_ratio() -> None:
    training = TrainingConfig(lr=0.5, warmup_steps=5, steps=25, min_lr_ratio=0.1)
    rates = [learning_rate(step, training) for step in range(1, 26)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert rates[14] == pytest.approx(0.5 * 0.55)  # half way down the cosine
    assert rates[24] == pytest.approx(0.05)
    assert all(later < earlier for earlier, later in zip(rates[4:], rates[5:], strict=False))


def test_a_run_without_warm_up_starts_near_its_peak() -> None:
    training = TrainingConfig(lr=0.5, warmup_steps=0, steps=1000)
    assert learning_rate(1, training) == pytest.approx(0.5, rel=1e-4)


def test_a_run_of_warm_up_alone_ends_at_its_peak() -> None:
    assert learning_rate(4, TrainingConfig(lr=0.5, warmup_steps=4, steps=4)) == 0.5

"""A profile names the costly operators by layer, and its trace opens in TensorBoard's PyTorch tab."""

from pathlib import Path

import pytest

from statemix.recipes import load
from statemix.training.profile import Profile, layers_of, profile_training

TOY = ["training.batch_size=1", "training.seq_len=64", "training.steps=20", "model.hidden_size=32"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profile_training(load("quickstart", TOY), tmp_path_factory.mktemp("profile"), steps=2, device="cpu")


def test_every_layer_costs_time_in_both_passes(profiled: Profile) -> None:
    forward = {cost.layer for cost in profiled.costs if not cost.is_backward}
    backward = {cost.layer for cost in profiled.costs if cost.is_backward}
    mixers = {f"blocks.{i}.mixer" for i in range(4)}
    assert mixers | {"embedding", "norm"} <= forward and mixers <= backward


def test_a_matrix_product_of_the_backward_pass_belongs_to_the_layer_of_its_forward(profiled: Profile) -> None:
    """Three products in a SwiGLU forward, six in its backward pass."""
    calls = {
        cost.is_backward: cost.calls
        for cost in profiled.costs
        if cost.layer == "blocks.0.mlp" and cost.operator == "aten::mm"
    }
    assert calls == {False: 3, True: 6}


def test_the_table_starts_with_the_dearest_and_says_where_the_trace_is(profiled: Profile) -> None:
    costs = [cost.milliseconds for cost in profiled.costs]
    assert costs == sorted(costs, reverse=True) and sum(costs) == pytest.approx(profiled.milliseconds)
    lines = profiled.table(3).splitlines()
    assert lines[1].startswith(profiled.costs[0].layer) and str(profiled.folder) in lines[-1]


def test_the_trace_opens_with_the_plugin_of_tensorboard(profiled: Profile) -> None:
    from torch_tb_profiler import io
    from torch_tb_profiler.profiler import RunLoader

    run = RunLoader("run", str(profiled.folder), io.Cache()).load()
    (opened,) = run.profiles.values()
    assert {"Overview", "Operator", "Trace"} <= {view.display_name for view in opened.views}
    rows = opened.operation_table_by_name["data"]
    assert "aten::mm" in {row["name"] for row in rows}


def test_a_bad_number_of_steps_or_a_used_folder_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        profile_training(load("quickstart", TOY), tmp_path / "new", steps=0)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="out: expected a new or empty folder"):
        profile_training(load("quickstart", TOY), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_parts_of_a_model_do_not_overlap() -> None:
    from statemix.recipes import build

    names = list(layers_of(build(load("deltanet-window", ["model.hidden_size=96"]))))
    assert not any(a != b and b.startswith(f"{a}.") for a in names for b in names)

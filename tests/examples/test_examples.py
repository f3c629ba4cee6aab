"""Every recurrence of examples/: short, written with the public API alone, right, and trained inside a recipe."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from statemix.harness import Report
from statemix.harness.user_file import check_file, load_transition
from statemix.recipes import build, load
from statemix.training import load_model, train
from statemix.transitions.modules.fields_module import recipe_name

FOLDER = Path(__file__).resolve().parents[2] / "examples"
CLASSES = {
    "longhorn": "Longhorn",
    "rwkv7": "RWKV7",
    "comba": "Comba",
    "gdn2": "GDN2",
    "mlstm": "MLSTM",
    "rotation": "Rotation",
    "dense": "Dense",
}
NOT_LOWERED = ("rotation", "dense")

# One of each kind: M_t itself, every form with every gradient, decoding, documents, the future, the program.
CHOSEN = [
    "lower_is_apply",
    "apply_is_materialize",
    "spectrum_is_declared",
    "forms_equal_the_definition",
    "steps_equal_the_whole",
    "packed_equals_separate",
    "future_does_not_leak",
    "gradcheck_passes",
]

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"vocab_size": 256, "hidden_size": 16},
    "layers": {"new": {"mixer": {"type": "state", "num_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 4}}},
    "stack": ["new"],
    "training": {"seq_len": 17, "batch_size": 2, "steps": 2, "lr": 0.01, "log_every": 1, "eval_batches": 1},
}


def target(name: str) -> str:
    return f"{FOLDER / name}.py:{CLASSES[name]}"


def check(name: str, **options: Any) -> Report:
    return check_file(target(name), **options)


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statemix.tasks.token_stream.NEW_TOKENS", 3)


def test_every_example_is_listed() -> None:
    assert sorted(CLASSES) == sorted(file.stem for file in FOLDER.glob("*.py") if not file.stem[0].isdigit())


@pytest.mark.parametrize("name", CLASSES)
def test_an_example_is_short_and_says_its_equation_and_source(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) < 60
    assert "S_t = " in doc and re.search(r"arXiv:\d{4}\.\d{5}", doc)


@pytest.mark.parametrize("name", CLASSES)
def test_an_example_uses_public_names_only(name: str) -> None:
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("statemix"):
            module = __import__(node.module, fromlist=["__all__"])  # type: ignore[arg-type]
            assert {alias.name for alias in node.names} <= set(module.__all__)
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr == "__init__"


@pytest.mark.parametrize("name", CLASSES)
def test_an_example_passes_chosen_checks(name: str) -> None:
    report = check(name, only=CHOSEN, seq_len=19)
    assert report.ok, f"\n{report}"
    assert ("lower_is_apply" in {result.check for result in report.results}) != (name in NOT_LOWERED)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_an_example_passes_every_check(name: str) -> None:
    report = check(name, include_slow=True)
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize("name", CLASSES)
def test_an_example_trains_in_a_recipe_whose_run_folder_rebuilds_it(name: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(5):
        (text / f"{number}.txt").write_text(f"file {number} holds a few words of its own\n" * 4)
    transition = f"layers.new.mixer.transition={recipe_name(load_transition(target(name)))}"
    task = f"training.task={{type: text, folder: '{text}'}}"
    recipe = load(TINY, [transition, task], plugins=[FOLDER / f"{name}.py"])
    result = train(recipe, tmp_path / "run", device="cpu", progress=False)
    assert result.steps == 2 and torch.tensor(result.heldout_loss).isfinite()
    model = load_model(tmp_path / "run")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        whole, _ = model(tokens)
        first, state = model(tokens[:, :5])
        second, _ = model(tokens[:, 5:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0, atol=1e-5)  # float32, other sums


def learns(name: str, spec: Any) -> None:
    mixer = TINY["layers"]["new"]["mixer"] | {"transition": spec}
    model = build(load({**TINY, "layers": {"new": {"mixer": mixer}}}, plugins=[FOLDER / f"{name}.py"]))
    model(torch.arange(12)[None])[0].square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all())


@pytest.mark.parametrize("name", CLASSES)
def test_an_example_learns_as_a_factor(name: str) -> None:
    learns(name, [recipe_name(load_transition(target(name))), "householder"])


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "mlstm"])  # its module makes whole heads only
def test_an_example_learns_in_blocks(name: str) -> None:
    own = recipe_name(load_transition(target(name)))
    learns(name, {"type": "block_diagonal", "inner": own})

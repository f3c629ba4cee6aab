"""A registry: what it takes, what it refuses, and what a field that is annotated with it reads and writes."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ValidationError

from statemix.plugins import PartConfig, Registry


def part(name: str, module: str = __name__, **options: Any) -> type:
    """A class with a Config of that type."""
    annotations = {"type": Literal[name]} | {key: type(value) for key, value in options.items()}
    config = type("Config", (PartConfig,), {"__annotations__": annotations, "type": name, **options})
    return type(name.title(), (), {"__module__": module, "Config": config})


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Registry[Any]:
    """Round without options, and box with a width."""
    monkeypatch.setattr(Registry, "every", list(Registry.every))
    registry: Registry[Any] = Registry("shape", aliases=("oval",), default="box", takes_name=True)
    registry.register(part("round"))
    registry.register(part("box", width=2))
    return registry


def field_of(registry: Registry[Any]) -> type[BaseModel]:
    class Model(BaseModel):
        shape: Annotated[PartConfig, registry]

    return Model


def test_a_field_takes_a_name_a_mapping_or_a_config_and_builds_its_class(shapes: Registry[Any]) -> None:
    model = field_of(shapes)
    for value in ({"type": "box", "width": 3}, {"width": 3}, shapes.get("box").Config(width=3)):  # type: ignore[union-attr]
        config = model(shape=value).shape  # type: ignore[attr-defined]
        assert config.width == 3 and shapes.class_of(config) is shapes.get("box")
    assert model(shape="round").model_dump() == {"shape": "round"}
    assert model(shape="box").model_dump() == {"shape": {"type": "box", "width": 2}}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("rond", "unknown_part"),
        ("oval", "unknown_part"),
        ({"width": "3"}, "int_type"),
        ({"widht": 3}, "extra_forbidden"),
    ],
)
def test_what_a_field_refuses_is_told_by_the_kind_of_the_error(shapes: Registry[Any], value: Any, kind: str) -> None:
    with pytest.raises(ValidationError) as caught:
        field_of(shapes)(shape=value)
    assert [error["type"] for error in caught.value.errors()] == [kind]


def test_a_name_belongs_to_the_module_that_took_it(shapes: Registry[Any]) -> None:
    old = shapes.get("round").Config()  # type: ignore[union-attr]
    newer = shapes.register(part("round"))
    assert shapes.get("round") is newer and shapes.class_of(old) is not newer
    with pytest.raises(ValueError, match=r"Round: expected a new name, got 'round', that of Round of .*; rename"):
        shapes.register(part("round", module="elsewhere"))
    with pytest.raises(ValueError, match="'oval', that of an alias"):
        shapes.register(part("oval"))


def test_a_class_without_a_named_config_is_refused(shapes: Registry[Any]) -> None:
    for cls in (
        type("Bare", (), {}),
        type("Bare", (), {"Config": PartConfig}),
        type("Bare", (), {"Config": BaseModel}),
    ):
        with pytest.raises(ValueError, match=r"Bare: expected a nested class Config\(PartConfig\) with type"):
            shapes.register(cls)

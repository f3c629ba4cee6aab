"""What a recipe may write for a mixer."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from statemix.mixers import Attention, MixerSpec, StateMixer, build_mixer

STATE: dict[str, Any] = {"type": "state", "num_heads": 2, "key_dim": 4, "value_dim": 6, "transition": "kda"}
SPEC: TypeAdapter[Any] = TypeAdapter(MixerSpec)


def test_the_type_decides_what_is_built() -> None:
    assert isinstance(build_mixer(SPEC.validate_python(STATE), hidden_size=12), StateMixer)
    attention = SPEC.validate_python({"type": "attention", "num_heads": 3})
    assert isinstance(build_mixer(attention, hidden_size=12), Attention)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"window": 4}, ("window",)),
        ({"conv_sise": 4}, ("conv_sise",)),
        ({"chunk_size": 48}, ("chunk_size",)),
        ({"key_dim": 0}, ("key_dim",)),
        ({"type": "attention"}, ("key_dim",)),
        ({"type": "attn"}, ()),
        ({"transition": "deltanett"}, ("transition",)),
    ],
)
def test_a_wrong_option_is_an_error_at_its_place(change: dict[str, Any], place: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        SPEC.validate_python(STATE | change)
    assert any(error["loc"][: len(place)] == place for error in caught.value.errors())


def test_a_mixer_without_a_type_is_refused() -> None:
    with pytest.raises(ValidationError, match="type"):
        SPEC.validate_python({key: value for key, value in STATE.items() if key != "type"})


def test_a_config_survives_being_written_and_read() -> None:
    for options in (STATE, {"type": "attention", "num_heads": 3, "window": 5}):
        config = SPEC.validate_python(options)
        assert SPEC.validate_python(config.model_dump()) == config

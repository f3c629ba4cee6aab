"""The module made of a transition's annotations: shapes and ranges by kind, names, what it refuses."""

from typing import Annotated, Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from statemix import scan
from statemix.transitions import (
    Constant,
    HeadSizes,
    Key,
    KeyLogDecay,
    KeyRate,
    Kind,
    LogDecay,
    Rate,
    Rate2,
    Transition,
    TransitionModule,
    TransitionSpec,
    UnitKey,
    build_transition,
    register_transition,
)
from statemix.transitions.modules.fields_module import fields_module, recipe_name

BATCH, SEQ_LEN = 2, 5
SIZES = HeadSizes(hidden_size=20, num_heads=2, num_value_heads=4, key_dim=6)
BLOCKS = HeadSizes(hidden_size=20, num_heads=2, num_value_heads=4, key_dim=6, blocks=3)

Angle = Annotated[Tensor, Kind("Angle")]


class Everything(Transition):
    """A field of every kind.

    More about it.
    """

    log_decay: LogDecay
    key_log_decay: KeyLogDecay
    rate: Rate
    rate2: Rate2
    key_rate: KeyRate
    key: UnitKey
    direction: UnitKey
    vector: Key
    angle: Angle
    constant: Constant
    sharpness: float = 0.5

    @property
    def natural_write(self) -> Tensor:
        return self.rate

    def apply(self, state: Tensor) -> Tensor:
        scalar = (self.log_decay + self.constant).exp() * self.rate * self.rate2 * self.angle.cos() * self.sharpness
        channel = self.key_log_decay.exp() * self.key_rate * torch.tanh(self.key * self.direction * self.vector)
        return scalar[..., None, None] * channel[..., None, :] * state


class Small(Transition):
    gate: LogDecay

    def apply(self, state: Tensor) -> Tensor:
        return self.gate.exp()[..., None, None] * state


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)


def module_of(cls: type[Transition], sizes: HeadSizes = SIZES) -> TransitionModule:
    module = fields_module(cls)
    return module(module.Config(), sizes)


def inputs(sizes: HeadSizes = SIZES) -> tuple[Tensor, Tensor]:
    """Hidden states far from zero, and keys of unit length in each block."""
    key = torch.randn(BATCH, SEQ_LEN, sizes.num_heads, sizes.blocks, sizes.key_dim // sizes.blocks)
    key = (key / key.norm(dim=-1, keepdim=True)).flatten(-2)
    return 10 * torch.randn(BATCH, SEQ_LEN, sizes.hidden_size), key


@pytest.mark.parametrize("sizes", [SIZES, BLOCKS], ids=["whole", "blocks"])
def test_every_field_has_the_shape_and_the_range_of_its_kind(sizes: HeadSizes) -> None:
    transition, _ = module_of(Everything, sizes)(*inputs(sizes))
    for name, x, kind in transition.tensors():
        shape = kind.shape(BATCH, SEQ_LEN, sizes.num_heads, sizes.num_value_heads, sizes.key_dim)
        has_tail = sizes.blocks > 1 and kind.is_per_token and not kind.has_channels
        assert x.shape == ((*shape, sizes.blocks) if has_tail else shape), name
        assert kind.low <= x.min() and x.max() <= kind.high, name
        if kind.is_unit:
            lengths = x.unflatten(-1, (sizes.blocks, -1)).norm(dim=-1)
            torch.testing.assert_close(lengths, torch.ones_like(lengths), atol=1e-3, rtol=0)  # 1e-6 under the root


def test_the_key_is_the_write_key_itself_and_the_write_is_the_natural_one() -> None:
    module = module_of(Everything)
    hidden, key = inputs()
    transition, write = module(hidden, key)
    assert transition.key is key and write is transition.rate
    assert module.needs_unit_keys and module.num_writes == 1
    assert not module_of(Small).needs_unit_keys and module_of(Small)(hidden, key)[1] is None


def test_it_runs_in_a_scan_and_gradients_reach_every_parameter() -> None:
    module = module_of(Everything)
    hidden, key = torch.randn(BATCH, SEQ_LEN, 20), inputs()[1]
    transition, write = module(hidden, key)
    scan(key, key, torch.randn(BATCH, SEQ_LEN, 4, 3), transition, write=write).output.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and bool((parameter.grad != 0).any()), name


def test_gates_are_float32_under_autocast() -> None:
    module, (hidden, key) = module_of(Everything), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        transition, _ = module(hidden, key.bfloat16())
    assert transition.vector.dtype == transition.direction.dtype == torch.bfloat16
    assert transition.log_decay.dtype == transition.rate.dtype == transition.key_rate.dtype == torch.float32


@pytest.mark.parametrize("sizes", [SIZES, BLOCKS], ids=["whole", "blocks"])
def test_a_module_made_without_memory_and_drawn_later_is_the_same(sizes: HeadSizes) -> None:
    module = fields_module(Everything)
    direct = module(module.Config(), sizes)
    with torch.device("meta"):
        late: nn.Module = module(module.Config(), sizes)
    late.to_empty(device="cpu")
    for tensor in late.state_dict().values():
        tensor.fill_(torch.nan)
    torch.manual_seed(3)
    direct.reset_parameters()
    torch.manual_seed(3)
    late.reset_parameters()  # type: ignore[operator]
    for name, x in direct.state_dict().items():
        assert torch.equal(late.state_dict()[name], x), name
    assert getattr(late.make_log_decay.decay.A_log, "no_weight_decay", False)  # type: ignore[union-attr]


def test_the_formula_is_the_first_line_of_the_docstring_or_the_name() -> None:
    assert module_of(Everything).formula == "A field of every kind"
    assert module_of(Small).formula == "Small"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("MyTransition", "my_transition"), ("RWKV7", "rwkv7"), ("GDN2Erase", "gdn2_erase"), ("KDAGate", "kda_gate")],
)
def test_recipes_name_a_class_in_snake_case(name: str, expected: str) -> None:
    assert recipe_name(type(name, (), {})) == expected


def validate(spec: Any) -> Any:
    return TypeAdapter(TransitionSpec).validate_python(spec)


def test_a_registered_class_is_named_alone_in_products_and_in_blocks() -> None:
    assert register_transition(Small) is Small
    in_blocks = {"type": "block_diagonal", "blocks": 3, "inner": "small"}
    for spec, sizes in (("small", SIZES), (["small", "householder"], SIZES), (in_blocks, BLOCKS)):
        hidden, key = inputs(sizes)
        transition, write = build_transition(validate(spec), SIZES)(hidden, key)
        assert scan(key, key, torch.randn(BATCH, SEQ_LEN, 4, 3), transition, write=write).output.isfinite().all()
    with pytest.raises(ValidationError, match="rank"):
        validate({"type": "small", "rank": 3})


def test_a_class_defined_again_takes_over_and_the_older_config_keeps_its_class() -> None:
    def define(offset: float) -> type[Transition]:
        class Again(Transition):
            gate: LogDecay

            def apply(self, state: Tensor) -> Tensor:
                return offset * state

        return Again

    older, newer = define(1.0), define(2.0)
    register_transition(older)
    old_spec = validate("again")
    register_transition(older)
    register_transition(newer)
    for spec, cls in ((old_spec, older), (validate("again"), newer)):
        assert type(build_transition(spec, SIZES)(*inputs())[0]) is cls


def with_fields(name: str = "Refused", **annotations: Any) -> type[Transition]:
    body = {"__annotations__": annotations, "__module__": __name__, "apply": lambda self, state: state}
    return type(name, (Transition,), body)


@pytest.mark.parametrize(
    ("cls", "named"),
    [
        (with_fields("Householder"), ["householder", "HouseholderModule", "rename"]),
        (with_fields("Kda"), ["kda", "alias"]),
        (with_fields(rate=Tensor), ["Refused.rate", "kind", "LogDecay"]),
        (with_fields(key=Rate), ["Refused.key", "UnitKey", "Rate", "rename"]),
        (with_fields(rate=Annotated[Tensor, Kind("Positive", low=0.0)]), ["Refused.rate", "[0.0, inf]"]),
        (with_fields(rate=Annotated[Tensor, Kind("Offset", is_per_token=False)]), ["Refused.rate", "Offset"]),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(cls: type[Transition], named: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        register_transition(cls)
    for part in named:
        assert part in str(caught.value)


def test_a_class_without_apply_is_refused() -> None:
    class Nothing(Transition):
        gate: LogDecay

    with pytest.raises(ValueError, match=r"Nothing: expected a method apply\(self, state\)"):
        register_transition(Nothing)

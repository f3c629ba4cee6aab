"""Weights, dtypes and modes of the language model."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from statemix.blocks import Block, CausalLM, SwiGLU

Make = Callable[..., CausalLM]


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_tied_head_is_the_embedding_itself_and_is_counted_once(make_model: Make, is_tied: bool) -> None:
    model = make_model(tie_embeddings=is_tied)
    for one in (model, copy.deepcopy(model)):
        assert (one.head_weight is one.embedding.weight) is is_tied
        assert len(list(one.parameters())) == len(one.state_dict())
    inner = sum(parameter.numel() for parameter in [*model.blocks.parameters(), *model.norm.parameters()])
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == inner + 23 * 20 * (1 if is_tied else 2)


def test_a_tied_weight_gets_the_gradients_of_both_its_uses(make_lively_model: Make) -> None:
    tied, untied = make_lively_model(tie_embeddings=True), make_lively_model(tie_embeddings=False)
    weights = tied.state_dict()
    untied.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    tokens = torch.randint(23, (2, 9))
    weight = torch.randn(2, 9, 23, dtype=torch.float64)
    for model in (tied, untied):
        (model(tokens)[0] * weight).sum().backward()
    expected = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, expected, rtol=0, atol=1e-11)
    with pytest.raises(RuntimeError, match="head.weight"):
        tied.load_state_dict(untied.state_dict())


@pytest.mark.parametrize("is_tied", [False, True])
def test_building_on_meta_gives_the_weights_of_an_ordinary_build(make_model: Make, is_tied: bool) -> None:
    torch.manual_seed(3)
    expected = make_model(tie_embeddings=is_tied)
    with torch.device("meta"):
        model = make_model(tie_embeddings=is_tied)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(3)
    model.reset_parameters()
    assert (model.head_weight is model.embedding.weight) is is_tied
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    tokens = torch.randint(23, (1, 5))
    assert torch.equal(model(tokens)[0], expected(tokens)[0])


def test_parameters_that_take_no_weight_decay_say_so() -> None:
    """Those with two axes: training leaves vectors out by itself. The marks must outlive a build on meta."""
    mixer = {"type": "state", "num_heads": 2, "key_dim": 4, "value_dim": 4, "transition": "kda", "conv_size": 4}
    config = CausalLM.Config(vocab_size=5, hidden_size=8)
    model = CausalLM(config, [Block.Config.model_validate({"mixer": mixer})])
    marked = {name for name, p in model.named_parameters() if p.ndim > 1 and getattr(p, "no_weight_decay", False)}
    matrices = {name for name, p in model.named_parameters() if p.ndim > 1}
    assert {name.split(".")[-1] for name in marked} == {"A_log", "dt_bias"} | {"weight"}
    assert {name for name in marked if name.endswith("weight")} == {"blocks.0.mixer.convolution.weight"}
    assert all(name.endswith("weight") for name in matrices - marked)


def test_weights_start_with_the_declared_spread() -> None:
    config = CausalLM.Config(vocab_size=300, hidden_size=128, init_std=0.05)
    mixers = [
        {"type": "state", "num_heads": 2, "key_dim": 64, "value_dim": 64, "transition": "gla", "output_gate": "silu"},
        {"type": "attention", "num_heads": 2},
    ]
    model = CausalLM(config, [Block.Config.model_validate({"mixer": mixer, "mlp": {}}) for mixer in mixers])
    state, attention = model.blocks
    whole = [model.embedding, model.head]
    for mixer in (state.mixer, attention.mixer):
        whole += [mixer.query, mixer.key, mixer.value]
    whole += [state.mixer.gate, *(layer for block in model.blocks for layer in (block.mlp.gate, block.mlp.up))]
    adding = [state.mixer.output, attention.mixer.output, state.mlp.down, attention.mlp.down]
    for layers, std in ((whole, 0.05), (adding, 0.05 / 2)):
        for layer in layers:
            # The spread of n normal numbers is known to 1 / sqrt(2 n); n is 16384 or more, five of those are 3%.
            assert abs(layer.weight.std().item() / std - 1) < 0.03
            assert abs(layer.weight.mean().item()) < 5 * std / layer.weight.numel() ** 0.5


def test_parameters_are_as_many_as_the_recipe_says(make_model: Make) -> None:
    """only_attention by hand: 20 channels; 2 heads of 10, then 4 query and 2 key heads of 6; an MLP of width 17."""
    model = make_model("only_attention")
    norms, mlp = 2 * 20, 3 * 20 * 17
    window, grouped = 4 * 20 * 20, 2 * 20 * 24 + 2 * 20 * 12
    expected = 2 * 23 * 20 + 20 + 2 * (norms + mlp) + window + grouped
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("is_padded", [False, True])
def test_training_under_autocast_gives_float32_gradients_near_the_exact_ones(make_model: Make, is_padded: bool) -> None:
    """The backward pass runs outside the autocast block."""
    model = make_model()
    tokens, target = torch.randint(23, (2, 70)), torch.randint(23, (2 * 70,))
    mask = (torch.arange(70) < torch.tensor([[70], [41]])) if is_padded else None

    def gradients(dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(tokens, mask=mask)[0].flatten(0, 1).float(), target)
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    exact, rounded = gradients(None), gradients(torch.bfloat16)
    for name, gradient in rounded.items():
        assert gradient.dtype == torch.float32
        # bfloat16 keeps 8 bits, 0.4% a rounding; gradients have passed through some tens of them.
        assert (gradient - exact[name]).norm() <= 0.1 * exact[name].norm(), name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_runs_without_gradients_in_the_same_bits(make_model: Make, mode: Callable[[], object]) -> None:
    model, tokens = make_model(), torch.randint(23, (2, 13))
    expected = model(tokens)[0].detach()
    with mode():
        logits, state = model(tokens)
        model(tokens[:, :1], state)
    assert torch.equal(logits, expected)
    assert not logits.requires_grad


@pytest.mark.parametrize("name", ["embedding.weight", "blocks.0.mixer.convolution.bias", "blocks.3.mixer.key.weight"])
def test_only_what_asks_for_a_gradient_gets_one(make_model: Make, name: str) -> None:
    model = make_model()
    for other, parameter in model.named_parameters():
        parameter.requires_grad_(other == name)
    model(torch.randint(23, (1, 13)))[0].square().sum().backward()
    assert [n for n, parameter in model.named_parameters() if parameter.grad is not None] == [name]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputing_activations_changes_no_gradient(make_lively_model: Make, is_reentrant: bool) -> None:
    """Packed documents too: the offsets must reach the second run."""
    model, tokens = make_lively_model(), torch.randint(23, (1, 40))
    cu_seqlens = torch.tensor([0, 11, 40], dtype=torch.int32)
    hidden = model.embedding(tokens).detach().requires_grad_()

    def run(has_checkpoints: bool) -> list[torch.Tensor]:
        x = hidden
        for block in model.blocks:

            def layer(x: torch.Tensor, block: nn.Module = block) -> torch.Tensor:
                return block(x, cu_seqlens=cu_seqlens)[0]

            x = checkpoint(layer, x, use_reentrant=is_reentrant) if has_checkpoints else layer(x)
        leaves = [hidden, *model.blocks.parameters()]
        for leaf in leaves:
            leaf.grad = None
        x.square().sum().backward()
        return [leaf.grad for leaf in leaves]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


def test_the_width_of_the_mlp_comes_from_one_of_ratio_and_width() -> None:
    assert SwiGLU.Config(ratio=4).inner_size(384) == 1024
    assert SwiGLU.Config().inner_size(1024) == 2816  # 2730.7 rounded up to a multiple of 256
    assert SwiGLU.Config(width=100).inner_size(384) == 100
    with pytest.raises(ValueError, match="give one of the two"):
        SwiGLU.Config(width=100, ratio=2)
    for config in (SwiGLU.Config(), SwiGLU.Config(width=100)):
        assert SwiGLU.Config.model_validate(config.model_dump()) == config


def test_it_compiles_as_one_graph(make_model: Make) -> None:
    model, tokens = make_model("pair"), torch.randint(23, (2, 13))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected, state = model(tokens)
    torch.testing.assert_close(compiled(tokens)[0], expected)
    torch.testing.assert_close(compiled(tokens[:, :2], state)[0], model(tokens[:, :2], state)[0])

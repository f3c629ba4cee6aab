"""The rows that the kernels take say the same as the micro-steps that the chunk form takes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from statemix.kernels import MicroSteps, NormalForm, additive_rows, chunk_scan, merge_write

B, T, H, HV, K, V, BLOCKS = 2, 11, 2, 4, 6, 5, 3


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def decay(*shape: int) -> Tensor:
    return (-3 * torch.rand(shape, dtype=torch.float64)).requires_grad_()


DECAYS: dict[str, Callable[[], NormalForm]] = {
    "none": NormalForm,
    "fixed": lambda: NormalForm(decay(HV)),
    "fixed_shared_by_blocks": lambda: NormalForm(decay(HV, 1), blocks=BLOCKS),
    "fixed_per_block": lambda: NormalForm(decay(HV, BLOCKS), blocks=BLOCKS),
    "scalar": lambda: NormalForm(decay(B, T, HV)),
    "scalar_for_all_rows": lambda: NormalForm(decay(1, T, HV)),
    "scalar_shared_by_blocks": lambda: NormalForm(decay(B, T, HV, 1), blocks=BLOCKS),
    "scalar_per_block": lambda: NormalForm(decay(B, T, HV, BLOCKS), blocks=BLOCKS),
    "diagonal": lambda: NormalForm(decay(B, T, HV, K)),
    "diagonal_in_blocks": lambda: NormalForm(decay(B, T, HV, K), blocks=BLOCKS),
}
WRITES: dict[str, tuple[int, ...] | None] = {"one": None, "shared": (HV,), "per_block": (HV, BLOCKS)}
CASES = [(d, w) for d in DECAYS for w in WRITES if w != "per_block" or "block" in d]


def by_micro_steps(q: Tensor, k: Tensor, v: Tensor, form: NormalForm, write: Tensor | None, **options) -> list[Tensor]:
    return list(chunk_scan(q, merge_write(form, k, v, write), **options))


def by_rows(q: Tensor, k: Tensor, v: Tensor, form: NormalForm, write: Tensor | None, **options) -> list[Tensor]:
    rows = additive_rows(q, k, v, form, write=write, cu_seqlens=options["cu_seqlens"])
    assert rows.log_decay is None or list(rows.log_decay.shape) in ([HV], [*rows.v.shape[:3]], [*rows.v.shape[:3], K])
    steps = MicroSteps(rows.v.unsqueeze(2), None, rows.k.unsqueeze(2), rows.log_decay, False, 1)
    output, state = chunk_scan(rows.q, steps, **options | {"cu_seqlens": rows.cu_seqlens})
    return [rows.tokens(output), state]


@pytest.mark.parametrize("count", [(), (1,), (3,)], ids=["plain", "n1", "n3"])
@pytest.mark.parametrize(("decayed", "written"), CASES)
def test_rows_give_what_micro_steps_give_with_every_gradient(
    decayed: str, written: str, count: tuple[int, ...]
) -> None:
    form, tail = DECAYS[decayed](), WRITES[written]
    q, k, v = normal(B, T, H, K), normal(B, T, *count, H, K), normal(B, T, *count, HV, V)
    write, state = None if tail is None else normal(B, T, *count, *tail), normal(B, HV, V, K)
    options = {"initial_state": state, "scale": 0.3, "chunk_size": 16, "cu_seqlens": None}
    leaves = [x for x in (q, k, v, write, state, form.log_decay) if x is not None]
    wanted, got = (run(q, k, v, form, write, **options) for run in (by_micro_steps, by_rows))
    upstream = [torch.randn_like(x) for x in wanted]
    grads = [torch.autograd.grad(results, leaves, upstream) for results in (wanted, got)]
    # float64 sums in another order, over at most T n K terms of size 10: 1e-12 leaves four digits
    for x, y in zip([*wanted, *grads[0]], [*got, *grads[1]], strict=True):
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


def test_packed_documents_of_tokens_become_documents_of_rows() -> None:
    form = NormalForm(decay(1, T, HV, K))
    q, k, v = normal(1, T, H, K), normal(1, T, 3, H, K), normal(1, T, 3, HV, V)
    cu_seqlens = torch.tensor([0, 0, 4, 9], dtype=torch.int32)
    options = {"initial_state": normal(3, HV, V, K), "scale": 0.3, "chunk_size": 16, "cu_seqlens": cu_seqlens}
    for x, y in zip(*(run(q, k, v, form, None, **options) for run in (by_micro_steps, by_rows)), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


def test_one_write_of_weight_one_is_handed_on_without_a_copy() -> None:
    for count in ((), (1,)):
        q, k, v = normal(B, T, H, K), normal(B, T, *count, H, K), normal(B, T, *count, HV, V)
        for form in (NormalForm(decay(HV)), NormalForm(decay(B, T, HV)), NormalForm(decay(B, T, HV, K))):
            rows = additive_rows(q, k, v, form, write=None, cu_seqlens=None)
            for given, handed in ((q, rows.q), (k, rows.k), (v, rows.v), (form.log_decay, rows.log_decay)):
                assert handed.data_ptr() == given.data_ptr()


def test_low_precisions_stay_what_they_are_beside_float32_writes() -> None:
    q, k, v = (x.detach().bfloat16() for x in (normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)))
    for tail in ((HV,), (HV, BLOCKS)):
        rows = additive_rows(q, k, v, NormalForm(blocks=BLOCKS), write=torch.rand(B, T, *tail), cu_seqlens=None)
        assert rows.q.dtype == rows.k.dtype == rows.v.dtype == torch.bfloat16

"""Bring a kernel of your own for one recurrence: as a backend it is tried, timed and held to the harness.

    python examples/02_backend.py

The kernel here is a plain torch function, linear attention with a scalar gate as one masked product (Mamba-2's dual
form), O(T^2). Another library's kernel takes its place in ``forward``; a ``backward`` may follow where autograd cannot
go through it.
"""

import functools
import time

import torch
from torch import Tensor

from statemix import explain, scan
from statemix.harness import check_transition
from statemix.kernels import ScanOperands, register_backend
from statemix.transitions import ScalarGate


def obstacle(operands: ScanOperands) -> str | None:
    """What it cannot run, by shapes alone."""
    if operands.erases:
        return "it knows no erase pairs"
    if operands.log_decay is None or operands.log_decay.ndim != 3:
        return "it needs a scalar gate, [B, T, HV]"
    if operands.num_steps > 1 or operands.cu_seqlens is not None:
        return "it takes one write a token and no packed documents"
    return None


def forward(operands: ScanOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    """o_t = sum_s scale (q_t k_s) e^{g_s+1 + ... + g_t} v_s, and the same sum from the initial state."""
    heads, dtype = operands.v.shape[2], operands.state_dtype
    q, k, v, gate = (x.to(dtype).transpose(1, 2) for x in (operands.q, operands.b, operands.v, operands.log_decay))
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))  # [B, HV, T, K]
    later = torch.ones(*gate.shape[-1:] * 2, dtype=torch.bool, device=gate.device).tril(-1)
    between = torch.where(later, gate.unsqueeze(-1), 0.0).cumsum(-2).masked_fill(later.mT, -torch.inf).exp()
    since_start, until_end = gate.cumsum(-1).exp().unsqueeze(-1), between[..., -1, :, None]
    start = operands.start()
    output = scale * ((q @ k.mT * between) @ v + (q * since_start) @ start.mT)
    state = start * since_start[..., -1:, :] + v.mT @ (k * until_end)
    return output.transpose(1, 2).to(operands.q.dtype), state


def main() -> None:
    register_backend("masked_product", obstacle, forward)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, 4, 32) for _ in "qkv")
    gate = ScalarGate(-torch.rand(1, 256, 4))
    print(explain(q, k, v, gate, backend="masked_product"))
    for backend in ("torch", "masked_product"):
        start = time.perf_counter()
        scan(q, k, v, gate, form="chunk", backend=backend)
        print(f"{backend}: {1e3 * (time.perf_counter() - start):.2f} ms")
    checks = ("forms_equal_the_definition", "future_does_not_leak", "gradcheck_passes")
    print(
        check_transition(
            ScalarGate, scan=functools.partial(scan, backend="masked_product"), forms=("chunk",), only=checks
        )
    )


if __name__ == "__main__":
    main()

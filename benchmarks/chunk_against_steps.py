"""Forward and backward of the chunk form against the step loop, on the CPU.

Prints, for each kind of transition, the best of several runs of both forms and their ratio, at B1 T4096 H4 K=V=64
float32.
Wanted on two cores: 8x without decay or with scalar decay, 5x with diagonal decay.

    python benchmarks/chunk_against_steps.py [--seq-len 4096] [--threads 2]
"""

import argparse
import platform
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional as F

from statemix.transitions import (
    DiagonalGate,
    FixedDecay,
    Householder,
    Identity,
    Product,
    ScalarGate,
    Transition,
    scan,
)

Form = Literal["chunk", "recurrent"]
BuildTransition = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Transition]

TRANSITIONS: dict[str, BuildTransition] = {
    "identity": lambda k, beta, scalar, channels: Identity(),
    "fixed decay": lambda k, beta, scalar, channels: FixedDecay(scalar[0, 0]),
    "scalar gate": lambda k, beta, scalar, channels: ScalarGate(scalar),
    "diagonal gate": lambda k, beta, scalar, channels: DiagonalGate(channels),
    "householder": lambda k, beta, scalar, channels: Householder(k, beta),
    "scalar gate @ householder": lambda k, beta, scalar, channels: Product(ScalarGate(scalar), Householder(k, beta)),
    "diagonal gate @ householder": lambda k, beta, scalar, channels: Product(
        DiagonalGate(channels), Householder(k, beta)
    ),
}
FORMS: tuple[Form, ...] = ("chunk", "recurrent")


def best_seconds(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def forward_backward(build: BuildTransition, form: Form, seq_len: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, v = leaf(1, seq_len, 4, 64), leaf(1, seq_len, 4, 64)
    k = F.normalize(leaf(1, seq_len, 4, 64), dim=-1)
    beta = leaf(1, seq_len, 4).sigmoid()
    scalar, channels = F.logsigmoid(leaf(1, seq_len, 4)) / 4, F.logsigmoid(leaf(1, seq_len, 4, 64)) / 4
    leaves = [x.requires_grad_() for x in (q, k, v, beta, scalar, channels)]

    def run() -> None:
        result = scan(q, k, v, build(k, beta, scalar, channels), write=beta, form=form)
        torch.autograd.grad(result.output.sum() + result.final_state.sum(), leaves, allow_unused=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, torch {torch.__version__}")
    print(f"{'B1 H4 K=V=64 float32, T=' + str(arguments.seq_len):<32}{'steps ms':>10}{'chunk ms':>10}{'ratio':>8}")
    for name, build in TRANSITIONS.items():
        for form in FORMS:
            forward_backward(build, form, 256)()
        steps = best_seconds(forward_backward(build, "recurrent", arguments.seq_len), 3)
        chunk = best_seconds(forward_backward(build, "chunk", arguments.seq_len), 7)
        print(f"{name:<32}{steps * 1e3:>10.0f}{chunk * 1e3:>10.1f}{steps / chunk:>8.1f}")


if __name__ == "__main__":
    main()

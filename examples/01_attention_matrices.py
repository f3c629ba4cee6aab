"""Draw the attention-like matrix of four transitions: how much of token s is left in the read-out at token t.

    python examples/01_attention_matrices.py [attention_matrices.png]

All four see the same keys and queries, drawn from a few unit vectors: a query asks for what was written under its key.
Linear attention adds up every time that key was written, the gate prefers the recent ones, the delta rule keeps the
last one alone, and the gated delta rule does both.
"""

import sys

import matplotlib
import torch
from torch.nn.functional import normalize

from statemix import attention_matrix
from statemix.transitions import Householder, Identity, ScalarGate

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

SEQ_LEN, KEY_DIM, NUM_DIFFERENT_KEYS = 48, 16, 8


def main(path: str = "attention_matrices.png") -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    different = normalize(torch.randn(NUM_DIFFERENT_KEYS, KEY_DIM), dim=-1)
    query, key = (different[torch.randint(len(different), (SEQ_LEN,))].view(1, SEQ_LEN, 1, KEY_DIM) for _ in "qk")
    gate, beta = ScalarGate(torch.full((1, SEQ_LEN, 1), -0.1)), torch.full((1, SEQ_LEN, 1), 0.9)
    transitions = {
        "linear attention: I": (Identity(), None),
        "scalar gate: alpha I": (gate, None),
        "delta rule: I - beta k k^T": (Householder(key, beta), beta),
        "gated: alpha (I - beta k k^T)": (gate @ Householder(key, beta), beta),
    }
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
    for axis, (name, (transition, write)) in zip(axes, transitions.items(), strict=True):
        matrix = attention_matrix(query, key, transition, write=write, scale=1.0)[0, 0]
        image = axis.imshow(matrix, cmap="RdBu", vmin=-1, vmax=1)
        axis.set(title=name, xlabel="token s", ylabel="token t")
    figure.colorbar(image, ax=axes, shrink=0.8, label="weight of v_s in o_t")
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])

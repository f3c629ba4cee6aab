"""Feature maps: what a query or key goes through after the convolution, in each head (and block) alone.

    silu       x sigmoid(x)              relu      max(x, 0)            elu_plus_one    x + 1 above 0, e^x below
    identity   x                         softmax   e^x / sum e^x        elementwise_product    (A x + a) * (B x + b)

Those in ``NON_NEGATIVE`` give weights that can be summed and divided by (``StateMixer.Config.is_normalized``).

Sources: arXiv:2406.06484 section 3.3 (silu), arXiv:2006.16236 section 3.2 (1 + elu), arXiv:2103.13076 (learned maps),
athms/mad-lab feature_map.py (the element-wise product of two projections, for its linear attention).
Shapes: H heads, D channels of a head or of a block of it.
"""

from typing import Literal

from torch import Tensor, nn

FeatureMap = Literal["silu", "relu", "elu_plus_one", "identity", "softmax", "elementwise_product"]
NON_NEGATIVE: tuple[FeatureMap, ...] = ("relu", "elu_plus_one", "softmax")


class EluPlusOne(nn.Module):
    """1 + elu(x): positive, with slope 1 for positive x."""

    def forward(self, x: Tensor) -> Tensor:
        # Not elu(x) + 1: at x = -6 that leaves bfloat16 no digit of e^x.
        return x.relu() + x.clamp(max=0).exp()


class Softmax(nn.Module):
    """e^x / sum e^x over the last axis, in x's dtype under autocast too."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1).to(x.dtype)


class ElementwiseProduct(nn.Module):
    """(A x + a) * (B x + b), two learned projections of [..., H, D] that all heads share."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(size, size), nn.Linear(size, size)

    def reset_parameters(self) -> None:
        """Draw both projections anew, uniform within D^-0.5."""
        self.left.reset_parameters()
        self.right.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.left(x) * self.right(x)
        return product


def build_feature_map(name: FeatureMap, *, size: int) -> nn.Module:
    """The map ``name`` on the last axis, of ``size`` channels."""
    if name == "elementwise_product":
        return ElementwiseProduct(size)
    maps: dict[str, type[nn.Module]] = {
        "silu": nn.SiLU,
        "relu": nn.ReLU,
        "elu_plus_one": EluPlusOne,
        "identity": nn.Identity,
        "softmax": Softmax,
    }
    return maps[name]()

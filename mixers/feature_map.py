"""Feature maps: what a query or key goes through after the convolution, in each head (and block) alone.

    silu       x sigmoid(x)              relu      max(x, 0)            elu_plus_one    x + 1 above 0, e^x below
    identity   x                         softmax   e^x / sum e^x        elementwise_product    (A x + a) * (B x + b)

Non-negative ones give weights that can be summed and divided by (``StateMixer.Config.is_normalized``).

Sources: arXiv:2406.06484 section 3.3 (silu), arXiv:2006.16236 section 3.2 (1 + elu), arXiv:2103.13076 (learned maps),
athms/mad-lab feature_map.py (the element-wise product of two projections, for its linear attention).
Shapes: H heads, D channels of a head or of a block of it.
"""

from typing import Annotated, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from statemix.plugins import PartConfig, Registry


class FeatureMap(nn.Module):
    """Base of the maps, [..., D] to [..., D]; made as ``cls(D, option=...)`` with the options of its Config.

    Attributes:
        is_non_negative: whether every output is 0 or more.
    """

    Config: ClassVar[type[PartConfig]]
    is_non_negative: ClassVar[bool] = False

    def __init__(self, size: int) -> None:
        super().__init__()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, also after ``to_empty``; most maps have none."""


FEATURE_MAPS: Registry[FeatureMap] = Registry("feature map", takes_name=True, methods=("reset_parameters",))
FeatureMapSpec = Annotated[PartConfig, FEATURE_MAPS]


@FEATURE_MAPS.register
class SiLU(FeatureMap):
    """x sigmoid(x)."""

    class Config(PartConfig):
        type: Literal["silu"] = "silu"

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


@FEATURE_MAPS.register
class ReLU(FeatureMap):
    """max(x, 0)."""

    is_non_negative = True

    class Config(PartConfig):
        type: Literal["relu"] = "relu"

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


@FEATURE_MAPS.register
class EluPlusOne(FeatureMap):
    """1 + elu(x): positive, with slope 1 for positive x."""

    is_non_negative = True

    class Config(PartConfig):
        type: Literal["elu_plus_one"] = "elu_plus_one"

    def forward(self, x: Tensor) -> Tensor:
        # Not elu(x) + 1: at x = -6 that leaves bfloat16 no digit of e^x.
        return x.relu() + x.clamp(max=0).exp()


@FEATURE_MAPS.register
class Identity(FeatureMap):
    """x."""

    class Config(PartConfig):
        type: Literal["identity"] = "identity"

    def forward(self, x: Tensor) -> Tensor:
        return x


@FEATURE_MAPS.register
class Softmax(FeatureMap):
    """e^x / sum e^x over the last axis, in x's dtype under autocast too."""

    is_non_negative = True

    class Config(PartConfig):
        type: Literal["softmax"] = "softmax"

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1).to(x.dtype)


@FEATURE_MAPS.register
class ElementwiseProduct(FeatureMap):
    """(A x + a) * (B x + b), two learned projections of [..., H, D] that all heads share."""

    class Config(PartConfig):
        type: Literal["elementwise_product"] = "elementwise_product"

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.left, self.right = nn.Linear(size, size), nn.Linear(size, size)

    def reset_parameters(self) -> None:
        """Draw both projections anew, uniform within D^-0.5."""
        self.left.reset_parameters()
        self.right.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.left(x) * self.right(x)
        return product


def non_negative_maps() -> tuple[str, ...]:
    """The names of the maps whose outputs are never negative."""
    return tuple(cls.Config.model_fields["type"].default for cls in FEATURE_MAPS.classes() if cls.is_non_negative)


def build_feature_map(config: PartConfig, *, size: int) -> FeatureMap:
    """The map of ``config`` on the last axis, of ``size`` channels."""
    return FEATURE_MAPS.class_of(config)(size, **config.model_dump(exclude={"type"}))

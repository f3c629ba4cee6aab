"""mLSTM without its normaliser: a forget gate for the state, and an exponential gate for what is written.

    S_t = f_t S_{t-1} + i_t v_t k_t^T,      f_t = sigmoid(W_f x_t + b_f),  i_t = exp(W_i x_t)

M_t is a scalar gate; what is new is the write, so the file brings the module that makes both. The paper divides the
read-out by max(|n_t q_t|, 1) with n_t = f_t n_{t-1} + i_t k_t; the state mixer has an RMS norm there.

Shapes: B batch, T time, HV value heads. Source: arXiv:2405.04517 section 2.3.
"""

from typing import Literal

from torch import Tensor, nn

from statemix.kernels import NormalForm
from statemix.transitions import FactorConfig, HeadSizes, LogDecay, Transition, TransitionModule, register


class MLSTM(Transition):
    """f_t I, with log_decay = log f, [B, T, HV]."""

    log_decay: LogDecay

    is_diagonal = True

    @property
    def eigenvalue_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def apply(self, state: Tensor) -> Tensor:
        return self.log_decay.exp()[..., None, None] * state

    def lower(self) -> NormalForm:
        return NormalForm(log_decay=self.log_decay)


@register
class MLSTMModule(TransitionModule):
    formula = "f_t I"

    class Config(FactorConfig):
        type: Literal["mlstm"] = "mlstm"

    def __init__(self, config: Config, sizes: HeadSizes) -> None:
        super().__init__()
        self.forget = nn.Linear(sizes.hidden_size, sizes.num_value_heads)
        self.input = nn.Linear(sizes.hidden_size, sizes.num_value_heads, bias=False)

    def reset_parameters(self) -> None:
        self.forget.reset_parameters()
        nn.init.uniform_(self.forget.bias, 3.0, 6.0)  # remember at first: f from 0.95 to 0.998
        self.input.reset_parameters()

    def forward(self, hidden: Tensor, key: Tensor) -> tuple[MLSTM, Tensor]:
        return MLSTM(nn.functional.logsigmoid(self.forget(hidden).float())), self.input(hidden).float().exp()

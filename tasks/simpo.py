"""Simple preference optimization: Meng et al. 2024, arXiv:2405.14734."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from tasks.train.best import PAIRS
from tasks.train.losses.pair_loss import Logps, PairLoss, reward_metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SimPO(PairLoss):
    """Tunes a policy on preference pairs; the reward of an answer is its mean log-probability.

    Args:
        beta: scale of the reward.
        gamma: target margin between the chosen and the rejected reward.
        sft_weight: of the chosen answer's mean negative log-likelihood per token, as in the authors' code and CPO; it
            keeps the chosen answers likely.
    """

    measures: ClassVar = (*PAIRS, "nll_loss")

    beta: Annotated[float, Gt(0)] = 2.0
    gamma: Annotated[float, Ge(0)] = 1.0
    sft_weight: Annotated[float, Gt(0)] | None = None

    def loss(self, chosen: Logps, rejected: Logps) -> "tuple[Tensor, dict[str, Tensor]]":
        from torch.nn.functional import logsigmoid

        metrics = reward_metrics(self.beta * chosen.mean_B, self.beta * rejected.mean_B)  # eq. 4
        contrast_B = -logsigmoid(metrics["rewards/margins"] - self.gamma)  # eq. 6
        if self.sft_weight is None:
            return contrast_B.mean(), metrics
        nll_B = -chosen.mean_B
        return (contrast_B + self.sft_weight * nll_B).mean(), {**metrics, "nll_loss": nll_B}

"""Contrastive preference optimization: Xu et al. 2024, arXiv:2401.08417."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from tasks.train.best import PAIRS
from tasks.train.losses.pair_loss import Logps, PairLoss, reward_metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CPO(PairLoss):
    """Tunes a policy on preference pairs without a reference: contrast, and likelihood of the chosen answer.

    Args:
        beta: scale of the rewards; for ``ipo`` its regularization tau.
        loss_type: ``sigmoid`` is eq. 3 of the paper, on whole answers; ``hinge`` arXiv:2305.10425, likewise; ``ipo``
            arXiv:2310.12036, per token.
        sft_weight: weight of the chosen answer's mean negative log-likelihood per token.
    """

    measures: ClassVar = (*PAIRS, "nll_loss")

    beta: Annotated[float, Gt(0)] = 0.1
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    sft_weight: Annotated[float, Ge(0)] = 1.0

    def loss(self, chosen: Logps, rejected: Logps) -> "tuple[Tensor, dict[str, Tensor]]":
        from torch.nn.functional import logsigmoid, relu

        answers = (chosen.mean_B, rejected.mean_B) if self.loss_type == "ipo" else (chosen.sum_B, rejected.sum_B)
        metrics = reward_metrics(*(self.beta * logps_B for logps_B in answers))
        margins_B = metrics["rewards/margins"]
        if self.loss_type == "sigmoid":
            contrast_B = -logsigmoid(margins_B)
        elif self.loss_type == "hinge":
            contrast_B = relu(1 - margins_B)
        else:
            contrast_B = (answers[0] - answers[1] - 1 / (2 * self.beta)) ** 2
        nll_B = -chosen.mean_B
        return (contrast_B + self.sft_weight * nll_B).mean(), {**metrics, "nll_loss": nll_B}

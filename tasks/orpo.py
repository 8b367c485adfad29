"""Odds ratio preference optimization: Hong et al. 2024, arXiv:2403.07691."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from tasks.train.best import PAIRS
from tasks.train.losses.pair_loss import Logps, PairLoss, reward_metrics

if TYPE_CHECKING:
    from torch import Tensor

LEAST_LOSS = 1e-7  # nats per token: the odds of an answer that is certain are infinite


@dataclass(frozen=True, kw_only=True)
class ORPO(PairLoss):
    """Tunes a policy on preference pairs in one stage, from a base on: likelihood of the chosen answer, and odds.

    Args:
        beta: weight of the odds ratio in the loss, lambda in the paper.
        chat_template: for a model that has none; written into the output. From a file: ``sources.base.chat_template``.
    """

    default_learning_rate: ClassVar = 8e-6  # of the paper
    measures: ClassVar = (*PAIRS, "nll_loss", "log_odds_chosen", "log_odds_ratio")
    beta: Annotated[float, Gt(0)] = 0.1
    chat_template: str | None = None  # chatml; hermes, which has tools; or a family of TRL's templates, such as qwen3

    def loss(self, chosen: Logps, rejected: Logps) -> "tuple[Tensor, dict[str, Tensor]]":
        from torch.nn.functional import logsigmoid

        chosen_B, rejected_B = chosen.mean_B, rejected.mean_B  # eq. 3
        log_odds_B = log_odds(chosen_B) - log_odds(rejected_B)
        gains_B = logsigmoid(log_odds_B)  # eq. 7
        metrics = {
            **reward_metrics(self.beta * chosen_B, self.beta * rejected_B),
            "nll_loss": -chosen_B,
            "log_odds_ratio": gains_B,
            "log_odds_chosen": log_odds_B,
        }
        return (-chosen_B - self.beta * gains_B).mean(), metrics  # eq. 6


def log_odds(logps: "Tensor") -> "Tensor":
    """Of an answer whose mean log-probability per token is given: log(p / (1 - p)), eq. 4."""
    import torch

    certain = logps.clamp(max=-LEAST_LOSS)
    return certain - torch.log(-torch.expm1(certain))

"""Methods whose loss is a function of the log-probabilities of answers: of pairs, or of single answers.

Shapes: B pairs of a micro batch; R rows, of pairs R = 2B.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lineage.errors import ConfigError
from tasks.data.kinds import PREFERENCES
from tasks.method import FROZEN_POLICY, AnswerTraining

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer

    from tasks.train.losses.pair_trainer import Rows, RowsLoss
    from tasks.train.run import TrainingRun

    Measured = tuple[Tensor, dict[str, Tensor]]  # the loss, and metrics
    Loss = Callable[["Logps", "Logps"], Measured]  # of the chosen and the rejected answers

logger = logging.getLogger(__name__)

MAX_RATIO = 4 / 3  # of the weight of all desirable answers to that of the others: arXiv:2402.01306, section 4.2, eq. 8


@dataclass(frozen=True, kw_only=True)
class Logps:
    """Log-probabilities of one answer of each pair, given its prompt, in nats.

    Args:
        sum_B: over the answer's tokens.
        num_tokens_B: of the answer; at least 1 where it divides.
        reference: ``sum_B`` under the frozen policy, where the method's ``models`` have one.
    """

    sum_B: "Tensor"
    num_tokens_B: "Tensor"
    reference: "Tensor | None" = None

    @property
    def mean_B(self) -> "Tensor":
        """Per token of the answer."""
        return self.sum_B / self.num_tokens_B

    @property
    def reference_sum_B(self) -> "Tensor":
        """The sum under the frozen policy, without a gradient."""
        if self.reference is None:
            raise ConfigError(
                "the loss asks for the reference's log-probabilities, and the method has no reference; set "
                'models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}'
            )
        return self.reference

    @property
    def reference_mean_B(self) -> "Tensor":
        return self.reference_sum_B / self.num_tokens_B


@dataclass(frozen=True, kw_only=True)
class PairLoss(AnswerTraining):
    """A subclass defines ``loss``; everything else is shared.

    Where the architecture allows it, prompts and answers share one padding-free forward; only the answers' tokens go
    through the head. Dropout is off, except that of an adapter. Where ``models`` have a FROZEN_POLICY, step 0 proves
    that it agrees with the policy.
    """

    reads: ClassVar = PREFERENCES

    default_learning_rate: ClassVar = 1e-6

    @abstractmethod
    def loss(self, chosen: Logps, rejected: Logps) -> "tuple[Tensor, dict[str, Tensor]]":
        """The loss of a micro batch, as a mean over its pairs; and metrics, one value per pair (B) or one in all."""

    def trainer(self, run: "TrainingRun") -> "Trainer":
        """transformers' loop around ``loss``."""
        return pair_trainer(run, self.loss)


def pair_trainer(run: "TrainingRun", loss: "Loss") -> "Trainer":
    """A trainer around a loss of pairs; step 0 proves that policy and reference agree, where there is one."""
    return rows_trainer(run, of_rows(loss))


def rows_trainer(run: "TrainingRun", loss: "RowsLoss", **own: object) -> "Trainer":
    """A trainer around a loss of rows, with the same check.

    Args:
        own: further arguments of ``run.trl``.
    """
    from tasks.train.losses.pair_trainer import PairConfig, PairTrainer

    proof = run.start_proof() if FROZEN_POLICY in run.method.models.values() else None
    return run.trl(PairTrainer, PairConfig, pair_loss=loss, proof=proof, **own)


def of_rows(loss: "Loss") -> "RowsLoss":
    """A loss of pairs, in the form that the trainer calls: of rows, first the chosen and then the rejected answers."""

    def loss_of_rows(rows: "Rows") -> "Measured":
        references = (None, None) if rows.reference_R is None else rows.reference_R.chunk(2)
        chosen, rejected = (
            Logps(sum_B=sums_B, num_tokens_B=counts_B, reference=each)
            for sums_B, counts_B, each in zip(rows.sums_R.chunk(2), rows.counts_R.chunk(2), references, strict=True)
        )
        return loss(chosen, rejected)

    return loss_of_rows


def reward_metrics(chosen_B: "Tensor", rejected_B: "Tensor") -> "dict[str, Tensor]":
    """The metrics of the rewards of both answers, named as in TRL."""
    margins_B = chosen_B - rejected_B
    return {
        "rewards/chosen": chosen_B,
        "rewards/rejected": rejected_B,
        "rewards/margins": margins_B,
        "rewards/accuracies": (margins_B > 0).float(),
    }


def rpo_loss(beta: float, sft_weight: float, chosen: Logps, rejected: Logps) -> "Measured":
    """The sigmoid loss of DPO, less the chosen answers' mean log-likelihood per token: a mean over the pairs.

    The likelihood keeps chosen answers likely where the sigmoid loss alone would make both answers of a pair less
    likely. The reference's is subtracted, a constant, so that the loss starts at ln 2.

    Args:
        beta: strength of the KL to the reference.
        sft_weight: of the log-likelihood.
    Source:
        Pang et al. 2024, arXiv:2404.19733, eq. 1.
    """
    from torch.nn.functional import logsigmoid

    chosen_B, rejected_B = (each.sum_B - each.reference_sum_B for each in (chosen, rejected))
    margins_B = beta * (chosen_B - rejected_B)
    gains_B = chosen_B / chosen.num_tokens_B
    metrics = {
        "rewards/chosen": beta * chosen_B,
        "rewards/rejected": beta * rejected_B,
        "rewards/margins": margins_B,
        "rewards/accuracies": (margins_B > 0).float(),
    }
    return (-logsigmoid(margins_B) - sft_weight * gains_B).mean(), metrics


def label_weights(
    desirable: float | None, undesirable: float | None, num_desirable: int, num_undesirable: int
) -> tuple[float, float]:
    """The weights of desirable and undesirable answers; warns of a ratio that eq. 8 of KTO advises against.

    Args:
        desirable, undesirable: as set; None: chosen so that both labels have the same total weight, with 1 for the
            more numerous one.
        num_desirable, num_undesirable: among the training rows.

    Raises:
        ConfigError: a weight is set of answers that the rows do not have.
    """
    for name, weight, count in (("desirable", desirable, num_desirable), ("undesirable", undesirable, num_undesirable)):
        if weight is not None and not count:
            raise ConfigError(
                f"{name}_weight={weight:g}: none of the {num_desirable + num_undesirable} training rows is {name}; set "
                f"{name}_weight=null, or add such rows"
            )
    ratio = num_desirable / num_undesirable if num_desirable and num_undesirable else 1.0
    if desirable is None:
        desirable = undesirable / ratio if undesirable is not None else max(1.0, 1 / ratio)
    if undesirable is None:
        undesirable = desirable * ratio
    found = desirable * ratio / undesirable
    logger.info(
        "desirable_weight=%g undesirable_weight=%g desirable_rows=%d undesirable_rows=%d ratio=%.4g",
        desirable, undesirable, num_desirable, num_undesirable, found,
    )  # fmt: skip
    if not 1 - 1e-6 <= found <= MAX_RATIO + 1e-6 and num_desirable and num_undesirable:
        logger.warning(
            "desirable_weight=%g undesirable_weight=%g: the desirable answers weigh %.4g times as much as the "
            "others; the paper advises 1 to 4/3 (eq. 8); leave one of the weights unset to have 1",
            desirable, undesirable, found,
        )  # fmt: skip
    return desirable, undesirable


def kto_loss(beta: float, desirable_weight: float, undesirable_weight: float, rows: "Rows") -> "Measured":
    """The weighted value lost by each answer, a mean over the rows: 1/2 where policy and reference agree.

    Source:
        Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7, less the constant weights: w (1 - v).
    """
    import torch

    from tasks.train.losses.pair_trainer import of_labels

    assert rows.reference_R is not None and rows.desirable_R is not None
    log_ratios_R = rows.sums_R - rows.reference_R
    zero = 0.0 if rows.divergence is None else rows.divergence
    sign_R = torch.where(rows.desirable_R.bool(), 1.0, -1.0)
    weights_R = torch.where(rows.desirable_R.bool(), desirable_weight, undesirable_weight)
    values_R = torch.sigmoid(sign_R * beta * (log_ratios_R - zero))
    metrics = {
        **of_labels("rewards", beta * log_ratios_R, rows.desirable_R),
        "rewards/accuracies": (values_R > 0.5).float(),
    }
    return (weights_R * (1 - values_R)).mean(), metrics

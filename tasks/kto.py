"""Kahneman-Tversky optimization: Ethayarajh et al. 2024, arXiv:2402.01306; APO on single answers: arXiv:2408.06266."""

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from tasks.data.kinds import LABEL_NAMES, UNPAIRED
from tasks.method import FROZEN_POLICY, POLICY, AnswerTraining

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer

    from tasks.train.pair_trainer import Rows
    from tasks.train.run import TrainingRun

logger = logging.getLogger(__name__)

MAX_RATIO = 4 / 3  # of the desirable answers' weight to that of the others: section 4.2, eq. 8


@dataclass(frozen=True, kw_only=True)
class KTO(AnswerTraining):
    """Tunes a policy on single answers, each desirable or not; its frozen start is the reference.

    Args:
        beta: strength of the KL to the reference.
        loss_type: ``kto`` compares rewards with the divergence of the policy from its reference, one estimate for the
            global batch (eq. 7); ``apo_zero_unpaired`` with zero (arXiv:2408.06266, eq. 7).
        desirable_weight, undesirable_weight: of the losses; by default those that give all desirable answers of the
            training rows the weight of all others (eq. 8), and the more numerous ones the weight 1.
    """

    reads: ClassVar = UNPAIRED
    models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}
    default_learning_rate: ClassVar = 1e-6
    beta: Annotated[float, Gt(0)] = 0.1
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: Annotated[float, Gt(0)] | None = None
    undesirable_weight: Annotated[float, Gt(0)] | None = None

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

        from tasks.train.pair_loss import rows_trainer

        counts = (int(run.rows.metrics.get(f"{label}_rows", 0)) for label in LABEL_NAMES.values())
        desirable, undesirable = self.weights(*counts)
        # A mismatched answer may be longer than the row's own, which is why it is cut too.
        collate = DataCollatorForUnpairedPreference(run.policy.tokenizer.pad_token_id, max_length=self.max_length)
        trainer = rows_trainer(
            run, partial(kto_loss, self.beta, desirable, undesirable),
            estimates_divergence=self.loss_type == "kto", data_collator=collate,
        )  # fmt: skip
        run.share |= {"desirable_weight": desirable, "undesirable_weight": undesirable}
        return trainer

    def weights(self, num_desirable: int, num_undesirable: int) -> tuple[float, float]:
        """The weights of desirable and undesirable answers; warns of a ratio that eq. 8 advises against.

        Args:
            num_desirable, num_undesirable: among the training rows.
        """
        ratio = num_desirable / num_undesirable if num_desirable and num_undesirable else 1.0
        desirable, undesirable = self.desirable_weight, self.undesirable_weight
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


def kto_loss(
    beta: float, desirable_weight: float, undesirable_weight: float, rows: "Rows"
) -> "tuple[Tensor, dict[str, Tensor]]":
    """The weighted value lost by each answer, a mean over the rows: 1/2 where policy and reference agree.

    Source:
        Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7, less the constant weights: w (1 - v).
    """
    import torch

    from tasks.train.pair_trainer import of_labels

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

"""Kahneman-Tversky optimization: Ethayarajh et al. 2024, arXiv:2402.01306; APO on single answers: arXiv:2408.06266."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from tasks.data.kinds import LABEL_NAMES, UNPAIRED, single_answers
from tasks.method import FROZEN_POLICY, POLICY, AnswerTraining
from tasks.train.best import PAIRS
from tasks.train.losses.pair_loss import kto_loss, label_weights, rows_trainer

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


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
    measures: ClassVar = (*PAIRS, "kl", "desirable_rows", "undesirable_rows", "desirable_weight", "undesirable_weight")
    default_learning_rate: ClassVar = 1e-6
    beta: Annotated[float, Gt(0)] = 0.1
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: Annotated[float, Gt(0)] | None = None
    undesirable_weight: Annotated[float, Gt(0)] | None = None

    def trainer(self, run: "TrainingRun") -> "Trainer":
        counts = (int(run.rows.metrics.get(f"{label}_rows", 0)) for label in LABEL_NAMES.values())
        weights = label_weights(self.desirable_weight, self.undesirable_weight, *counts)
        # A mismatched answer may be longer than the row's own, which is why it is cut too.
        collate = single_answers(run.policy.tokenizer.pad_token_id, self.max_length)
        loss = partial(kto_loss, self.beta, *weights)
        trainer = rows_trainer(run, loss, estimates_divergence=self.loss_type == "kto", data_collator=collate)
        run.share |= dict(zip(("desirable_weight", "undesirable_weight"), weights, strict=True))
        return trainer

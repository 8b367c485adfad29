"""Direct preference optimization: Rafailov et al. 2023, arXiv:2305.18290."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from tasks.data.kinds import PREFERENCES
from tasks.method import FROZEN_POLICY, POLICY, AnswerTraining
from tasks.train.dpo_losses import LOSSES, Divergence, LossType, ReferenceSync, check, trl_options, weights_of

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class DPO(AnswerTraining):
    """Tunes a policy on preference pairs; its frozen start is the reference.

    Args:
        beta: strength of the KL to the reference.
        loss_type: ``sigmoid`` is eq. 7 of the paper; ``tasks/train/dpo_losses.py`` names the papers of all.
        losses: several losses at once, with weights: MPO, Wang et al. 2024, arXiv:2411.10442.
        sft_weight: of the chosen answers' log-likelihood in the loss, which keeps them likely (``rpo_loss``).
        label_smoothing: share of labels that are wrong, for robust, exo_pair, aot and aot_unpaired.
        discopop_tau: temperature of discopop; None: 0.05.
        f_divergence: regularizer in place of the reverse KL: Wang et al. 2023, arXiv:2309.16240.
        f_alpha: of alpha_divergence; None: 0.5.
        ld_alpha: weight of tokens beyond the shorter answer of a pair. LD-DPO: Liu et al. 2024, arXiv:2409.06411.
        weighting: of pairs by their probability under the policy. WPO: Zhou et al. 2024, arXiv:2406.11827, eq. 2.
        reference_sync: a reference that follows the policy.
    """

    version: ClassVar[int] = 2  # 1 also trained the template's text after the token that ends an answer
    reads: ClassVar = PREFERENCES
    models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}

    default_learning_rate: ClassVar = 1e-6
    beta: Annotated[float, Gt(0)] = 0.1
    loss_type: LossType = "sigmoid"
    losses: Mapping[LossType, Annotated[float, Gt(0)]] | None = None
    sft_weight: Annotated[float, Gt(0)] | None = None
    label_smoothing: Annotated[float, Gt(0), Lt(0.5)] | None = None
    discopop_tau: Annotated[float, Gt(0)] | None = None
    f_divergence: Divergence | None = None
    f_alpha: Annotated[float, Gt(0)] | None = None
    ld_alpha: Annotated[float, Ge(0), Lt(1)] | None = None
    weighting: Literal["wpo"] | None = None
    reference_sync: ReferenceSync | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self)

    def trainer(self, run: "TrainingRun") -> "Trainer":
        if self.sft_weight is not None:
            from tasks.train.pair_loss import pair_trainer, rpo_loss

            return pair_trainer(run, partial(rpo_loss, self.beta, self.sft_weight))
        from trl import DPOConfig, DPOTrainer

        from tasks.train.dpo_trainer import MovingReferenceTrainer, OwnLossesTrainer

        options = trl_options(self)
        ours = {name: weight for name, weight in weights_of(self).items() if LOSSES[name].is_ours}
        if self.reference_sync is not None:
            return run.trl(MovingReferenceTrainer, DPOConfig, **options, own_losses=ours)
        if ours:
            return run.trl(OwnLossesTrainer, DPOConfig, **options, own_losses=ours)
        return run.trl(DPOTrainer, DPOConfig, **options)

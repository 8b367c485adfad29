"""Direct preference optimization: Rafailov et al. 2023, arXiv:2305.18290."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from tasks.data.kinds import PREFERENCES
from tasks.method import FROZEN_POLICY, POLICY
from tasks.train.losses.dpo_losses import LOSSES, Divergence, LossOptions, LossType, ReferenceSync

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class DPO(LossOptions):
    """Tunes a policy on preference pairs; its frozen start is the reference."""

    version: ClassVar[int] = 2  # 1 also trained the template's text after the token that ends an answer
    reads: ClassVar = PREFERENCES
    models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}

    default_learning_rate: ClassVar = 1e-6
    beta: Annotated[float, Gt(0)] = 0.1  # strength of the KL to the reference
    loss_type: LossType = "sigmoid"  # eq. 7 of the paper; tasks/train/losses/dpo_losses.py names the papers of all
    losses: Mapping[LossType, Annotated[float, Gt(0)]] | None = None  # several, with weights: MPO, arXiv:2411.10442
    sft_weight: Annotated[float, Gt(0)] | None = None  # of the chosen answers' log-likelihood in the loss: rpo_loss
    label_smoothing: Annotated[float, Gt(0), Lt(0.5)] | None = None  # share of wrong labels, for robust, exo_pair, aot
    discopop_tau: Annotated[float, Gt(0)] | None = None  # temperature of discopop; None: 0.05
    f_divergence: Divergence | None = None  # in place of the reverse KL: Wang et al. 2023, arXiv:2309.16240
    f_alpha: Annotated[float, Gt(0)] | None = None  # of alpha_divergence; None: 0.5
    ld_alpha: Annotated[float, Ge(0), Lt(1)] | None = None  # of tokens beyond the shorter answer: arXiv:2409.06411
    weighting: Literal["wpo"] | None = None  # by a pair's probability under the policy: WPO, arXiv:2406.11827, eq. 2
    reference_sync: ReferenceSync | None = None  # a reference that follows the policy: TR-DPO, arXiv:2404.09656

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_losses()

    def trainer(self, run: "TrainingRun") -> "Trainer":
        if self.sft_weight is not None:
            from tasks.train.losses.pair_loss import pair_trainer, rpo_loss

            return pair_trainer(run, partial(rpo_loss, self.beta, self.sft_weight))
        from trl import DPOConfig, DPOTrainer

        from tasks.train.losses.dpo_trainer import MovingReferenceTrainer, OwnLossesTrainer

        options = self.trl_options(run.num_steps)
        ours = {name: weight for name, weight in self.weights.items() if LOSSES[name].is_ours}
        if self.reference_sync is not None:
            return run.trl(MovingReferenceTrainer, DPOConfig, **options, own_losses=ours)
        if ours:
            return run.trl(OwnLossesTrainer, DPOConfig, **options, own_losses=ours)
        return run.trl(DPOTrainer, DPOConfig, **options)

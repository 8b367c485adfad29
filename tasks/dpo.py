"""Direct preference optimization: Rafailov et al. 2023, arXiv:2305.18290."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from lineage.errors import ConfigError
from tasks.data.kinds import PREFERENCES
from tasks.method import FROZEN_POLICY, POLICY, AnswerTraining
from tasks.train.best import HELD_OUT_LOSS, PAIRS
from tasks.train.losses.dpo_losses import LOSSES, Divergence, LossRow, LossType, ReferenceSync

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class DPO(AnswerTraining):
    """Tunes a policy on preference pairs; its frozen start is the reference."""

    version: ClassVar[int] = 2  # 1 also trained the template's text after the token that ends an answer
    reads: ClassVar = PREFERENCES
    models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}
    measures: ClassVar = PAIRS

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
        self._check_losses()

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

    @property
    def keeps_state(self) -> bool:
        """As of every training: a reference that moves is in none of its inputs."""
        return super().keeps_state or self.reference_sync is not None

    @property
    def weights(self) -> dict[LossType, float]:
        """The weight of each of its losses, in the order of ``LOSSES``."""
        losses = self.losses or {self.loss_type: 1.0}
        return {name: losses[name] for name in LOSSES if name in losses}

    def trl_options(self, num_steps: int) -> dict[str, object]:
        """The arguments of TRL's ``DPOConfig``, with the losses that TRL computes."""
        self._check_moves(num_steps)
        theirs = {name: weight for name, weight in self.weights.items() if not LOSSES[name].is_ours}
        sync = self.reference_sync
        options = {
            "loss_weights": [*theirs.values()] if self.losses else None,
            "label_smoothing": self.label_smoothing,
            "discopop_tau": self.discopop_tau,
            "f_divergence_type": self.f_divergence,
            "f_alpha_divergence_coef": self.f_alpha,
            "ld_alpha": self.ld_alpha,
            "use_weighting": self.weighting and True,
            "sync_ref_model": sync and True,
            "ref_model_mixup_alpha": sync and sync.mixup_alpha,
            "ref_model_sync_steps": sync and sync.every_steps,
        }
        configured = {name: value for name, value in options.items() if value is not None}
        return {"beta": self.beta, "loss_type": [*theirs], **configured}

    def _check_losses(self) -> None:
        """Refuses options that have no effect, or that cannot be combined."""
        self._check_names()
        chosen = self.weights
        rows, named = [LOSSES[name] for name in chosen], ", ".join(chosen)
        for option in ("label_smoothing", "discopop_tau"):
            readers = [name for name, row in LOSSES.items() if option in row.reads]
            if getattr(self, option) is not None and not set(readers) & chosen.keys():
                raise ConfigError(
                    f"{option}={getattr(self, option):g} with loss {named}: {', '.join(readers)} read it; set "
                    f"loss_type={readers[0]}, or {option}=null"
                )
            for name, row in LOSSES.items():
                if name in chosen and row.needs == option and getattr(self, option) is None:
                    raise ConfigError(f"loss_type={name} without {option}: it is a part of this loss; set {option}=0.1")
        self._check_divergence(rows, named)
        self._check_reference(named)
        unweighted = [name for name, row in LOSSES.items() if name in chosen and (row.is_ours or name == "hinge")]
        if self.weighting is not None and unweighted:
            raise ConfigError(
                f"weighting={self.weighting} with loss {', '.join(unweighted)}: TRL weights losses of single pairs, "
                "and of these fails on hinge; set weighting=null, or another loss"
            )
        if self.measures_held_out and any(row.of_step for row in rows):
            option = "validation" if self.validation else f"best.metric={HELD_OUT_LOSS}"
            raise ConfigError(
                f"{option} with loss {named}: it compares the pairs of a step, and held-out rows have no steps; set "
                f"{'validation=null' if self.validation else 'best.metric=rewards/margins with best.mode=max'}"
            )
        only_sft = set(chosen) == {"sft"}
        if only_sft and self.beta != type(self).beta:
            raise ConfigError(f"beta={self.beta:g} with loss sft alone: it reads none; add another loss, or use sft")

    def _check_names(self) -> None:
        if self.losses is not None:
            if self.loss_type != "sigmoid":
                raise ConfigError(
                    f"loss_type={self.loss_type} and losses={dict(self.losses)}: losses holds all of them; set "
                    "loss_type=sigmoid, its default"
                )
            if len(self.losses) < 2:
                raise ConfigError(
                    f"losses={dict(self.losses)}: it adds up two losses or more; of one alone, set loss_type and "
                    "losses=null"
                )
        if self.sft_weight is None:
            return
        others = ("losses", "label_smoothing", "f_divergence", "ld_alpha", "weighting", "reference_sync")
        for name in others:
            if getattr(self, name) is not None:
                both = "" if name == "losses" else f" with losses={{sigmoid: 1, sft: {self.sft_weight:g}}} for both"
                raise ConfigError(
                    f"sft_weight={self.sft_weight:g} with {name}: it goes with loss sigmoid alone; set {name}=null, "
                    f"or sft_weight=null{both}"
                )
        if self.loss_type != "sigmoid":
            raise ConfigError(
                f"sft_weight={self.sft_weight:g} with loss_type={self.loss_type}: it goes with loss_type=sigmoid; set "
                "loss_type=sigmoid, or sft_weight=null"
            )

    def _check_divergence(self, rows: Sequence[LossRow], named: str) -> None:
        if self.f_alpha is not None and (self.f_divergence != "alpha_divergence" or abs(self.f_alpha - 1) < 1e-6):
            why = (
                "alpha 1 is the reverse KL" if self.f_divergence == "alpha_divergence" else "alpha_divergence reads it"
            )
            found = f"f_alpha={self.f_alpha:g} with f_divergence={self.f_divergence}"
            raise ConfigError(
                f"{found}: {why}; set f_alpha=null, or f_divergence=alpha_divergence with another f_alpha"
            )
        wrong = [row for row in rows if not row.difference and row is not LOSSES["sft"]]
        if self.f_divergence is not None and (wrong or all(row is LOSSES["sft"] for row in rows)):
            fitting = [name for name, row in LOSSES.items() if row.difference]
            raise ConfigError(
                f"f_divergence={self.f_divergence} with loss {named}: it is defined for functions of the difference of "
                f"rewards, which are {', '.join(fitting)}; set one of these, or f_divergence=null"
            )

    def _check_reference(self, named: str) -> None:
        if named == "sft":
            for option in ("ld_alpha", "reference_sync"):
                if getattr(self, option) is not None:
                    raise ConfigError(
                        f"{option} with loss sft alone: it reads none; add another loss, or {option}=null"
                    )
        sync = self.reference_sync
        if sync is None:
            return
        if self.adapter is not None:
            raise ConfigError(
                f"reference_sync with adapter.type={self.adapter.type}: the reference of an adapter is the policy "
                "without it, which does not move; set adapter=null, or reference_sync=null"
            )
        if self.num_steps is not None:
            self._check_moves(self.num_steps)

    def _check_moves(self, num_steps: int) -> None:
        """Refuses a reference that would never move; of epochs, steps are known when the rows are."""
        sync = self.reference_sync
        if sync is not None and sync.every_steps >= num_steps:
            raise ConfigError(
                f"reference_sync.every_steps={sync.every_steps} with num_steps={num_steps}: the reference would never "
                f"move; set reference_sync.every_steps={max(1, num_steps // 2)} or less"
            )

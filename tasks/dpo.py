"""Direct preference optimization: Rafailov et al. 2023, arXiv:2305.18290."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from lineage.errors import ConfigError
from tasks.best import HELD_OUT_LOSS
from tasks.data.kinds import PREFERENCES
from tasks.method import FROZEN_POLICY, POLICY, AnswerTraining
from tasks.train.dpo_losses import LOSSES, Divergence, LossRow, LossType, ReferenceSync

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class DPO(AnswerTraining):
    """Tunes a policy on preference pairs; its frozen start is the reference."""

    version: ClassVar[int] = 2  # 1 also trained the template's text after the token that ends an answer
    reads: ClassVar = PREFERENCES
    models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}

    default_learning_rate: ClassVar = 1e-6
    beta: Annotated[float, Gt(0)] = 0.1  # strength of the KL to the reference
    loss_type: LossType = "sigmoid"  # eq. 7 of the paper; tasks/train/dpo_losses.py names the papers of all
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


def weights_of(method: DPO) -> dict[LossType, float]:
    """The losses that a DPO adds up, with their weights, in the order of ``LOSSES``."""
    losses = method.losses or {method.loss_type: 1.0}
    return {name: losses[name] for name in LOSSES if name in losses}


def trl_options(method: DPO) -> dict[str, object]:
    """The arguments of TRL's ``DPOConfig``, with the losses that TRL computes."""
    theirs = {name: weight for name, weight in weights_of(method).items() if not LOSSES[name].is_ours}
    sync = method.reference_sync
    options = {
        "loss_weights": [*theirs.values()] if method.losses else None,
        "label_smoothing": method.label_smoothing,
        "discopop_tau": method.discopop_tau,
        "f_divergence_type": method.f_divergence,
        "f_alpha_divergence_coef": method.f_alpha,
        "ld_alpha": method.ld_alpha,
        "use_weighting": method.weighting and True,
        "sync_ref_model": sync and True,
        "ref_model_mixup_alpha": sync and sync.mixup_alpha,
        "ref_model_sync_steps": sync and sync.every_steps,
    }
    stated = {name: value for name, value in options.items() if value is not None}
    return {"beta": method.beta, "loss_type": [*theirs], **stated}


def check(method: DPO) -> None:
    """Refuses options that change nothing, or that cannot go together."""
    _check_names(method)
    chosen = weights_of(method)
    rows, named = [LOSSES[name] for name in chosen], ", ".join(chosen)
    for option in ("label_smoothing", "discopop_tau"):
        readers = [name for name, row in LOSSES.items() if option in row.reads]
        if getattr(method, option) is not None and not set(readers) & chosen.keys():
            raise ConfigError(
                f"{option}={getattr(method, option):g} with loss {named}: {', '.join(readers)} read it; set "
                f"loss_type={readers[0]}, or {option}=null"
            )
        for name, row in LOSSES.items():
            if name in chosen and row.needs == option and getattr(method, option) is None:
                raise ConfigError(f"loss_type={name} without {option}: it is a part of this loss; set {option}=0.1")
    _check_divergence(method, rows, named)
    _check_reference(method, named)
    unweighted = [name for name, row in LOSSES.items() if name in chosen and (row.is_ours or name == "hinge")]
    if method.weighting is not None and unweighted:
        raise ConfigError(
            f"weighting={method.weighting} with loss {', '.join(unweighted)}: TRL weights losses of single pairs, and "
            "of these fails on hinge; set weighting=null, or another loss"
        )
    if method.measures_held_out and any(row.of_step for row in rows):
        option = "validation" if method.validation else f"best.metric={HELD_OUT_LOSS}"
        raise ConfigError(
            f"{option} with loss {named}: it compares the pairs of a step, and held-out rows have no steps; set "
            f"{'validation=null' if method.validation else 'best.metric=rewards/margins with best.mode=max'}"
        )
    only_sft = set(chosen) == {"sft"}
    if only_sft and method.beta != type(method).beta:
        raise ConfigError(f"beta={method.beta:g} with loss sft alone: it reads none; add another loss, or use sft")


def _check_names(method: DPO) -> None:
    if method.losses is not None:
        if method.loss_type != "sigmoid":
            raise ConfigError(
                f"loss_type={method.loss_type} and losses={dict(method.losses)}: losses holds all of them; set "
                "loss_type=sigmoid, its default"
            )
        if len(method.losses) < 2:
            raise ConfigError(
                f"losses={dict(method.losses)}: it adds up two losses or more; of one alone, set loss_type and "
                "losses=null"
            )
    if method.sft_weight is None:
        return
    others = [
        f"{name}={getattr(method, name)}"
        for name in ("losses", "label_smoothing", "f_divergence", "ld_alpha", "weighting", "reference_sync")
        if getattr(method, name) is not None
    ]
    if method.loss_type != "sigmoid" or others:
        found = f"sft_weight={method.sft_weight:g} with {', '.join(others) or f'loss_type={method.loss_type}'}"
        instead = f"; with others, losses={{sigmoid: 1, sft: {method.sft_weight:g}}}" if others else ""
        raise ConfigError(
            f"{found}: it goes with loss_type=sigmoid; set loss_type=sigmoid, or sft_weight=null{instead}"
        )


def _check_divergence(method: DPO, rows: list[LossRow], named: str) -> None:
    if method.f_alpha is not None and (method.f_divergence != "alpha_divergence" or abs(method.f_alpha - 1) < 1e-6):
        why = "alpha 1 is the reverse KL" if method.f_divergence == "alpha_divergence" else "alpha_divergence reads it"
        found = f"f_alpha={method.f_alpha:g} with f_divergence={method.f_divergence}"
        raise ConfigError(f"{found}: {why}; set f_alpha=null, or f_divergence=alpha_divergence with another f_alpha")
    wrong = [row for row in rows if not row.difference and row is not LOSSES["sft"]]
    if method.f_divergence is not None and (wrong or all(row is LOSSES["sft"] for row in rows)):
        fitting = [name for name, row in LOSSES.items() if row.difference]
        raise ConfigError(
            f"f_divergence={method.f_divergence} with loss {named}: it is defined for functions of the difference of "
            f"rewards, which are {', '.join(fitting)}; set one of these, or f_divergence=null"
        )


def _check_reference(method: DPO, named: str) -> None:
    if named == "sft":
        for option in ("ld_alpha", "reference_sync"):
            if getattr(method, option) is not None:
                raise ConfigError(f"{option} with loss sft alone: it reads none; add another loss, or {option}=null")
    sync = method.reference_sync
    if sync is None:
        return
    if method.adapter is not None:
        raise ConfigError(
            f"reference_sync with adapter.type={method.adapter.type}: the reference of an adapter is the policy "
            "without it, which does not move; set adapter=null, or reference_sync=null"
        )
    if method.num_steps is not None and sync.every_steps >= method.num_steps:
        raise ConfigError(
            f"reference_sync.every_steps={sync.every_steps} with num_steps={method.num_steps}: the reference would "
            f"never move; set reference_sync.every_steps={max(1, method.num_steps // 2)} or less"
        )

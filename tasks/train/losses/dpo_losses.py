"""The losses of DPO: the paper and options of each, which options can be combined, and our four implementations.

TRL computes the others. ``aot``, ``aot_unpaired`` and ``kto_pair`` compare a pair with all others; TRL does so within a
micro batch (and has no ``kto_pair``), ours within the whole step, so that micro batch and workers change nothing. TRL's
``sft`` is a mean over the tokens of a micro batch, ours over its pairs.

Shapes: B pairs of a micro batch, S pairs of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt, Le

from lineage.errors import ConfigError
from tasks.method import AnswerTraining
from tasks.train.best import HELD_OUT_LOSS

if TYPE_CHECKING:
    from torch import Tensor

LossType = Literal[
    "sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm", "kto_pair", "sft",
]  # fmt: skip
Divergence = Literal["forward_kl", "js_divergence", "alpha_divergence"]


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """One loss.

    Args:
        paper: the paper that defines it.
        reads: options that it reads in addition to ``beta``.
        needs: the one among them that it requires.
        difference: whether it is a function of the difference of the two rewards, in which an f-divergence's unknown
            constant cancels: Wang et al. 2023, arXiv:2309.16240.
        is_ours: whether it is computed here, and not by TRL.
        of_step: whether it compares each pair with the others of the step.
    """

    paper: str
    reads: tuple[str, ...] = ()
    needs: str | None = None
    difference: bool = False
    is_ours: bool = False
    of_step: bool = False


_SMOOTHED = ("label_smoothing",)
LOSSES: Mapping[LossType, LossRow] = {
    "sigmoid": LossRow(paper="Rafailov et al. 2023, arXiv:2305.18290, eq. 7", difference=True),
    "ipo": LossRow(paper="Azar et al. 2023, arXiv:2310.12036, eq. 17; rewards per token", difference=True),
    "hinge": LossRow(paper="Zhao et al. 2023, arXiv:2305.10425", difference=True),
    "robust": LossRow(
        paper="Chowdhury et al. 2024, arXiv:2403.00409", reads=_SMOOTHED, needs="label_smoothing", difference=True
    ),
    "exo_pair": LossRow(
        paper="Ji et al. 2024, arXiv:2402.00856, eq. 16", reads=_SMOOTHED, needs="label_smoothing", difference=True
    ),
    "nca_pair": LossRow(paper="Chen et al. 2024, arXiv:2402.05369"),
    "bco_pair": LossRow(paper="Jung et al. 2024, arXiv:2404.04656, without its shift of the rewards"),
    "sppo_hard": LossRow(paper="Wu et al. 2024, arXiv:2405.00675, eq. 4.7"),
    "aot": LossRow(paper="Melnyk et al. 2024, arXiv:2406.05882", reads=_SMOOTHED, is_ours=True, of_step=True),
    "aot_unpaired": LossRow(paper="Melnyk et al. 2024, arXiv:2406.05882", reads=_SMOOTHED, is_ours=True, of_step=True),
    "apo_zero": LossRow(paper="D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7"),
    "apo_down": LossRow(paper="D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8"),
    "discopop": LossRow(paper="Lu et al. 2024, arXiv:2406.08414, eq. 5", reads=("discopop_tau",), difference=True),
    "sigmoid_norm": LossRow(paper="Lambert et al. 2024, arXiv:2411.15124; rewards per token", difference=True),
    "kto_pair": LossRow(paper="Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7", is_ours=True, of_step=True),
    "sft": LossRow(paper="Wang et al. 2024, arXiv:2411.10442: the generation loss of MPO", is_ours=True),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReferenceSync:
    """A reference that follows the policy. TR-DPO: Gorbatovski et al. 2024, arXiv:2404.09656, eq. 5 and 6.

    Its weights are in the checkpoints, so that a resume finds them.
    """

    every_steps: Annotated[int, Gt(0)] = 512  # optimizer steps from one update of the reference to the next
    mixup_alpha: Annotated[float, Gt(0), Le(1)] = 0.6  # share of the policy in the new reference; 1: a copy of it


class LossOptions(AnswerTraining):
    """How the fields of ``tasks/dpo.py`` are used: which can be combined, and their names in TRL."""

    beta: float
    loss_type: LossType
    losses: Mapping[LossType, float] | None
    sft_weight: float | None
    label_smoothing: float | None
    discopop_tau: float | None
    f_divergence: Divergence | None
    f_alpha: float | None
    ld_alpha: float | None
    weighting: str | None
    reference_sync: ReferenceSync | None

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
        stated = {name: value for name, value in options.items() if value is not None}
        return {"beta": self.beta, "loss_type": [*theirs], **stated}

    def check_losses(self) -> None:
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

    def _check_divergence(self, rows: list[LossRow], named: str) -> None:
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


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Summed log-probabilities of the chosen (0) and the rejected (1) answers of pairs, in nats."""

    policy: "tuple[Tensor, Tensor]"
    reference: "tuple[Tensor, Tensor]"

    @property
    def ratios(self) -> "tuple[Tensor, Tensor]":
        """Log-ratios of policy to reference."""
        return self.policy[0] - self.reference[0], self.policy[1] - self.reference[1]


def kto_pair_loss(beta: float, pairs: Pairs, step: Pairs) -> "Tensor":
    """KTO on pairs, per pair (B): each answer is a gain or a loss against the mean KL of the step's other answers.

    Args:
        pairs: of the micro batch.
        step: of the whole step, without gradients.
    Source:
        Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7, with weights of 1; the baseline z0 of the chosen answers is the
        mean log-ratio of the rejected ones, and the other way round, at least 0.
    """
    import torch

    chosen_B, rejected_B = pairs.ratios
    chosen_kl, rejected_kl = (each.mean().clamp(min=0) for each in step.ratios)
    gains_B = 1 - torch.sigmoid(beta * (chosen_B - rejected_kl))
    losses_B = 1 - torch.sigmoid(beta * (chosen_kl - rejected_B))
    return (gains_B + losses_B) / 2


def aot_loss(beta: float, smoothing: float, pairs: Pairs, step: Pairs, places_B: "Tensor") -> "Tensor":
    """Alignment by optimal transport, paired: the sorted margins of the policy above those of the reference, per pair.

    Args:
        pairs: of the micro batch.
        step: of the whole step, without gradients.
        places_B: the places of the pairs in the step.
    Source:
        Melnyk et al. 2024, arXiv:2406.05882, section 3.
    """
    margins_S, reference_S = step.policy[0] - step.policy[1], step.reference[0] - step.reference[1]
    partners_B = reference_S.sort().values[_ranks(margins_S)[places_B]]
    return _smoothed(beta * (pairs.policy[0] - pairs.policy[1] - partners_B), smoothing)


def aot_unpaired_loss(beta: float, smoothing: float, pairs: Pairs, step: Pairs, places_B: "Tensor") -> "Tensor":
    """Alignment by optimal transport, unpaired: the sorted rewards of chosen answers above those of rejected ones.

    Each rank joins a chosen with a rejected answer, of two pairs. Both get its gradient, and it counts once.

    Args:
        pairs, step, places_B: as of ``aot_loss``.
    Source:
        Melnyk et al. 2024, arXiv:2406.05882, section 3.
    """
    (chosen_B, rejected_B), (chosen_S, rejected_S) = pairs.ratios, step.ratios
    below_B = rejected_S.sort().values[_ranks(chosen_S)[places_B]]
    above_B = chosen_S.sort().values[_ranks(rejected_S)[places_B]]
    of_chosen_B, of_rejected_B = (
        _smoothed(beta * each, smoothing) for each in (chosen_B - below_B, above_B - rejected_B)
    )
    return of_chosen_B + of_rejected_B - of_rejected_B.detach()


def _ranks(values_S: "Tensor") -> "Tensor":
    return values_S.argsort(stable=True).argsort()


def _smoothed(margins_B: "Tensor", smoothing: float) -> "Tensor":
    """The sigmoid loss for labels of which a share is wrong."""
    from torch.nn.functional import logsigmoid

    return -(1 - smoothing) * logsigmoid(margins_B) - smoothing * logsigmoid(-margins_B)

"""The losses of DPO: the paper and options of each, and our four implementations.

TRL computes the others. ``aot``, ``aot_unpaired`` and ``kto_pair`` compare a pair with all others; TRL does so within a
micro batch (and has no ``kto_pair``), ours within the whole step, so that micro batch and workers change nothing. TRL's
``sft`` is a mean over the tokens of a micro batch, ours over its pairs.

Shapes: B pairs of a micro batch, S pairs of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt, Le

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

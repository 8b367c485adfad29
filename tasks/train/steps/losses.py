"""The losses of a session by name: sums over the tokens of rows, so that the caller normalises by its weights.

Shapes: B rows of a forward pass, T tokens. Log-probabilities (B, T) are of the target tokens, in nats; padding has
weights and advantages of 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Columns = Mapping[str, "Tensor"]  # (B, T) each
WEIGHTS, LOGPROBS, ADVANTAGES = "weights", "logprobs", "advantages"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss.

    Args:
        about: its formula; lp is the log-probability now, q that of the sampler, r = exp(lp - q), A the advantage.
        paper: where it comes from.
        reads: columns that each row must have beside its target tokens.
        options: name -> default.
        pairs: whether rows are pairs: the chosen one, then the rejected one.
        compute: log-probabilities, columns, options -> the losses, whose sum is the loss.
    """

    about: str
    paper: str
    reads: tuple[str, ...]
    options: Mapping[str, float] = field(default_factory=dict)
    pairs: bool = False
    compute: "Callable[[Tensor, Columns, Mapping[str, float]], Tensor]"


def cross_entropy(logps_BT: "Tensor", columns: Columns, _options: Mapping[str, float]) -> "Tensor":
    """The weighted negative log-likelihood."""
    return -columns[WEIGHTS] * logps_BT


def importance_sampling(logps_BT: "Tensor", columns: Columns, _options: Mapping[str, float]) -> "Tensor":
    """The policy gradient with the ratio to the sampler, not clipped."""
    return -(logps_BT - columns[LOGPROBS]).exp() * columns[ADVANTAGES]


def ppo(logps_BT: "Tensor", columns: Columns, options: Mapping[str, float]) -> "Tensor":
    """The clipped surrogate loss, arXiv:1707.06347, eq. 7."""
    import torch

    ratios_BT, advantages_BT = (logps_BT - columns[LOGPROBS]).exp(), columns[ADVANTAGES]
    clipped_BT = ratios_BT.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratios_BT * advantages_BT, clipped_BT * advantages_BT)


def cispo(logps_BT: "Tensor", columns: Columns, options: Mapping[str, float]) -> "Tensor":
    """The policy gradient, weighted by the clipped ratio as a constant: arXiv:2506.13585, eq. 4."""
    ratios_BT = (logps_BT - columns[LOGPROBS]).exp().detach()
    clipped_BT = ratios_BT.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -clipped_BT * logps_BT * columns[ADVANTAGES]


def dpo(logps_BT: "Tensor", columns: Columns, options: Mapping[str, float]) -> "Tensor":
    """Direct preference optimization, arXiv:2305.18290, eq. 7: one loss a pair."""
    from torch.nn.functional import logsigmoid

    ratios_B = ((logps_BT - columns[LOGPROBS]) * columns[WEIGHTS]).sum(1)
    loss: Tensor = -logsigmoid(options["beta"] * (ratios_B[0::2] - ratios_B[1::2]))
    return loss


_RL = (LOGPROBS, ADVANTAGES)
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(
        about="-weight lp", paper="maximum likelihood", reads=(WEIGHTS,), compute=cross_entropy
    ),
    "importance_sampling": Loss(
        about="-r A", paper="REINFORCE, off policy", reads=_RL, compute=importance_sampling
    ),
    "ppo": Loss(
        about="-min(r A, clip(r) A)", paper="Schulman et al. 2017, arXiv:1707.06347", reads=_RL, compute=ppo,
        options={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "cispo": Loss(
        about="-stop_gradient(clip(r)) lp A", paper="MiniMax 2025, arXiv:2506.13585", reads=_RL, compute=cispo,
        options={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dpo": Loss(
        about="-log sigmoid(beta (weight (lp - q) of the chosen row less that of the rejected)); q is the reference",
        paper="Rafailov et al. 2023, arXiv:2305.18290", reads=(WEIGHTS, LOGPROBS), compute=dpo, pairs=True,
        options={"beta": 0.1},
    ),
}  # fmt: skip

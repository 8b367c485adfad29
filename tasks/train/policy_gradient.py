"""The terms of proximal policy optimization (PPO): pure functions, and the coefficient of the KL.

Shapes: B completions, C tokens of the longest one. A mask (B, C) is 1 on the tokens of a completion, its end token
included; padding after them has no reward, advantage or loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_STEP = 0.2  # largest relative error that the adaptive coefficient reacts to
_EPSILON = 1e-8  # of a variance


def masked_mean(values_BC: "Tensor", mask_BC: "Tensor") -> "Tensor":
    """The mean (a scalar) over the tokens of all completions."""
    return (values_BC * mask_BC).sum() / mask_BC.sum()


def whiten(values_BC: "Tensor", mask_BC: "Tensor", *, shift: bool) -> "Tensor":
    """Scales the values to variance 1 over the tokens of all completions; 0 on padding.

    Args:
        shift: whether their mean becomes 0; else it stays.
    """
    mean = masked_mean(values_BC, mask_BC)
    variance = masked_mean((values_BC - mean) ** 2, mask_BC)
    whitened_BC = (values_BC - mean) * torch.rsqrt(variance + _EPSILON)
    return (whitened_BC if shift else whitened_BC + mean) * mask_BC


def token_rewards(scores_B: "Tensor", log_ratios_BC: "Tensor", mask_BC: "Tensor", kl_coef: float) -> "Tensor":
    """The reward of each token: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; the score is that of the last one.

    Args:
        log_ratios_BC: log-probability of each token under the policy that sampled it minus that under the reference.
    """
    rewards_BC = -kl_coef * log_ratios_BC * mask_BC
    last_B = mask_BC.sum(1).long() - 1
    rewards_BC[torch.arange(len(last_B), device=last_B.device), last_B] += scores_B
    return rewards_BC


def advantages(rewards_BC: "Tensor", values_BC: "Tensor", mask_BC: "Tensor", gamma: float, lam: float) -> "Tensor":
    """Generalized advantage estimates (B, C): Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    The value after the last token is 0. Returns are advantages + values.

    Args:
        values_BC: of the state before each token.
    """
    rewards_BC, values_BC = rewards_BC * mask_BC, values_BC * mask_BC
    following_BC = torch.nn.functional.pad(values_BC[:, 1:], (0, 1))
    deltas_BC = rewards_BC + gamma * following_BC - values_BC
    found, columns = torch.zeros_like(deltas_BC[:, 0]), list[torch.Tensor]()
    for delta_B in reversed(deltas_BC.unbind(1)):
        found = delta_B + gamma * lam * found
        columns.append(found)
    return torch.stack(columns[::-1], dim=1) * mask_BC


def center_by_prompt(values_BC: "Tensor", mask_BC: "Tensor", num_generations: int) -> "Tensor":
    """Subtracts the mean over the tokens of all completions of a prompt, which follow each other; 0 on padding."""
    sums_B, counts_B = (values_BC * mask_BC).sum(1), mask_BC.sum(1)
    means_G = sums_B.view(-1, num_generations).sum(1) / counts_B.view(-1, num_generations).sum(1)
    return (values_BC - means_G.repeat_interleave(num_generations).unsqueeze(1)) * mask_BC


def policy_loss(
    logps_BC: "Tensor", old_logps_BC: "Tensor", advantages_BC: "Tensor", clip_range: float
) -> "tuple[Tensor, Tensor]":
    """The clipped surrogate loss of each token, arXiv:1707.06347, eq. 7; and where it is clipped: 1, else 0."""
    ratios_BC = torch.exp(logps_BC - old_logps_BC)
    losses_BC = -advantages_BC * ratios_BC
    clipped_BC = -advantages_BC * ratios_BC.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(losses_BC, clipped_BC), (clipped_BC > losses_BC).float()


def value_loss(
    values_BC: "Tensor", old_values_BC: "Tensor", returns_BC: "Tensor", clip_range: float | None
) -> "tuple[Tensor, Tensor]":
    """Half the squared error of each value, clipped as the ratio is; and where it is clipped: 1, else 0."""
    losses_BC = 0.5 * (values_BC - returns_BC) ** 2
    if clip_range is None:
        return losses_BC, torch.zeros_like(losses_BC)
    near_BC = old_values_BC + (values_BC - old_values_BC).clamp(-clip_range, clip_range)
    clipped_BC = 0.5 * (near_BC - returns_BC) ** 2
    return torch.maximum(losses_BC, clipped_BC), (clipped_BC > losses_BC).float()


def explained_variance(values_BC: "Tensor", returns_BC: "Tensor", mask_BC: "Tensor") -> float:
    """1 - Var[returns - values] / Var[returns] over the tokens: 1 where the values are the returns."""
    errors_BC = returns_BC - values_BC
    variances = [masked_mean((each - masked_mean(each, mask_BC)) ** 2, mask_BC) for each in (errors_BC, returns_BC)]
    return float(1 - variances[0] / (variances[1] + _EPSILON))


@dataclass(kw_only=True)
class KLCoefficient:
    """Strength of the KL penalty, adapted after each batch: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    Args:
        target: KL per completion in nats; None: the coefficient is fixed.
        horizon: completions in which a KL that is off by a fifth or more changes it by a factor of about e ** 0.2.
    """

    value: float
    target: float | None
    horizon: int

    def update(self, kl: float, num_completions: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_STEP), _STEP)
            self.value *= 1 + error * num_completions / self.horizon

    def state_dict(self) -> Mapping[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.value = float(str(state["value"]))

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
    Source:
        Huang et al. 2024, arXiv:2403.17031, details 3.2 (rewards keep their mean) and 3.3 (advantages do not).
    """
    mean = masked_mean(values_BC, mask_BC)
    variance = masked_mean((values_BC - mean) ** 2, mask_BC)
    whitened_BC = (values_BC - mean) * torch.rsqrt(variance + _EPSILON)
    return (whitened_BC if shift else whitened_BC + mean) * mask_BC


def token_rewards(scores_B: "Tensor", log_ratios_BC: "Tensor", mask_BC: "Tensor", kl_coef: float) -> "Tensor":
    """The reward (B, C) of each token: the penalty of its log-ratio, and at the last token the completion's score.

    Args:
        log_ratios_BC: log-probability of each token under the policy that sampled it minus that under the reference.
    Source:
        Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    rewards_BC = -kl_coef * log_ratios_BC * mask_BC
    last_B = mask_BC.sum(1).long() - 1
    rewards_BC[torch.arange(len(last_B), device=last_B.device), last_B] += scores_B
    return rewards_BC


def advantages(rewards_BC: "Tensor", values_BC: "Tensor", mask_BC: "Tensor", gamma: float, lam: float) -> "Tensor":
    """Generalized advantage estimates (B, C); the value after the last token is 0. Returns are advantages + values.

    Args:
        values_BC: of the state before each token.
    Source:
        Schulman et al. 2015, arXiv:1506.02438, eq. 10 and 16.
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
    """Subtracts from each token's value the mean over the tokens of all completions of its prompt; 0 on padding.

    Args:
        num_generations: completions per prompt, which follow each other.
    """
    sums_G, counts_G = (each_BC.sum(1).view(-1, num_generations).sum(1) for each_BC in (values_BC * mask_BC, mask_BC))
    means_B = (sums_G / counts_G).repeat_interleave(num_generations)
    return (values_BC - means_B.unsqueeze(1)) * mask_BC


def policy_loss(
    logps_BC: "Tensor", old_logps_BC: "Tensor", advantages_BC: "Tensor", clip_range: float
) -> "tuple[Tensor, Tensor]":
    """The clipped surrogate loss (B, C), to minimize, and where it is clipped: 1, else 0.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    ratios_BC = torch.exp(logps_BC - old_logps_BC)
    losses_BC = -advantages_BC * ratios_BC
    clipped_BC = -advantages_BC * ratios_BC.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(losses_BC, clipped_BC), (clipped_BC > losses_BC).float()


def value_loss(
    values_BC: "Tensor", old_values_BC: "Tensor", returns_BC: "Tensor", clip_range: float | None
) -> "tuple[Tensor, Tensor]":
    """Half the squared error (B, C) of the values, and where it is clipped: 1, else 0.

    Args:
        clip_range: largest difference to the old value that lowers the loss; None: any.
    Source:
        Huang et al. 2024, arXiv:2403.17031, detail 3.5; eq. 9 of arXiv:1707.06347 without clipping.
    """
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
    """Strength of the KL penalty: fixed, or adapted after each batch so that the KL approaches a target.

    Args:
        value: before the first batch.
        target: KL per completion in nats; None: the coefficient is fixed.
        horizon: completions after which the coefficient of a KL that is off by a fifth has changed by a factor of about
            e ** 0.2.
    Source:
        Ziegler et al. 2019, arXiv:1909.08593, section 2.2; its K_beta is ``num_completions / horizon``.
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

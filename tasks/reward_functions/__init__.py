"""Reward functions: they score answers for reinforcement, and measure policies in an evaluation."""

from tasks.reward_functions.function import RewardFunction, Rewards, code_of_rewards, identity_of
from tasks.reward_functions.scorer import Scorer, check_columns, check_rewards, scorers

__all__ = [
    "RewardFunction",
    "Rewards",
    "Scorer",
    "check_columns",
    "check_rewards",
    "code_of_rewards",
    "identity_of",
    "scorers",
]

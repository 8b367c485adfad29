"""The terms of PPO against values worked out by hand."""

import pytest
import torch

from tasks.train.losses.actor_critic import (
    KLCoefficient,
    advantages,
    center_by_prompt,
    explained_variance,
    policy_loss,
    token_rewards,
    value_loss,
    whiten,
)

PADDING = 99.0


def near(*rows: list[float]) -> object:
    return pytest.approx(torch.tensor(rows), abs=1e-6)


def test_advantages_of_three_tokens_and_padding() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, PADDING]])
    values = torch.tensor([[0.5, 0.25, 0.75, PADDING]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    # deltas: 0.9 * 0.25 - 0.5 = -0.275; 0.9 * 0.75 - 0.25 = 0.425; 1 - 0.75 = 0.25; factor 0.9 * 0.5 = 0.45
    expected = [-0.275 + 0.45 * (0.425 + 0.45 * 0.25), 0.425 + 0.45 * 0.25, 0.25, 0.0]
    assert expected == pytest.approx([-0.033125, 0.5375, 0.25, 0.0])
    assert advantages(rewards, values, mask, gamma=0.9, lam=0.5) == near(expected)


def test_with_gamma_and_lambda_of_1_an_advantage_is_the_return_less_the_value() -> None:
    mask = torch.ones(1, 3)
    found = advantages(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[10.0, 20.0, 30.0]]), mask, gamma=1.0, lam=1.0)
    assert found == near([-3.0, -14.0, -26.0])


def test_the_reward_of_a_token_is_its_penalty_and_of_the_last_one_the_score_too() -> None:
    log_ratios = torch.tensor([[0.5, -1.0, 0.25], [1.0, PADDING, PADDING]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    found = token_rewards(torch.tensor([2.0, -1.0]), log_ratios, mask, kl_coef=0.1)
    assert found == near([-0.05, 0.1, 1.975], [-1.1, 0.0, 0.0])


def test_values_are_whitened_over_the_tokens_and_not_over_padding() -> None:
    values, mask = torch.tensor([[1.0, 3.0], [5.0, PADDING]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    spread = 1.224745  # 2 / sqrt(8 / 3): the mean is 3, the variance 8 / 3
    assert whiten(values, mask, shift=True) == near([-spread, 0.0], [spread, 0.0])
    assert whiten(values, mask, shift=False) == near([3 - spread, 3.0], [3 + spread, 0.0])


@pytest.mark.parametrize("value", [0.3, 0.7, -7.3, 1e4 / 3])
def test_equal_values_are_not_apart_by_rounding(value: float) -> None:
    mask = torch.ones(8, 7)
    values = torch.full((8, 7), value)
    assert not whiten(values, mask, shift=True).any() and not center_by_prompt(values, mask, num_generations=4).any()
    assert torch.allclose(whiten(values, mask, shift=False), values, rtol=1e-6)
    values[0, 0] *= 1.001
    assert whiten(values, mask, shift=True).all()
    found = center_by_prompt(values, mask, num_generations=4)
    assert found[:4].all() and not found[4:].any()


def test_advantages_are_centred_over_the_tokens_of_a_prompt() -> None:
    values = torch.tensor([[1.0, 2.0], [6.0, PADDING], [0.0, 0.0], [2.0, 2.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    found = center_by_prompt(values, mask, num_generations=2)  # the means are 3 and 1
    assert found == near([-2.0, -1.0], [3.0, 0.0], [-1.0, -1.0], [1.0, 1.0])


def test_the_ratio_is_clipped_where_that_makes_the_loss_higher() -> None:
    ratios = torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.1]])
    gains = torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0]])
    old = torch.full((1, 5), -2.0)
    losses, is_clipped = policy_loss(old + ratios.log(), old, gains, clip_range=0.2)
    assert losses == near([-1.2, -0.5, 1.5, 0.8, -1.1])
    assert is_clipped.tolist() == [[1.0, 0.0, 0.0, 1.0, 0.0]]


def test_no_gradient_pushes_a_ratio_beyond_the_clip_range() -> None:
    logps = torch.tensor([[1.5, 0.5, 1.5, 0.5]]).log().requires_grad_()
    losses, _ = policy_loss(logps, torch.zeros(1, 4), torch.tensor([[1.0, 1.0, -1.0, -1.0]]), clip_range=0.2)
    losses.sum().backward()
    assert logps.grad == near([0.0, -0.5, 1.5, 0.0])


def test_the_value_loss_is_clipped_where_that_makes_it_higher() -> None:
    values, old, returns = torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, 1.0]])
    losses, is_clipped = value_loss(values, old, returns, clip_range=0.5)
    assert losses == near([1.125, 0.5])  # (1.5 - 3)^2 / 2 > (2 - 3)^2 / 2; (1.5 - 1)^2 / 2 < (2 - 1)^2 / 2
    assert is_clipped.tolist() == [[1.0, 0.0]]
    assert value_loss(values, old, returns, clip_range=None)[0] == near([0.5, 0.5])


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(12.0, 0.202), (5.4, 0.199), (0.0, 0.198), (6.0, 0.2)],
    ids=["clipped above", "in between", "clipped below", "on target"],
)
def test_the_coefficient_rises_with_a_kl_above_its_target(kl: float, expected: float) -> None:
    adaptive = KLCoefficient(value=0.2, target=6.0, horizon=10_000)
    adaptive.update(kl, num_completions=500)  # 0.2 * (1 + error * 500 / 10,000)
    assert adaptive.value == pytest.approx(expected)
    fixed = KLCoefficient(value=0.2, target=None, horizon=10_000)
    fixed.update(kl, num_completions=500)
    assert fixed.value == 0.2


def test_a_coefficient_is_restored() -> None:
    adaptive, restored = (KLCoefficient(value=each, target=1.0, horizon=100) for each in (0.2, 0.7))
    adaptive.update(3.0, 10)
    restored.load_state_dict(adaptive.state_dict())
    assert restored.value == adaptive.value != 0.2


@pytest.mark.parametrize(("values", "expected"), [([1.0, 3.0], 1.0), ([2.0, 2.0], 0.0), ([3.0, 1.0], -3.0)])
def test_how_much_of_the_returns_the_values_explain(values: list[float], expected: float) -> None:
    returns, mask = torch.tensor([[1.0, 3.0, PADDING]]), torch.tensor([[1.0, 1.0, 0.0]])
    found = explained_variance(torch.tensor([[*values, PADDING]]), returns, mask)
    assert found == pytest.approx(expected, abs=1e-6)

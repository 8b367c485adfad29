"""The losses of DPO that are ours, against values worked out by hand."""

import math

import pytest
import torch

from tasks.train.losses.dpo_losses import Pairs, aot_loss, aot_unpaired_loss, kto_pair_loss
from tasks.train.losses.pair_loss import Logps, rpo_loss


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def pairs(policy: tuple[list[float], list[float]], reference: tuple[list[float], list[float]]) -> Pairs:
    chosen, rejected = (torch.tensor(each, requires_grad=True) for each in policy)
    return Pairs(policy=(chosen, rejected), reference=(torch.tensor(reference[0]), torch.tensor(reference[1])))


def detached(step: Pairs) -> Pairs:
    return Pairs(policy=(step.policy[0].detach(), step.policy[1].detach()), reference=step.reference)


# Log-ratios: chosen 1 and 3, rejected -4 and 2.
STEP = (([-9.0, -5.0], [-12.0, -4.0]), ([-10.0, -8.0], [-8.0, -6.0]))


def test_kto_pair_has_the_mean_kl_of_the_other_answers_as_its_baseline() -> None:
    step = pairs(*STEP)
    chosen_kl, rejected_kl = (1 + 3) / 2, 0.0  # the mean of the rejected, -1, is clamped
    expected = [
        (1 - sigmoid(0.5 * (1 - rejected_kl)) + 1 - sigmoid(0.5 * (chosen_kl + 4))) / 2,
        (1 - sigmoid(0.5 * (3 - rejected_kl)) + 1 - sigmoid(0.5 * (chosen_kl - 2))) / 2,
    ]
    assert kto_pair_loss(0.5, step, detached(step)).tolist() == pytest.approx(expected)


def test_kto_pair_has_no_gradient_through_its_baseline() -> None:
    step = pairs(*STEP)
    kto_pair_loss(0.5, step, detached(step)).sum().backward()
    slope = sigmoid(0.5 * 1) * (1 - sigmoid(0.5 * 1)) * 0.5 / 2
    assert step.policy[0].grad is not None and float(step.policy[0].grad[0]) == pytest.approx(-slope)


def test_aot_compares_sorted_margins_with_those_of_the_reference() -> None:
    step = pairs(*STEP)  # margins of the policy 3 and -1, of the reference -2 and -2
    step = Pairs(policy=step.policy, reference=(torch.tensor([-10.0, -8.0]), torch.tensor([-8.0, -7.0])))
    # The reference's margins are -2 and -1: the larger, of the second pair, is compared with the first pair's.
    expected = [-math.log(sigmoid(0.5 * (3 + 1))), -math.log(sigmoid(0.5 * (-1 + 2)))]
    found = aot_loss(0.5, 0.0, step, detached(step), torch.arange(2))
    assert found.tolist() == pytest.approx(expected)
    smoothed = [-0.9 * math.log(sigmoid(2.0)) - 0.1 * math.log(sigmoid(-2.0))]
    first = Pairs(policy=(step.policy[0][:1], step.policy[1][:1]), reference=step.reference)
    assert aot_loss(0.5, 0.1, first, detached(step), torch.arange(1)).tolist() == pytest.approx(smoothed)


def test_aot_unpaired_joins_answers_of_one_rank_and_gives_both_the_gradient() -> None:
    step = pairs(*STEP)  # chosen 1 and 3 with rejected -4 and 2
    found = aot_unpaired_loss(0.5, 0.0, step, detached(step), torch.arange(2))
    assert float(found.detach().mean()) == pytest.approx(
        (-math.log(sigmoid(0.5 * (1 + 4))) - math.log(sigmoid(0.5 * (3 - 2)))) / 2
    )
    found.sum().backward()
    slopes = [0.5 * (1 - sigmoid(0.5 * (1 + 4))), 0.5 * (1 - sigmoid(0.5 * (3 - 2)))]
    assert step.policy[0].grad is not None and step.policy[1].grad is not None
    assert step.policy[0].grad.tolist() == pytest.approx([-each for each in slopes])
    assert step.policy[1].grad.tolist() == pytest.approx(slopes)


def test_answers_are_joined_across_the_micro_batches_of_a_step() -> None:
    """Chosen 3 and 1 with rejected -4 and 2: the first chosen answer is joined with the second pair's rejected one."""
    step = pairs(([-5.0, -9.0], [-12.0, -4.0]), ([-8.0, -10.0], [-8.0, -6.0]))
    halves = [
        Pairs(
            policy=(step.policy[0][part], step.policy[1][part]),
            reference=(step.reference[0][part], step.reference[1][part]),
        )
        for part in (slice(0, 1), slice(1, 2))
    ]
    found = [
        aot_unpaired_loss(0.5, 0.0, half, detached(step), torch.tensor([place])) for place, half in enumerate(halves)
    ]
    expected = [-math.log(sigmoid(0.5 * (3 - 2))), -math.log(sigmoid(0.5 * (1 + 4)))]
    assert [float(each.detach()) for each in found] == pytest.approx(expected)


def test_rpo_is_the_sigmoid_loss_less_the_chosen_answers_gain_per_token():
    def logps(policy: float, reference: float, num_tokens: float) -> Logps:
        return Logps(
            sum_B=torch.tensor([policy]), num_tokens_B=torch.tensor([num_tokens]), reference=torch.tensor([reference])
        )

    # Log-ratios: chosen 2 over 4 tokens, rejected -1.
    loss, metrics = rpo_loss(0.1, 0.5, logps(-6.0, -8.0, 4.0), logps(-5.0, -4.0, 2.0))
    assert float(loss) == pytest.approx(-math.log(sigmoid(0.3)) - 0.5 * 2 / 4)
    assert {name: float(each) for name, each in metrics.items()} == pytest.approx(
        {"rewards/chosen": 0.2, "rewards/rejected": -0.1, "rewards/margins": 0.3, "rewards/accuracies": 1.0}
    )

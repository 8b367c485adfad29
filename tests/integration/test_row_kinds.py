"""Prompts are trained on: their tokens, their columns, and their count reach the training."""

from itertools import accumulate
from pathlib import Path

import pytest

from lineage.errors import ConfigError
from tasks.best import Best
from tasks.reward_functions import RewardFunction
from tasks.train.rollouts import Rollouts
from tests import completion_scores, training

Generated = list[tuple[list[int], list[int]]]  # a prompt and its completion, as tokens


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"), num_rows=12)


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[Generated]:
    """Of each generation."""
    found: list[Generated] = []
    generate = Rollouts.generate

    def kept(self: Rollouts, model: object, examples: list[dict], step: int) -> list[list[int]]:
        completions = generate(self, model, examples, step)  # type: ignore[arg-type]
        found.append([([*each["prompt_ids"]], ids) for each, ids in zip(examples, completions, strict=True)])
        return completions

    monkeypatch.setattr(Rollouts, "generate", kept)
    return found


def test_prompts_train_grpo_and_their_columns_reach_the_reward(
    root: Path, tmp_path: Path, generated: list[Generated]
) -> None:
    completion_scores.ASKED.clear()
    rewards = {"asked": RewardFunction(function="python:tests.completion_scores.asked")}
    trained = training.train(training.method("grpo", num_steps=2, rewards=rewards), root, tmp_path / "output")
    assert trained.metrics["prompt_tokens"] > 0 and "trained_tokens_percent" not in trained.metrics
    assert {answer for _, answer in completion_scores.ASKED} & {0, 2, 4, 6, 8, 10}
    assert all(prompt[0]["role"] == "user" for prompt, _ in completion_scores.ASKED)  # type: ignore[index]
    counts = [metrics["num_tokens"] for _, metrics in trained.reports]
    assert counts == [*accumulate(sum(len(ids) for each in step for ids in each) for step in generated)]


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_answers_are_generated_from_the_tokens_of_a_row_which_may_be_cut(
    root: Path, tmp_path: Path, generated: list[Generated], name: str
) -> None:
    fields = {"num_steps": 1, "max_length": 13, "max_completion_length": 4}
    trained = training.train(training.method(name, **fields), root, tmp_path / "output")
    assert trained.metrics["prompts_cut"] > 0
    assert {len(prompt) for step in generated for prompt, _ in step} == {9}


def test_prompts_have_no_loss_to_choose_the_best_model_by() -> None:
    with pytest.raises(ConfigError, match=r"GRPO reads prompts, which have no loss .* set best.metric to one"):
        training.method("grpo", best=Best(every_steps=1))
    assert training.method("grpo", best=Best(every_steps=1, metric="reward", mode="max"))

"""Prompts are trained on: TRL's own trainers take what their record makes of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import pytest

from lineage.errors import ConfigError
from tasks.best import Best
from tasks.data.kinds import PROMPTS
from tasks.method import POLICY, Training
from tests.training import FIELDS, Trained, train, write_inputs

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class GRPO(Training):
    """Shao et al. 2024, arXiv:2402.03300, or RLOO, arXiv:2402.14740, as in TRL; the reward is an answer's length."""

    reads: ClassVar = PROMPTS
    models: ClassVar = {"policy": POLICY}
    baseline: Literal["GRPO", "RLOO"] = "GRPO"

    def trainer(self, run: "TrainingRun") -> "Trainer":
        import trl

        class Silent(getattr(trl, f"{self.baseline}Trainer")):  # type: ignore[misc]
            """Logs no count of tokens."""

            def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
                COUNTED.extend(self._metrics["train"].pop("num_tokens", []))
                super().log(logs, *args, **kwargs)

            def _generate_single_turn(self, prompt_ids: list[list[int]], *args: object, **kwargs: object) -> object:
                READ.extend(prompt_ids)
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)

        config = getattr(trl, f"{self.baseline}Config")
        return run.trl(Silent, config, reward_funcs=[rewarded], num_generations=4, max_completion_length=4)


ASKED: list[tuple[object, object]] = []
COUNTED: list[float] = []  # by TRL
READ: list[list[int]] = []  # what answers are generated from


def rewarded(prompts: list[object], completions: list[object], answer: list[object], **_: object) -> list[float]:
    ASKED.extend(zip(prompts, answer, strict=True))
    return [float(len(str(each)) % 7) for each in completions]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), num_rows=12)


def run(stage: Training, root: Path, tmp_path: Path) -> Trained:
    return train(stage, root, tmp_path / "output")


def test_prompts_train_grpo_and_their_columns_reach_the_reward(root: Path, tmp_path: Path) -> None:
    ASKED.clear()
    COUNTED.clear()
    trained = run(GRPO(**{**FIELDS, "num_steps": 2}), root, tmp_path)  # type: ignore[arg-type]
    assert trained.metrics["prompt_tokens"] > 0 and "trained_tokens_percent" not in trained.metrics
    assert ASKED and {answer for _, answer in ASKED} & {0, 2, 4, 6, 8, 10}
    assert all(prompt[0]["role"] == "user" for prompt, _ in ASKED)  # type: ignore[index]
    counts = [metrics["num_tokens"] for _, metrics in trained.reports]
    assert counts == COUNTED, "tokens of prompts and answers, though the trainer logs no count"
    assert 0 < counts[0] < counts[1]


@pytest.mark.parametrize("baseline", ["GRPO", "RLOO"])
def test_answers_are_generated_from_the_tokens_of_a_row_which_may_be_cut(
    root: Path, tmp_path: Path, baseline: str
) -> None:
    READ.clear()
    fields = {**FIELDS, "num_steps": 1, "max_length": 9, "baseline": baseline}
    trained = run(GRPO(**fields), root, tmp_path)  # type: ignore[arg-type]
    assert trained.metrics["prompts_cut"] > 0
    assert {len(ids) for ids in READ} == {9}


def test_prompts_have_no_loss_to_choose_the_best_model_by() -> None:
    with pytest.raises(ConfigError, match=r"GRPO reads prompts, which have no loss .* set best.metric to one"):
        GRPO(**FIELDS, best=Best(every_steps=1))  # type: ignore[arg-type]
    assert GRPO(**FIELDS, best=Best(every_steps=1, metric="reward", mode="max"))  # type: ignore[arg-type]

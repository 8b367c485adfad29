"""Single answers and prompts are trained on: TRL's own trainers take what their records make of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from tasks.data.kinds import PROMPTS, UNPAIRED
from tasks.method import FROZEN_POLICY, POLICY, Training
from tests.training import FIELDS, Trained, train, write_inputs

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class KTO(Training):
    """Ethayarajh et al. 2024, arXiv:2402.01306, as TRL has it."""

    reads: ClassVar = UNPAIRED
    models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}
    beta: float = 0.1

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import KTOConfig, KTOTrainer

        return run.trl(KTOTrainer, KTOConfig, beta=self.beta)


@dataclass(frozen=True, kw_only=True)
class GRPO(Training):
    """Shao et al. 2024, arXiv:2402.03300, as TRL has it; the reward is that of an answer's length."""

    reads: ClassVar = PROMPTS
    models: ClassVar = {"policy": POLICY}

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import GRPOConfig, GRPOTrainer

        class Silent(GRPOTrainer):
            """Logs no count of tokens."""

            def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
                COUNTED.extend(self._metrics["train"].pop("num_tokens", []))
                super().log(logs, *args, **kwargs)

        return run.trl(Silent, GRPOConfig, reward_funcs=[rewarded], num_generations=4, max_completion_length=4)


ASKED: list[tuple[object, object]] = []
COUNTED: list[float] = []  # by TRL


def rewarded(prompts: list[object], completions: list[object], answer: list[object], **_: object) -> list[float]:
    ASKED.extend(zip(prompts, answer, strict=True))
    return [float(len(str(each)) % 7) for each in completions]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"), num_rows=12)


def run(stage: Training, root: Path, tmp_path: Path) -> Trained:
    return train(stage, root, tmp_path / "output")


def test_single_answers_train_kto(root: Path, tmp_path: Path) -> None:
    trained = run(KTO(**FIELDS), root, tmp_path)  # type: ignore[arg-type]
    assert len(trained.losses) == 3 and trained.losses[0] == pytest.approx(0.5, abs=1e-4)  # policy and reference agree
    assert trained.losses[2] != pytest.approx(0.5, abs=1e-4)
    assert (trained.metrics["desirable_rows"], trained.metrics["undesirable_rows"]) == (8, 4)


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

"""ORPO, SimPO and CPO: their terms by hand, and TRL's trainers on the same rows."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tasks.context import Resources
from tasks.cpo import CPO
from tasks.method import Adapter, Training
from tasks.orpo import ORPO
from tasks.simpo import SimPO
from tasks.train.losses.pair_loss import Logps
from tests import training

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = Adapter(rank=4, alpha=8)
LOGGED = ("loss", "rewards/chosen", "rewards/margins", "rewards/accuracies", "grad_norm")


class OnTokens:
    """TRL's trainer on rows that are tokens already."""

    def tokenize_row(self, feature: dict[str, object], model: object = None) -> dict[str, object]:
        return feature


def collator(pad: int):
    """Batches as TRL's trainers make them."""

    def collate(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = {}
        for side in ("chosen", "rejected"):
            rows = [(each["prompt_ids"], each[f"{side}_ids"]) for each in examples]
            longest = max(len(prompt) + len(answer) for prompt, answer in rows)
            columns: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
            for prompt, answer in rows:
                padding = longest - len(prompt) - len(answer)
                columns["input_ids"].append([*prompt, *answer, *[pad] * padding])
                columns["attention_mask"].append([1] * (longest - padding) + [0] * padding)
                columns["labels"].append([-100] * len(prompt) + [*answer] + [-100] * padding)
            batch |= {f"{side}_{name}": torch.tensor(each) for name, each in columns.items()}
        return batch

    return collate


def trl_trainer(run: "TrainingRun", trainer: type, config: type, **own: object) -> "Trainer":
    theirs: Any = type(trainer.__name__, (OnTokens, trainer), {})
    return run.trl(theirs, config, data_collator=collator(run.policy.tokenizer.pad_token_id), **own)


def orpo_on_answers() -> type:
    from trl.experimental.orpo import ORPOTrainer

    class OnAnswers(ORPOTrainer):
        """The likelihood is a mean over answers of their means per token, as in eq. 3 of the paper."""

        def concatenated_forward(self, *args: object) -> tuple[object, ...]:
            found = super().concatenated_forward(*args)
            return (*found[:4], -found[0].mean(), *found[5:])

    return OnAnswers


@dataclass(frozen=True, kw_only=True)
class TrlORPO(ORPO):
    on_answers: bool = True

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        trainer = orpo_on_answers() if self.on_answers else ORPOTrainer
        return trl_trainer(run, trainer, ORPOConfig, beta=self.beta)


@dataclass(frozen=True, kw_only=True)
class TrlSimPO(SimPO):
    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        own = {"beta": self.beta, "simpo_gamma": self.gamma, "loss_type": "simpo", "cpo_alpha": self.sft_weight or 0.0}
        return trl_trainer(run, CPOTrainer, CPOConfig, **own)


@dataclass(frozen=True, kw_only=True)
class TrlCPO(CPO):
    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        own = {"beta": self.beta, "loss_type": self.loss_type, "cpo_alpha": self.sft_weight}
        return trl_trainer(run, CPOTrainer, CPOConfig, **own)


def stage(cls: type[Training], **fields: object) -> Training:
    return cls(**{**training.FIELDS, **fields})  # type: ignore[arg-type]


def logps(*sums: float, tokens: int = 2) -> Logps:
    return Logps(sum_B=torch.tensor(sums), num_tokens_B=torch.tensor([tokens] * len(sums)))


def test_orpo_is_that_of_the_paper() -> None:
    # Means per token ln 0.5 and ln 0.2: odds 1 and 0.25, log odds ratio ln 4, sigmoid 0.8.
    chosen, rejected = logps(2 * -0.6931472), logps(2 * -1.6094379)
    loss, metrics = stage(ORPO, beta=0.5).loss(chosen, rejected)  # type: ignore[attr-defined]
    assert float(metrics["log_odds_chosen"]) == pytest.approx(1.3862944, abs=1e-6)
    assert float(loss) == pytest.approx(0.6931472 + 0.5 * 0.2231436, abs=1e-6)  # - ln 0.5 - 0.5 ln 0.8


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    certain = logps(0.0)
    certain.sum_B.requires_grad_()
    loss, _ = stage(ORPO).loss(certain, logps(-4.0))  # type: ignore[attr-defined]
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(certain.sum_B.grad).all()


def test_simpo_is_that_of_the_paper() -> None:
    # Rewards 2 (-1) and 2 (-2): a margin of 2, less the target 0.5; - ln sigmoid(1.5) = 0.2014133.
    loss, metrics = stage(SimPO, beta=2.0, gamma=0.5).loss(logps(-2.0), logps(-4.0))  # type: ignore[attr-defined]
    assert float(loss) == pytest.approx(0.2014133, abs=1e-6)
    assert float(metrics["rewards/margins"]) == 2.0 and float(metrics["rewards/accuracies"]) == 1.0
    likely, metrics = stage(SimPO, beta=2.0, gamma=0.5, sft_weight=0.25).loss(logps(-2.0), logps(-4.0))  # type: ignore[attr-defined]
    assert float(likely) == pytest.approx(0.2014133 + 0.25 * 1.0, abs=1e-6) and float(metrics["nll_loss"]) == 1.0


@pytest.mark.parametrize(
    ("loss_type", "contrast"),
    [
        ("sigmoid", 0.3132617),  # - ln sigmoid(0.5 (6 - 4)), of whole answers
        ("hinge", 0.0),  # 1 - 1
        ("ipo", 0.0),  # (3 - 2) - 1 / (2 x 0.5), per token
    ],
)
def test_cpo_is_that_of_the_paper(loss_type: str, contrast: float) -> None:
    recipe = stage(CPO, beta=0.5, sft_weight=0.25, loss_type=loss_type)
    loss, metrics = recipe.loss(logps(-4.0), logps(-6.0))  # type: ignore[attr-defined]
    assert float(loss) == pytest.approx(contrast + 0.25 * 2.0, abs=1e-6)
    assert float(metrics["nll_loss"]) == 2.0
    other, _ = recipe.loss(logps(-6.0), logps(-4.0))  # type: ignore[attr-defined]
    worse = {"sigmoid": 1.3132617, "hinge": 2.0, "ipo": 4.0}[loss_type]
    assert float(other) == pytest.approx(worse + 0.25 * 3.0, abs=1e-6)


CASES = {
    "orpo": (ORPO, TrlORPO, {}, 4),
    "simpo": (SimPO, TrlSimPO, {}, 4),
    # TRL's likelihood is a mean over the tokens of a micro batch: that of an answer where it has one pair.
    "simpo-sft": (SimPO, TrlSimPO, {"sft_weight": 0.5}, 1),
    "cpo": (CPO, TrlCPO, {}, 1),
    "cpo-hinge": (CPO, TrlCPO, {"loss_type": "hinge", "sft_weight": 0.0}, 4),
    "cpo-ipo": (CPO, TrlCPO, {"loss_type": "ipo"}, 1),
}


SLOW = {"simpo", "cpo"}  # the others show their terms too


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in CASES]
)
@pytest.mark.parametrize("adapter", [pytest.param(None, marks=pytest.mark.slow), LORA], ids=["full", "lora"])
def test_it_trains_as_trls_trainer(root: Path, tmp_path: Path, case: str, adapter: Adapter | None) -> None:
    ours, theirs, fields, size = CASES[case]
    expected, found = (
        training.train(
            stage(cls, adapter=adapter, **fields), root, tmp_path / cls.__name__,
            resources=Resources(micro_batch_size=size),
        )
        for cls in (theirs, ours)
    )  # fmt: skip
    for (_, theirs_at), (_, ours_at) in zip(expected.reports, found.reports, strict=True):
        for name in LOGGED:
            assert ours_at[name] == pytest.approx(theirs_at[name], abs=1e-5, rel=1e-5), name
    for name, weights in training.weights(expected.output).items():
        torch.testing.assert_close(training.weights(found.output)[name], weights, atol=1e-5, rtol=1e-5)

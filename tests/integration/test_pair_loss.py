"""A loss on pairs of log-probabilities trains as TRL's trainer does."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import torch
from annotated_types import Gt
from torch.nn.functional import logsigmoid

from lineage.errors import ConfigError, PipelineError
from tasks.dpo import DPO
from tasks.method import FROZEN_POLICY, POLICY, Adapter, Training
from tasks.train.pair_loss import Logps, PairLoss
from tests import training
from tests.tiny_models import write_model

LORA = Adapter(rank=4, alpha=8)


@dataclass(frozen=True, kw_only=True)
class OwnDPO(PairLoss):
    models: ClassVar[Mapping[str, str]] = {"policy": POLICY, "reference": FROZEN_POLICY}
    beta: Annotated[float, Gt(0)] = 0.1

    def loss(self, chosen: Logps, rejected: Logps) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        chosen_B, rejected_B = chosen.sum_B - chosen.reference_sum_B, rejected.sum_B - rejected.reference_sum_B
        metrics = {"rewards/chosen": self.beta * chosen_B, "rewards/rejected": self.beta * rejected_B}
        return -logsigmoid(self.beta * (chosen_B - rejected_B)).mean(), metrics


@dataclass(frozen=True, kw_only=True)
class AsksForAReference(PairLoss):
    def loss(self, chosen: Logps, rejected: Logps) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return chosen.reference_mean_B.mean(), {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = training.write_inputs(tmp_path_factory.mktemp("inputs"))
    for architecture in ("gpt2", "qwen3_moe"):
        write_model(root / architecture, architecture)
    return root


def stage(cls: type[Training], **fields: object) -> Training:
    return cls(**{**training.FIELDS, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "adapter"), [("policy", None), ("policy", LORA), ("gpt2", None), ("qwen3_moe", None)]
)
def test_dpo_as_a_pair_loss_is_trls(root: Path, tmp_path: Path, policy: str, adapter: Adapter | None) -> None:
    runs = [
        training.train(stage(cls, adapter=adapter), root, tmp_path / cls.__name__, policy=root / policy)
        for cls in (DPO, OwnDPO)
    ]
    theirs, ours = (run.reports for run in runs)
    for (_, expected), (_, found) in zip(theirs, ours, strict=True):
        for name in ("loss", "rewards/chosen", "rewards/rejected", "logps/chosen", "grad_norm", "num_tokens"):
            assert found[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-5), name
    assert training.same(*(training.weights(run.output) for run in runs))


def test_another_reference_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.train import models

    frozen = models.frozen

    def other(model: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.2)
        return frozen(model)

    monkeypatch.setattr(models, "frozen", other)
    with pytest.raises(PipelineError, match=r"policy and reference differ at step 0: both must be policy \(policy"):
        training.train(stage(OwnDPO), root, tmp_path / "output")


def test_a_reference_that_is_not_stated_is_an_error(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'set models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}'):
        training.train(stage(AsksForAReference), root, tmp_path / "output")

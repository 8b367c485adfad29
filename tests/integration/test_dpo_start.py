"""A preference stage, also of a loss of one's own, starts from its policy and keeps it as its reference."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import pytest
import torch
from annotated_types import Gt
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import Trainer
from trl import DPOConfig, DPOTrainer

from lineage.errors import ConfigError, PipelineError
from tasks.dpo import DPO
from tasks.method import FROZEN_POLICY, POLICY, Adapter, Training
from tasks.train.losses.pair_loss import Logps, PairLoss
from tasks.train.models import load as models
from tests import training
from tests.tiny_models import write_model

if TYPE_CHECKING:
    from tasks.train.run import TrainingRun

LORA = Adapter(rank=4, alpha=8)


@pytest.fixture(scope="module")
def lora_policy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that SFT made with Adapter: what a preference stage is then given."""
    return training.train(training.method("sft", adapter=LORA), root, tmp_path_factory.mktemp("sft") / "output").output


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("from_lora", [False, True], ids=["from full", "from lora"])
def test_dpo_starts_at_ln_2_with_its_policy_as_reference(
    root: Path,
    lora_policy: Path,
    tmp_path: Path,
    adapter: Adapter | None,
    from_lora: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    references: list[dict[str, torch.Tensor]] = []
    original = DPOTrainer.__init__

    @functools.wraps(original)
    def remember(self: DPOTrainer, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        model = self.ref_model or self.model.get_base_model()
        references.append({name.replace(".base_layer", ""): p.clone() for name, p in model.named_parameters()})

    monkeypatch.setattr(DPOTrainer, "__init__", remember)
    policy = lora_policy if from_lora else root / "policy"
    run = training.train(training.method("dpo", adapter=adapter), root, tmp_path / "output", policy=policy)
    first = run.reports[0][1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert first["rewards/chosen"] == pytest.approx(0, abs=1e-3)
    assert run.reports[-1][1]["rewards/margins"] != pytest.approx(0, abs=1e-6)
    for name, tensor in load_file(policy / "model.safetensors").items():
        assert torch.equal(references[0][name], tensor), name


def scale_the_reference(monkeypatch: pytest.MonkeyPatch, factor: float = 1.2) -> None:
    """Lets the second policy that is loaded have other weights."""
    original, loads = models.load_policy, []

    def other_reference(*given: object, **options: object) -> models.Policy:
        loads.append(given)
        found = original(*given, **options)
        if len(loads) == 2:
            with torch.no_grad():
                found.model.model.embed_tokens.weight.mul_(factor)
        return found

    monkeypatch.setattr(models, "load_policy", other_reference)


def test_dpo_with_another_reference_fails_naming_both(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_the_reference(monkeypatch)
    with pytest.raises(PipelineError, match=r"policy and reference differ at step 0: both must be policy \(policy"):
        training.train(training.method("dpo"), root, tmp_path / "output")
    assert not (tmp_path / "output").exists()


class Quiet(DPOTrainer):
    """Logs its loss alone."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        Trainer.log(self, {"loss": logs["loss"]} if "loss" in logs else {}, start_time)


@dataclass(frozen=True, kw_only=True)
class QuietDPO(DPO):
    """Leaves TRL's default loss, or takes another."""

    loss_types: list[str] | None = None

    def trainer(self, run: "TrainingRun") -> Trainer:
        return run.trl(Quiet, DPOConfig, **({"loss_type": self.loss_types} if self.loss_types else {}))


def test_a_trainer_that_logs_its_loss_alone_is_proven_by_its_default_loss(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = QuietDPO(**{**training.FIELDS, "num_steps": 1})  # type: ignore[arg-type]
    training.train(method, root, tmp_path / "right")
    scale_the_reference(monkeypatch)
    with pytest.raises(PipelineError, match=r"policy and reference differ at step 0"):
        training.train(method, root, tmp_path / "wrong")


def test_a_trainer_that_cannot_be_proven_is_warned_of(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method = QuietDPO(**{**training.FIELDS, "num_steps": 1, "loss_types": ["hinge"]})  # type: ignore[arg-type]
    training.train(method, root, tmp_path / "output")
    assert "reference=unproven: the trainer logs none of rewards/chosen" in caplog.text


def test_the_sft_weight_keeps_the_chosen_answers_likely_and_starts_at_ln_2(root: Path, tmp_path: Path) -> None:
    plain, weighted = (
        training.train(training.method("dpo", sft_weight=weight), root, tmp_path / str(weight) / "output")
        for weight in (None, 1.0)
    )
    assert weighted.losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert weighted.reports[-1][1]["rewards/chosen"] > plain.reports[-1][1]["rewards/chosen"]


def test_the_sft_weight_goes_with_the_sigmoid_loss_alone() -> None:
    with pytest.raises(ConfigError, match=r"sft_weight=1 with loss_type=ipo: .* set loss_type=sigmoid, or sft_weight="):
        training.method("dpo", sft_weight=1.0, loss_type="ipo")
    with pytest.raises(ConfigError, match=r"sft_weight=1 with f_divergence: .*losses={sigmoid: 1, sft: 1}"):
        training.method("dpo", sft_weight=1.0, f_divergence="forward_kl")


# A loss on pairs of log-probabilities of one's own trains as TRL's trainer does.


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


def stage(cls: type[Training], **fields: object) -> Training:
    return cls(**{**training.FIELDS, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "adapter"), [("policy", None), ("policy", LORA), ("gpt2", None), ("qwen3_moe", None)]
)
def test_dpo_as_a_pair_loss_is_trls(root: Path, tmp_path: Path, policy: str, adapter: Adapter | None) -> None:
    start = root / policy if policy == "policy" else write_model(tmp_path / policy, policy)
    runs = [
        training.train(stage(cls, adapter=adapter), root, tmp_path / cls.__name__, policy=start)
        for cls in (DPO, OwnDPO)
    ]
    theirs, ours = (run.reports for run in runs)
    for (_, expected), (_, found) in zip(theirs, ours, strict=True):
        for name in ("loss", "rewards/chosen", "rewards/rejected", "logps/chosen", "grad_norm", "num_tokens"):
            assert found[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-5), name
    assert training.same(*(training.weights(run.output) for run in runs))


def test_another_reference_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.train.models import load as models

    frozen = models.frozen

    def other(model: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.2)
        return frozen(model)

    monkeypatch.setattr(models, "frozen", other)
    with pytest.raises(PipelineError, match=r"policy and reference differ at step 0: both must be policy \(policy"):
        training.train(stage(OwnDPO), root, tmp_path / "output")


def test_a_reference_that_is_not_set_is_an_error(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'set models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY}'):
        training.train(stage(AsksForAReference), root, tmp_path / "output")

"""What ``run.trl`` shares with any trainer, and the models that a run loads by role."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import Trainer, TrainingArguments
from trl import SFTConfig

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.context import Metrics, TrainContext
from tasks.data.kinds import CONVERSATIONS, PREFERENCES
from tasks.method import FROZEN_POLICY, POLICY, REWARD_MODEL, TEACHER, VALUE_MODEL, Adapter, Input, Inputs, Training
from tasks.train.losses.rewards import sequence_scores
from tasks.train.run import TrainingRun
from tests import tiny, training
from tests.tiny_models import write_model


class Silent(Trainer):
    """Logs its loss and nothing else."""

    def __init__(self, *args: object, temperature: float = 1.0, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = temperature

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log({"loss": logs["loss"]} if "loss" in logs else {}, start_time)


@dataclass(frozen=True, kw_only=True)
class Plain(Training):
    """A trainer of transformers: no field for max_length, no peft_config, no count of tokens."""

    reads: ClassVar = CONVERSATIONS
    own: dict[str, float] | None = None

    def trainer(self, run: TrainingRun) -> Trainer:
        return run.trl(Silent, TrainingArguments, **(self.own or {"temperature": 0.5}))


@dataclass(frozen=True, kw_only=True)
class Twice(Plain):
    """Puts the adapter on by ``run.policy``, and once more by ``run.trl``."""

    def loop(self, run: TrainingRun) -> Metrics:
        assert run.policy.model
        return run.fit(self.trainer(run))


@dataclass(frozen=True, kw_only=True)
class Roles(Training):
    """Loads every role."""

    reads: ClassVar = PREFERENCES
    models: ClassVar = {
        "policy": POLICY, "reference": FROZEN_POLICY, "judge": REWARD_MODEL, "value": VALUE_MODEL, "teacher": TEACHER,
    }  # fmt: skip

    def loop(self, run: TrainingRun) -> Metrics:
        loaded = {name: run.model(name) for name in self.models if name != "policy"}
        FOUND.update(loaded)
        return {}


FOUND: dict[str, object] = {}
EOS = 2


@dataclass(frozen=True, kw_only=True)
class Old(Training):
    """States its slots and its run by hand."""

    consumes: ClassVar = {"policy": Kind.CHECKPOINT, "rows": Kind.TEXT}
    produces: ClassVar = Kind.CHECKPOINT

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        return {"loss": 1.0}


def stage(cls: type[Training], **fields: object) -> Training:
    return cls(**{**training.FIELDS, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("adapter", [None, Adapter(rank=4, alpha=8)], ids=["full", "lora"])
def test_a_trainer_that_logs_its_loss_alone_is_counted_by_us(
    root: Path, tmp_path: Path, adapter: Adapter | None
) -> None:
    ours = training.train(stage(Plain, adapter=adapter), root, tmp_path / "plain")
    sft = training.train(training.method("sft", adapter=adapter), root, tmp_path / "sft")
    for (_, found), (_, expected) in zip(ours.reports, sft.reports, strict=True):
        assert found["num_tokens"] == expected["num_tokens"] > 0
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)


def test_an_argument_that_nothing_takes_is_refused_with_the_nearest(root: Path, tmp_path: Path) -> None:
    message = r"temprature is not an argument of TrainingArguments and Silent; the nearest is temperature"
    with pytest.raises(ConfigError, match=message):
        training.train(stage(Plain, own={"temprature": 0.5}), root, tmp_path / "output")


def test_an_argument_that_is_set_for_all_trainings_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_dataset: run.trl\(...\) sets it itself.*remove it"):
        training.train(stage(Plain, own={"train_dataset": None}), root, tmp_path / "output")


def test_a_loop_that_would_put_its_adapter_on_twice_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Twice.loop reads run.policy, whose model already has its adapter"):
        training.train(stage(Twice, adapter=Adapter(rank=2, alpha=4)), root, tmp_path / "output")


def test_a_trainer_is_known_by_its_class_and_not_by_its_name(root: Path, tmp_path: Path) -> None:
    from trl import SFTTrainer

    method = stage(Plain)
    run = TrainingRun(
        method, training.inputs(root, method), TrainContext(output_dir=tmp_path / "output", work_dir=tmp_path / "work")
    )
    trainer = run.trl(type("SFTTrainer", (Silent,), {}), TrainingArguments)
    assert "forward" not in vars(trainer.model), "its own forward is called"
    derived = run.trl(type("Mine", (SFTTrainer,), {}), SFTConfig)
    assert "forward" in vars(derived.model), "the padding-free forward"


def test_another_rank_writes_nothing_while_the_first_saves(root: Path, tmp_path: Path) -> None:
    """It copied the tokenizer's files again, into the folder that rank 0 read: outputs had empty ones."""
    method = stage(Plain)
    places = {"output_dir": tmp_path / "output", "work_dir": tmp_path / "work"}
    other = TrainingRun(method, training.inputs(root, method), TrainContext(rank=1, world_size=2, **places))
    assert other.save() == {} and not any(tmp_path.iterdir())


def test_models_are_loaded_by_role(root: Path, tmp_path: Path) -> None:
    reward = training.train(training.method("reward", num_steps=1), root, tmp_path / "reward").output
    method = stage(Roles)
    assert method.consumes == {
        "policy": Kind.CHECKPOINT, "judge": Kind.REWARD_MODEL, "teacher": Kind.CHECKPOINT, "pairs": Kind.PREFERENCES,
        "verdict": Kind.VERDICT,
    }  # fmt: skip
    given = dict(training.inputs(root, method))
    given["judge"] = Input(name="reward", kind=Kind.REWARD_MODEL, fingerprint="r" * 64, path=reward)
    method.run(given, TrainContext(output_dir=tmp_path / "output", work_dir=tmp_path / "work"))
    for name in ("reference", "judge", "teacher"):
        assert not any(parameter.requires_grad for parameter in FOUND[name].parameters()), name
    judge = FOUND["judge"]
    judge.config.pad_token_id = EOS
    finished, cut = torch.tensor([[5, 6, 7, EOS, EOS]]), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    scores = judge(input_ids=finished.repeat(2, 1), attention_mask=cut).logits
    assert torch.equal(scores[:, 0], sequence_scores(judge, finished.repeat(2, 1), cut))
    assert scores[0] != scores[1], "a finished answer and a cut one, where padding is the end of sequence"
    assert all(parameter.requires_grad for parameter in FOUND["value"].parameters())
    assert torch.equal(FOUND["value"].score.weight, FOUND["judge"].score.weight), "begun as the reward model"

    other = write_model(tmp_path / "other", "gpt2")
    tiny.write_tokenizer(other, vocab_size=290)
    given["teacher"] = Input(name="other", kind=Kind.CHECKPOINT, fingerprint="o" * 64, path=other)
    with pytest.raises(ConfigError, match=r"policy and other have different tokenizers: [0-9]+ tokens differ"):
        method.run(given, TrainContext(output_dir=tmp_path / "output", work_dir=tmp_path / "work"))


def test_a_method_that_states_its_slots_and_its_run_works_as_before(root: Path, tmp_path: Path) -> None:
    method = stage(Old)
    assert method.tokenization() is None and method.chat_slot is None
    assert training.train(method, root, tmp_path / "output").metrics == {"loss": 1.0}


def test_a_method_without_a_policy_is_refused_when_it_is_written() -> None:
    with pytest.raises(TypeError, match="the model that is trained"):
        type("Lacking", (Training,), {"reads": PREFERENCES, "models": {"model": POLICY}})


@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_an_adapters_dropout_stays_where_the_bases_is_switched_off(root: Path, tmp_path: Path, name: str) -> None:
    policy = write_model(tmp_path / "gpt2", "gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    losses = {
        dropout: training.train(
            training.method(name, adapter=Adapter(rank=4, alpha=8, dropout=dropout)), root, tmp_path / f"{dropout}",
            policy=policy,
        ).losses
        for dropout in (0.0, 0.5)
    }  # fmt: skip
    assert losses[0.0][0] == pytest.approx(losses[0.5][0], abs=1e-4), "the base draws none: B begins at zero"
    assert losses[0.0][-1] != pytest.approx(losses[0.5][-1], abs=1e-6), "the adapter does"


def test_dpo_of_a_mixture_of_experts_is_proven_on_the_preference_loss(root: Path, tmp_path: Path) -> None:
    policy = write_model(tmp_path / "moe", "mixtral", router_aux_loss_coef=1.0)
    first = training.train(training.method("dpo"), root, tmp_path / "output", policy=policy).reports[0][1]
    assert first["aux_loss"] > 0.5
    assert first["loss"] - first["aux_loss"] == pytest.approx(0.6931, abs=1e-3)


def test_a_generation_config_that_could_not_be_saved_is_repaired(root: Path, tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", "llama")
    configured = {"eos_token_id": 1, "pad_token_id": 0, "temperature": 0.6, "top_p": 0.9, "do_sample": False}
    (policy / "generation_config.json").write_text(json.dumps(configured))
    output = training.train(
        training.method("sft", chat_template="chatml"), root, tmp_path / "output", policy=policy
    ).output
    saved = json.loads((output / "generation_config.json").read_text())
    assert "temperature" not in saved and "top_p" not in saved
    assert 2 in saved["eos_token_id"], "the end of turn"

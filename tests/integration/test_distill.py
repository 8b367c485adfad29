"""Distillation on rows: its terms against values worked out by hand, its trainer against plain forwards and TRL's."""

from dataclasses import dataclass, fields
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.declare.config import load_pipeline
from lineage.errors import ConfigError
from tasks.context import Resources, TrainContext
from tasks.distill import Distillation
from tasks.method import Training
from tasks.quickstart import few_instructions
from tasks.quickstart.instructions import instructions, prompts
from tasks.sft import SFT
from tasks.taid import TAID
from tasks.train.best import Validation
from tasks.train.losses import distill_trainer
from tasks.train.losses.distill_trainer import Interpolation, divergence
from tasks.train.run import TrainingRun
from tests import tiny, training
from tests.tiny_models import ARCHITECTURES, write_model

if TYPE_CHECKING:
    from transformers import Trainer

P, Q = torch.tensor([[0.8, 0.2]]), torch.tensor([[0.5, 0.5]])
FORWARD = 0.8 * log(0.8 / 0.5) + 0.2 * log(0.2 / 0.5)
REVERSE = 0.5 * log(0.5 / 0.8) + 0.5 * log(0.5 / 0.2)
# beta = 0.25: m = 0.25 (0.8, 0.2) + 0.75 (0.5, 0.5) = (0.575, 0.425)
TO_MIDDLE = 0.8 * log(0.8 / 0.575) + 0.2 * log(0.2 / 0.425), 0.5 * log(0.5 / 0.575) + 0.5 * log(0.5 / 0.425)


@pytest.mark.parametrize(
    ("beta", "by_hand"), [(0.0, FORWARD), (1.0, REVERSE), (0.25, 0.25 * TO_MIDDLE[0] + 0.75 * TO_MIDDLE[1])]
)
def test_divergences_are_those_worked_out_by_hand(beta: float, by_hand: float) -> None:
    assert divergence(Q.log(), P.log() + 3.0, beta, 1.0).tolist() == pytest.approx([by_hand], abs=1e-6)
    assert divergence(P.log(), P.log() + 3.0, beta, 1.0).tolist() == pytest.approx([0.0], abs=1e-6)


def test_a_temperature_softens_both_and_keeps_the_size_of_the_gradient() -> None:
    teacher, student = torch.tensor([[log(4.0), 0.0]]), torch.tensor([[0.0, 0.0]], requires_grad=True)
    found = divergence(student, teacher, 0.0, 2.0)  # at temperature 2 the teacher's odds of 4 are 2
    assert found.item() == pytest.approx(4 * (2 / 3 * log(4 / 3) + 1 / 3 * log(2 / 3)), abs=1e-6)
    found.backward()
    assert student.grad is not None
    assert student.grad.tolist()[0] == pytest.approx([2 * (1 / 2 - 2 / 3), 2 * (1 / 2 - 1 / 3)], abs=1e-6)


def test_the_intermediate_teacher_lies_between_the_logits_and_is_held_fixed() -> None:
    between = Interpolation(t_start=0.25, t_end=1.0, alpha=0.0, momentum=0.0)
    student, teacher = torch.tensor([[log(3.0), 0.0]], requires_grad=True), torch.tensor([[0.0, log(9.0)]])
    target = between.target(student, teacher)  # logits 0.75 ln 3 and 0.25 ln 9: odds 3 ** 0.75 / 3 ** 0.5
    odds = 3**0.25
    p = odds / (1 + odds)
    found = divergence(student, target, 0.0, 1.0)
    assert found.item() == pytest.approx(p * log(p / 0.75) + (1 - p) * log((1 - p) / 0.25), abs=1e-6)
    found.backward()
    assert student.grad is not None
    assert student.grad.tolist()[0] == pytest.approx([0.75 - p, p - 0.75], abs=1e-6), "q - p_t"


def test_the_share_of_the_teacher_rises_as_in_algorithm_1() -> None:
    between = Interpolation(t_start=0.4, t_end=1.0, alpha=0.5, momentum=0.9)
    between.update(2.0, 0.01)
    assert between.t == 0.4, "one objective alone has no change"
    between.update(1.5, 0.02)
    change = 0.1 * 0.25  # a quarter less, with 0.1 of it in the mean
    t = 0.4 + 0.5 / (1 + exp(-change)) * 0.6
    assert between.t == pytest.approx(t, abs=1e-12)
    between.update(3.0, 0.03)
    change = 0.9 * change + 0.1 * -1.0
    t += 0.5 / (1 + exp(-change)) * (1 - t)
    assert between.t == pytest.approx(t, abs=1e-12), "slower, not back, where it rises"
    between.alpha = 0.0
    between.update(3.0, 0.99)
    assert between.t == pytest.approx(0.4 + 0.6 * 0.99), "the line"
    between.update(3.0, 1.1)
    assert between.t == 1.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = training.write_inputs(tmp_path_factory.mktemp("inputs"))
    for architecture in ARCHITECTURES:
        write_model(root / architecture, architecture)
    return root


def built(stage: Training, root: Path, tmp_path: Path, policy: str, teacher: str) -> "Trainer":
    """The trainer of a stage, before its first step."""
    given = dict(training.inputs(root, stage, policy=root / policy))
    given["teacher"] = training.Input(
        name="teacher", kind=given["policy"].kind, fingerprint="t" * 64, path=root / teacher
    )
    ctx = TrainContext(output_dir=tmp_path / "output", work_dir=tmp_path, resources=Resources(micro_batch_size=8))
    return stage.trainer(TrainingRun(stage, given, ctx))


def first_batch(trainer: "Trainer") -> dict[str, torch.Tensor]:
    return trainer.data_collator([trainer.train_dataset[index] for index in range(4)])


def plain_loss(batch: dict[str, torch.Tensor], policy: Path, teacher: Path, weight: float = 0.0) -> float:
    """The mean over the trained tokens, from the whole logits of both models."""
    labels = batch["labels"][:, 1:]
    rows = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(**rows).logits[:, :-1][labels != -100]
            for each in (policy, teacher)
        )
    p, q = theirs.softmax(-1), ours.softmax(-1)
    apart = (p * (p.log() - q.log())).sum(-1).mean()
    return float((1 - weight) * apart + weight * F.cross_entropy(ours, labels[labels != -100]))


@pytest.mark.parametrize(
    ("policy", "teacher"),
    [("policy", "teacher"), *((each, "teacher") for each in ARCHITECTURES), ("policy", "gemma2"), ("policy", "gpt2")],
)
def test_the_loss_is_that_of_whole_logits(root: Path, tmp_path: Path, policy: str, teacher: str) -> None:
    stage = training.method("distill", cross_entropy_weight=0.25)
    trainer = built(stage, root, tmp_path, policy, teacher)
    trainer.model.eval()
    batch = first_batch(trainer)
    loss = trainer.compute_loss(trainer.model, dict(batch)).item()
    loss -= trainer.router_aux_loss_coef * aux_loss(trainer, batch)
    assert loss == pytest.approx(plain_loss(batch, root / policy, root / teacher, 0.25), abs=1e-5)


def aux_loss(trainer: "Trainer", batch: dict[str, torch.Tensor]) -> float:
    if not trainer.router_aux_loss_coef:
        return 0.0
    rows = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return float(trainer.model(**rows, output_router_logits=True).aux_loss)


@pytest.mark.parametrize("teacher", ["teacher", "gemma3"])
def test_packed_rows_give_the_loss_of_rows_apart(root: Path, tmp_path: Path, teacher: str) -> None:
    trainers = [
        built(training.method("distill", num_steps=None, packing=packing), root, tmp_path, "policy", teacher)
        for packing in ("best_fit", None)
    ]
    sums = []
    for trainer in trainers:
        tokens, apart = 0, 0.0
        for example in {str(each): each for each in trainer.train_dataset}.values():
            batch = trainer.data_collator([example])
            count = int((batch["labels"][:, 1:] != -100).sum())
            apart += trainer.compute_loss(trainer.model, batch).item() * count
            tokens += count
        sums.append((tokens, apart))
    assert len(trainers[0].train_dataset[0]["seq_lengths"]) > 1, "packs"
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


def test_chunks_change_neither_loss_nor_gradient(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for limit in (2**27, 300 * 2 * 3):  # all tokens at once; three at a time
        monkeypatch.setattr(distill_trainer, "MAX_LOGITS", limit)
        trainer = built(training.method("distill", cross_entropy_weight=0.5), root, tmp_path, "policy", "teacher")
        loss = trainer.compute_loss(trainer.model, first_batch(trainer))
        loss.backward()
        found.append((loss.item(), torch.cat([each.grad.flatten() for each in trainer.model.parameters()])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-7, rtol=1e-4)


@dataclass(frozen=True, kw_only=True)
class TrlsGKD(Distillation):
    """The same by TRL's trainer, off policy."""

    def trainer(self, run: TrainingRun) -> "Trainer":
        from tasks.data.kinds import CONVERSATIONS

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
            from trl.experimental.gkd import GKDConfig, GKDTrainer
        collate = CONVERSATIONS.collator(run._start.tokenizer.pad_token_id)

        def with_prompts(examples: list[dict[str, object]]) -> object:
            batch = collate(examples)
            return {**batch, "prompts": batch["input_ids"][:, :1]}  # type: ignore[index, dict-item]

        return run.trl(
            GKDTrainer, GKDConfig, teacher_model=run.model("teacher"), lmbda=0.0, beta=self.beta,
            temperature=self.temperature, data_collator=with_prompts, disable_dropout=False,
        )  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_trajectory_is_that_of_trls_gkd_off_policy(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beta: float
) -> None:
    ours = training.train(training.method("distill", beta=beta), root, tmp_path / "ours")
    monkeypatch.setattr("tasks.train.run.reads_lines", lambda *_of, **_packs: False)  # it needs the whole logits
    theirs = training.train(TrlsGKD(**training.FIELDS, beta=beta), root, tmp_path / "theirs")  # type: ignore[arg-type]
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    assert ours.losses[0] > 0.001


def test_logits_for_tokens_that_no_tokenizer_gives_are_left_out(root: Path, tmp_path: Path) -> None:
    """As of Qwen, whose larger models have more rows in their embeddings."""
    padded = AutoModelForCausalLM.from_pretrained(root / "teacher")
    padded.resize_token_embeddings(320)
    padded.save_pretrained(root / "padded")
    AutoTokenizer.from_pretrained(root / "teacher").save_pretrained(root / "padded")
    losses = []
    for teacher in ("teacher", "padded"):
        trainer = built(training.method("distill"), root, tmp_path, "policy", teacher)
        losses.append(trainer.compute_loss(trainer.model, first_batch(trainer)).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_held_out_rows_are_measured_against_the_teacher(root: Path, tmp_path: Path) -> None:
    rows = tiny.conversation_rows(48)
    tiny.write_rows(root / "conversations", rows[:40], rows[40:])
    fields: dict[str, object] = {"num_steps": 1, "learning_rate": 1e-9, "validation": Validation(every_steps=1)}
    taid = training.train(training.method("taid", **fields), root, tmp_path / "taid").metrics
    distilled = training.train(training.method("distill", **fields), root, tmp_path / "distill").metrics
    assert taid["val/loss"] == pytest.approx(distilled["val/loss"], rel=1e-4)
    assert taid["loss"] < 0.5 * distilled["loss"], "in training, t is 0.4"


def test_a_teacher_is_refused_before_the_first_step(root: Path, tmp_path: Path) -> None:
    write_model(root / "short", "gpt2", n_positions=64)
    with pytest.raises(ConfigError, match=r"max_length=128: .*gpt2.* 64 positions"):
        built(training.method("distill"), root, tmp_path, "policy", "short")
    write_model(root / "untried", "stablelm")
    with pytest.raises(ConfigError, match=r"packing=best_fit: the teacher, teacher, cannot keep .*set packing=null"):
        built(training.method("distill", packing="best_fit"), root, tmp_path, "policy", "untried")


def test_shares_that_do_not_rise_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"t_start=0.6, t_end=0.5: set t_end above t_start"):
        TAID(t_start=0.6, t_end=0.5)


def test_a_teacher_with_another_chat_template_is_a_warning(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.write_policy(root / "bare", chat_template=None)
    for teacher in ("teacher", "bare"):
        built(training.method("distill"), root, tmp_path, "policy", teacher)
        assert ("teacher=teacher chat_template=differs" in caplog.text) == (teacher == "bare")


@pytest.mark.parametrize("name", ["distill", "on_policy_distill"])
def test_padding_by_the_end_token_changes_nothing(root: Path, tmp_path: Path, name: str) -> None:
    model, tokenizer = (each.from_pretrained(root / "policy") for each in (AutoModelForCausalLM, AutoTokenizer))
    tokenizer.pad_token = tokenizer.eos_token
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "ends")
    ends, apart = (
        training.train(training.method(name), root, tmp_path / policy.name / "output", policy=policy).losses
        for policy in (tmp_path / "ends", root / "policy")
    )
    assert ends == pytest.approx(apart, abs=1e-6)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_shipped_pipeline_compares_students_that_differ_in_nothing_but_the_teacher(seed: int) -> None:
    stages = load_pipeline(["pipeline=distill", f"stages.distill.method.seed={seed}"]).stages
    alone, distilled = stages["student_alone"], stages["distill"]
    assert alone.inputs == {"policy": "student_sft", "rows": "few"}
    assert distilled.inputs == {"policy": "student_sft", "teacher": "sft", "rows": "answers"}
    shared = {each.name for each in fields(SFT)}
    assert all(getattr(alone.method, name) == getattr(distilled.method, name) for name in shared)
    assert alone.resources == distilled.resources
    assert all(stages[name].method.recipe()["seed"] == seed for name in stages if name.startswith("student_"))
    splits = [stages[name].method.recipe() for name in ("corpus", "instructions", "few", "questions")]
    assert len({(each["held_out"], each["seed"]) for each in splits}) == 1
    rules = stages["gate"].method.rules  # type: ignore[attr-defined]
    assert {rules[name].against for name in ("more_right_answers", "beats_its_start")} == {"parent", "student_sft"}
    assert all(rules[name].min_gain == 0 for name in ("more_right_answers", "beats_its_start", "better_answers"))
    assert stages["gate"].inputs["parent"] == "student_alone"


def test_the_few_labelled_rows_are_among_those_of_the_teacher_and_no_question_has_a_label() -> None:
    labelled = {row["messages"][0]["content"]: row for row in instructions()}  # type: ignore[index]
    own = [row["messages"][0]["content"] for row in few_instructions()]  # type: ignore[index]
    assert all(labelled[text] == row for text, row in zip(own, few_instructions(), strict=True))
    assert 0.01 < len(own) / len(labelled) < 0.03
    assert not labelled.keys() & {row["prompt"] for row in prompts()}

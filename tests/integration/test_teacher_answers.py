"""A teacher's answers to prompts become the conversations that SFT trains a student on."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lineage.artifact import Kind
from lineage.errors import ArtifactError, ConfigError, DataError
from lineage.filesystem.digest import digest_files, digest_of
from tasks.context import Metrics, Resources, TrainContext
from tasks.method import Input
from tasks.sft import SFT
from tasks.teacher_answers import TeacherAnswers
from tasks.train.generation.generating import Sampling
from tests import tiny, training
from tests.command import Command
from tests.miniature import overrides_of
from tests.prepared import named

Rows = list[dict[str, object]]
FIELDS: dict[str, object] = {"max_new_tokens": 6, "max_length": 64}
SAMPLED = Sampling(temperature=2.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that ends its answers with any of half of all tokens, and prompts."""
    root = tmp_path_factory.mktemp("inputs")
    tiny.write_policy(root / "teacher", seed=1, initializer_range=0.2)
    GenerationConfig(eos_token_id=list(range(2, 150)), pad_token_id=0).save_pretrained(root / "teacher")
    tiny.write_rows(root / "prompts", tiny.prompt_rows(20), tiny.prompt_rows(24)[20:])
    tiny.write_rows(root / "conversations", tiny.conversation_rows(20), tiny.conversation_rows(24)[20:])
    return root


def answered(
    root: Path, output: Path, *, slot: str = "prompts", batch_size: int = 4,
    loaded: Callable[..., object] = lambda *slots: None, **fields: object,
) -> tuple[Rows, Metrics]:  # fmt: skip
    """The training rows that a stage writes, and its metrics."""
    kind = Kind.PROMPTS if slot == "prompts" else Kind.CONVERSATIONS
    inputs = {
        "teacher": Input(name="teacher", kind=Kind.CHECKPOINT, fingerprint="t" * 64, path=root / "teacher"),
        slot: Input(name=slot, kind=kind, fingerprint="p" * 64, path=root / kind.value),
    }
    output.mkdir(parents=True, exist_ok=True)
    ctx = TrainContext(
        output_dir=output, work_dir=output, resources=Resources(micro_batch_size=batch_size), loaded=loaded
    )
    stage = TeacherAnswers(**{**FIELDS, **fields})  # type: ignore[arg-type]
    metrics = named(stage, inputs, stage.run(inputs, ctx))
    return pq.read_table(output / "train.parquet").to_pylist(), metrics


def answers(rows: Rows) -> dict[str, str]:
    return {str(row["row_id"]): row["messages"][-1]["content"] for row in rows}  # type: ignore[index]


def test_greedy_answers_are_the_models_own_and_keep_id_and_side(root: Path, tmp_path: Path) -> None:
    rows, metrics = answered(root, tmp_path / "output", unfinished="keep")
    assert [row["row_id"] for row in rows] == [f"q{i}" for i in range(20)]
    held_out = pq.read_table(tmp_path / "output" / "held_out.parquet").to_pylist()
    assert [row["row_id"] for row in held_out] == ["q20", "q21", "q22", "q23"]
    prompt = tiny.prompt_rows(4)[3]["prompt"]
    tokenizer = AutoTokenizer.from_pretrained(root / "teacher")
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(root / "teacher")
    own = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert answers(rows)["q3"] == tokenizer.decode(own, skip_special_tokens=True)
    messages = rows[3]["messages"]
    assert isinstance(messages, list)
    assert [message["content"] for message in messages[:-1]] == [message["content"] for message in prompt]  # type: ignore[union-attr, index]
    assert messages[-1]["role"] == "assistant"
    digest = digest_of(digest_files(root / "teacher"))
    assert metrics["weights/teacher"] == int(digest[:10], 16)
    assert pq.read_schema(tmp_path / "output" / "train.parquet").metadata[b"teacher"] == digest.encode()
    assert metrics["answers"] == 24 and metrics["train_rows"] == 20 and metrics["held_out_rows"] == 4


def test_a_teacher_that_changes_after_it_was_loaded_changes_nothing(root: Path, tmp_path: Path) -> None:
    expected, _ = answered(root, tmp_path / "expected")
    copied = shutil.copytree(root, tmp_path / "root")
    found, _ = answered(copied, tmp_path / "found", loaded=lambda slot: shutil.rmtree(copied / slot))
    assert found == expected and not (copied / "teacher").exists()


def test_answers_of_another_checkpoint_than_the_input_are_not_asked_for(root: Path, tmp_path: Path) -> None:
    teacher = Input(name="teacher", kind=Kind.CHECKPOINT, fingerprint="t" * 64, path=root / "teacher", digest="another")
    prompts = Input(name="prompts", kind=Kind.PROMPTS, fingerprint="p" * 64, path=root / "prompts")
    with pytest.raises(
        ArtifactError, match=r"inputs\.teacher: .* has the digest \w+, and the input teacher has another"
    ):
        TeacherAnswers(max_new_tokens=2).run(
            {"teacher": teacher, "prompts": prompts}, TrainContext(output_dir=tmp_path, work_dir=tmp_path)
        )
    assert not list(tmp_path.iterdir())


def test_unfinished_answers_are_dropped_and_counted(root: Path, tmp_path: Path) -> None:
    kept, all_of_them = answered(root, tmp_path / "kept", unfinished="keep", max_new_tokens=2)
    found, metrics = answered(root, tmp_path / "dropped", max_new_tokens=2)
    assert 0 < len(found) < len(kept)
    assert metrics["unfinished"] == all_of_them["unfinished"] > 0
    assert metrics["dropped"] + metrics["train_rows"] + metrics["held_out_rows"] == metrics["answers"] == 24
    assert answers(found).items() <= answers(kept).items()


def test_a_student_trains_on_them(root: Path, tmp_path: Path) -> None:
    rows, _ = answered(root, tmp_path / "answers")
    tiny.write_policy(tmp_path / "student")
    inputs: Mapping[str, Input] = {
        "policy": Input(name="student", kind=Kind.CHECKPOINT, fingerprint="s" * 64, path=tmp_path / "student"),
        "rows": Input(name="answers", kind=Kind.CONVERSATIONS, fingerprint="a" * 64, path=tmp_path / "answers"),
    }
    ctx = TrainContext(output_dir=tmp_path / "output", work_dir=tmp_path, resources=Resources(micro_batch_size=8))
    metrics = SFT(**training.FIELDS).run(inputs, ctx)  # type: ignore[arg-type]
    assert metrics["rows"] == len(rows) and metrics["steps"] == 3


def test_conversations_are_answered_anew(root: Path, tmp_path: Path) -> None:
    rows, _ = answered(root, tmp_path / "output", slot="rows", unfinished="keep")
    before = tiny.conversation_rows(20)
    assert [row["row_id"] for row in rows] == [row["row_id"] for row in before]
    assert [row["messages"][0]["content"] for row in rows] == [row["messages"][0]["content"] for row in before]  # type: ignore[index]
    assert all(answers(rows)[name] != text for name, text in answers(before).items())


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {"max_new_tokens": 3}),
        ({}, {"max_length": 12}),
        ({}, {"num_beams": 4}),
        ({}, {"sampling": SAMPLED}),
        ({"sampling": SAMPLED}, {"seed": 1}),
        ({"sampling": SAMPLED}, {"sampling": replace(SAMPLED, temperature=0.1)}),
        ({"sampling": SAMPLED}, {"sampling": replace(SAMPLED, top_k=1)}),
        ({"sampling": SAMPLED}, {"sampling": replace(SAMPLED, top_p=0.1)}),
        ({"sampling": SAMPLED}, {"sampling": replace(SAMPLED, min_p=0.9)}),
        ({"sampling": SAMPLED}, {"sampling": replace(SAMPLED, repetition_penalty=9.0)}),
    ],
)
def test_every_option_changes_the_answers(
    root: Path, tmp_path: Path, given: dict[str, object], changed: dict[str, object]
) -> None:
    keep = {**given, "unfinished": "keep"}
    before, _ = answered(root, tmp_path / "before", **keep)
    after, metrics = answered(root, tmp_path / "after", **{**keep, **changed})
    assert answers(before) != answers(after)
    assert (metrics["prompts_cut"] > 0) == ("max_length" in changed)


def test_several_answers_are_sampled_and_named_after_their_prompt(root: Path, tmp_path: Path) -> None:
    one, _ = answered(root, tmp_path / "one", sampling=SAMPLED, unfinished="keep")
    found, metrics = answered(root, tmp_path / "two", sampling=SAMPLED, num_answers=2, unfinished="keep")
    named = answers(found)
    assert metrics["answers"] == 48
    assert {name: text for name, text in named.items() if "-" not in name} == answers(one)
    assert {name.removesuffix("-a1") for name in named if name.endswith("-a1")} <= {f"q{i}" for i in range(20)}
    assert any(text != named.get(f"{name}-a1") for name, text in answers(one).items())


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_answers_do_not_depend_on_the_batch(root: Path, tmp_path: Path, sampling: Sampling | None) -> None:
    together, alone = (
        answered(root, tmp_path / str(size), batch_size=size, sampling=sampling, unfinished="keep")[0]
        for size in (8, 1)
    )
    assert answers(together) == answers(alone)


def test_what_cannot_be_answered_is_refused(root: Path, tmp_path: Path) -> None:
    for fields, reported in (
        ({"max_new_tokens": 64}, r"max_new_tokens=64 leaves nothing of max_length=64 .* set max_length=128"),
        ({"num_answers": 2}, r"num_answers=2: without sampling, all answers .* are the same"),
        ({"num_beams": 2, "sampling": SAMPLED}, r"num_beams=2 with sampling: .* set sampling=null, or num_beams=1"),
    ):
        with pytest.raises(ConfigError, match=reported):
            TeacherAnswers(**{**FIELDS, **fields})  # type: ignore[arg-type]
    stage = TeacherAnswers()
    for slots in (frozenset({"teacher"}), frozenset({"teacher", "prompts", "rows"})):
        with pytest.raises(ConfigError, match=r"the teacher answers one of them; set inputs.prompts=<prompts>, or"):
            stage.check_slots(slots)
    tiny.write_policy(tmp_path / "teacher", seed=1)
    tiny.write_rows(tmp_path / "prompts", tiny.prompt_rows(4), tiny.prompt_rows(2))
    with pytest.raises(
        DataError, match=r"no answer that can be trained on: of 6 answers, 6 are unfinished .* \(now 6\)"
    ):
        answered(tmp_path, tmp_path / "output")


@pytest.mark.slow
def test_impact_follows_a_row_through_the_answers_to_its_prompt(tmp_path: Path, prefect_url: str) -> None:
    gone = ("cpt", "sft", "few", "questions", "student_alone", "distill", "evaluate", "gate")
    graph = (
        "stages.answers.method.max_new_tokens=4", "stages.answers.method.sampling={temperature:2.0}",
        "stages.answers.inputs.teacher=base", "~stages.answers.inputs.prompts",
        "+stages.answers.inputs.rows=instructions", "stages.student_sft.inputs.rows=answers",
        "stages.student_sft.method.seed=0", "stages.student_cpt.method.seed=0", "stages.student_base.method.seed=0",
        *(f"~stages.{name}" for name in gone),
    )  # fmt: skip
    small = [each for each in overrides_of("distill") if not each.startswith(tuple(f"stages.{name}." for name in gone))]
    command = Command(tmp_path, *small, *graph, environment={"PREFECT_API_URL": prefect_url})
    done = command("run", "--json")
    assert done.returncode == 0, done.stderr
    answered = next((tmp_path / "artifacts" / "answers").glob("*/output"))
    for side, trained in (("train", True), ("held_out", False)):
        row = pq.read_table(answered / f"{side}.parquet")["row_id"][0].as_py()
        found = json.loads(command("impact", f"source:instructions#{row}", "--json").stdout)
        assert ("student_sft" in {each["stage"] for each in found["artifacts"]}) == trained

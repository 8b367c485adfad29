"""Why a stage is stale, where what changed is how a source is read; and what is said of one that is half done."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.planning.plan import Plan
from flows.planning.reads import claim
from lineage.checkpoints import Checkpoint, Mirror
from lineage.errors import ConfigError
from lineage.record.attempts import record_attempt
from lineage.store import Manifest
from tasks.context import Resources
from tasks.method import Adapter
from tasks.train.losses.dpo_losses import ReferenceSync
from tasks.train.sharding import require_readable
from tests import finished, training
from tests.finished import finish, save
from tests.toy_methods import ToyTraining


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        (["sources.rows.format=messages"], 'format: (none) -> "messages"'),
        (["sources.rows.columns={question: prompt}"], 'columns: (none) -> {"question": "prompt"}'),
        (["sources.rows.sample_count=5"], "sample_count: (none) -> 5"),
        (["sources.rows.split='train[:5]'"], 'split: "train" -> "train[:5]"'),
        (["sources.rows.shuffle_seed=1", "sources.rows.shuffle_buffer=9"],
         "shuffle_buffer: (none) -> 9; shuffle_seed: (none) -> 1"),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_read_otherwise(toy, overrides, change):
    finish(toy())
    reason = toy(*overrides).stage("data").reason
    assert reason.startswith("input rows: source:rows@") and reason.endswith(f" ({change})")


def test_changed_bytes_are_no_other_reading(toy, tmp_path):
    finish(toy("sources.rows.format=text"))
    (tmp_path / "rows.txt").write_text("other rows")
    assert "(" not in toy("sources.rows.format=text").stage("data").reason


def test_a_manifest_that_says_nothing_of_the_reading_is_read(toy):
    plan = toy()
    finish(plan)
    file = plan.entry(plan.stage("data")).path / "manifest.json"
    file.write_text(file.read_text().replace(',\n        "reading": {}', ""))
    assert '"reading"' not in file.read_text()
    assert Manifest.from_json(file.read_text()).inputs["rows"].source.reading == {}
    assert {planned.state for planned in toy().stages} == {"reuse"}
    assert toy("sources.rows.sample_count=5").stage("data").reason.endswith("(sample_count: (none) -> 5)")


def test_credentials_are_not_identity_and_are_not_recorded(toy, monkeypatch):
    monkeypatch.setenv("ROWS_USER", "hunter2hunter2")
    import fsspec

    files = fsspec.filesystem("memory")
    monkeypatch.setattr("lineage.filesystem.remote_files._require_options", lambda kind, credentials: None)
    files.pipe("/staleness/rows.jsonl", b"{}\n")
    path = "sources.rows.path=memory://staleness/rows.jsonl"
    plan = toy(path, "sources.rows.credentials={username: ROWS_USER}")
    finish(plan)
    assert {planned.state for planned in toy(path).stages} == {"reuse"}
    message = (plan.entry(plan.stage("data")).path / "manifest.json").read_text()
    assert "hunter2" not in message and "ROWS_USER" not in message


def test_a_plan_resumes_from_the_mirror_what_this_machine_lost(toy, tmp_path):
    cli_args = (f"stages.left.resources.checkpoint_mirror=file://{tmp_path}/mirror",)
    entry = toy(*cli_args).entry(toy(*cli_args).stage("left"))
    assert toy(*cli_args).stage("left").state == "run"
    save(entry, 4)
    Mirror(f"file://{tmp_path}/mirror", entry.path).push(entry.checkpoints.path(4), entry.checkpoints.read(4))
    assert toy(*cli_args).stage("left").reason.startswith("resumes from step 4, ")
    shutil.rmtree(entry.path)
    plan = toy(*cli_args)
    assert plan.stage("left").state == "resume"
    assert plan.stage("left").reason.startswith(f"resumes from step 4 of its mirror file://{tmp_path}/mirror/left/")
    claim([plan])
    assert toy(*cli_args, "restart=[left]").stage("left").state == "run"
    with pytest.raises(ConfigError, match="num_workers=2 with sharding=zero2 cannot resume from it"):
        toy(*cli_args, "stages.left.resources.num_workers=2", "stages.left.resources.zero_stage=2",
            "stages.left.resources.micro_batch_size=4")  # fmt: skip
    with pytest.raises(ConfigError, match=r"checkpoint_mirror=/mnt/x: is no URL; s3://BUCKET/PREFIX"):
        toy("stages.left.resources.checkpoint_mirror=/mnt/x")
    with pytest.raises(ConfigError, match=r"^resources.checkpoint_mirror=s3://b/x: .*of s3:// AWS_ACCESS_KEY_ID"):
        toy("stages.left.resources.checkpoint_mirror=s3://key:secret@b/x")


@pytest.mark.parametrize("lost", ["checkpoint.json", "state.txt"])
def test_the_plan_resumes_from_what_a_run_would_and_refuses_what_it_would_refuse(toy, lost):
    entry = toy().entry(toy().stage("left"))
    older, newer = save(entry, 4), save(entry, 6)
    assert toy().stage("left").reason.startswith("resumes from step 6, ")
    assert toy().stage("left") in toy().stale
    (newer / lost).unlink()
    assert toy().stage("left").reason.startswith("resumes from step 4, ")
    (older / lost).unlink()
    with pytest.raises(ConfigError, match=r"stages.left: each of its checkpoints .* start again with restart=\[left\]"):
        toy()
    again = toy("restart=[left]").stage("left")
    assert (again.state, again.restart) == ("run", True)


def test_a_restart_of_a_finished_stage_is_not_passed_over_in_silence(toy):
    finish(toy())
    left, right = (toy("restart=[left]").stage(name) for name in ("left", "right"))
    assert left.state == "reuse"
    assert "; restart=[left] applies to unfinished stages: change a field, or delete " in left.reason
    assert "restart" not in right.reason


def test_an_evaluation_that_is_set_after_the_training_is_named_with_what_trains_again(toy):
    finish(toy())
    cli_args = ["stages.left.method.evaluation={every_steps: 1}"]
    plan = toy(*cli_args)
    [note] = [note for note in plan.notes if "scores nothing" in note]
    left = plan.stage("left")
    assert left.state == "reuse" and note.startswith("left is finished") and str(plan.entry(left).path) in note
    again = toy(*cli_args, "stages.left.method.evaluation.pick=best")
    assert again.stage("left").state == "run" and not [note for note in again.notes if "scores nothing" in note]
    scores = plan.entry(left).path / "evaluation.jsonl"
    scores.write_text('{"step": 0, "error": ""}\n')
    assert not toy(*cli_args).notes
    scores.write_text('{"step": 0, "error": "its process ended by SIGKILL"}\n')
    [note] = toy(*cli_args).notes
    assert note.startswith("left is finished, no score of step 0: its process ended by SIGKILL; to train it again with")


@pytest.mark.parametrize(
    ("report", "words", "is_named"),
    [
        ({"format": "reasoning", "ignored_columns": {"options": 9}}, (), True),
        ({"format": "reasoning", "ignored_columns": {"options": 9}}, ("sources.rows.format=reasoning",), False),
        ({"format": "reasoning", "ignored_columns": {"id": 9}}, (), False),
        ({"format": "multiple_choice", "ignored_columns": {"options": 9}}, (), False),
    ],
)
def test_finished_data_that_was_read_without_its_choices_is_named(toy, report, words, is_named):
    plan = toy(*words)
    finish(plan)
    report = {"sources": {"rows": {"path": "rows.txt", **report}}}
    (plan.entry(plan.stage("data")).output / "report.json").write_text(json.dumps(report))
    again = toy(*words)
    assert again.stage("data").state == "reuse"
    assert len([note for note in again.notes if "rows.txt was read without its options" in note]) == is_named


@pytest.mark.parametrize(
    ("content", "is_named"), [('[{"role": "user", "content": "2+2?"}]', True), ("[1, 2] is what?", False)]
)
def test_finished_prompts_that_are_turns_in_text_are_named(toy, content, is_named):
    Path("rows.jsonl").write_text(json.dumps({"prompt": content}))
    target = "stages.data.method._target_=tasks.prepare_data.PreparePrompts"
    own = [target, *(f"~stages.{name}" for name in ("model", "left", "right")), "sources.rows.path=rows.jsonl"]
    plan = toy(*own)
    finish(plan)
    rows = [{"prompt": [{"role": "user", "content": content}]}]
    pq.write_table(pa.Table.from_pylist(rows), plan.entry(plan.stage("data")).output / "train.parquet")
    notes = toy(*own).notes
    assert len([note for note in notes if "the text of turns, read as what one user wrote" in note]) == is_named


@pytest.fixture
def trained_by_two(toy):
    """``left`` was trained by other code to step 4, and went on by the code of now, which saved nothing yet."""
    planned = toy().stage("left")
    entry = toy().entry(planned)
    save(entry, 4)
    record_attempt(entry.path, 0, "other code")
    record_attempt(entry.path, 4, planned.code_digest)
    return toy


def test_the_code_of_every_step_counts_not_that_of_the_last_attempt(trained_by_two):
    with pytest.raises(ConfigError, match=r"stage left: its code changed since it began .* code_drift=refuse"):
        trained_by_two("code_drift=refuse")
    again = trained_by_two("code_drift=rerun").stage("left")
    assert (again.state, again.restart) == ("run", True)
    assert "its code changed since (code_drift=warn)" in trained_by_two().stage("left").reason


def test_what_two_codes_made_is_no_output_of_the_code_of_now(toy):
    plan = toy()
    finish(plan)
    entry = plan.entry(plan.stage("left"))
    manifest = entry.manifest()
    mixed = replace(manifest.provenance, earlier_code_digests=["other code"])
    (entry.path / "manifest.json").write_text(replace(manifest, provenance=mixed).to_json())
    assert toy("code_drift=rerun").stage("left").state == "run"
    assert toy("code_drift=rerun").stage("right").state == "reuse"
    with pytest.raises(ConfigError, match="stage left: its code changed"):
        toy("code_drift=refuse")


ZERO = "stages.left.resources.zero_stage=2"
TWO = ("stages.left.resources.num_workers=2", "stages.left.resources.micro_batch_size=4")


def save_left(plan: Plan, **fields: int) -> None:
    """A checkpoint of ``left``."""
    finished.save(plan.entry(plan.stage("left")), 7, **fields)


@pytest.mark.parametrize(
    ("saved", "overrides", "difference"),
    [
        ({"num_workers": 2}, (), "1 worker instead of 2"),
        ({"num_workers": 2}, TWO, None),
        ({"num_workers": 1}, TWO, "2 workers instead of 1"),
        ({"num_workers": 1, "micro_batch_size": 8}, (), None),
        ({"num_workers": 1, "micro_batch_size": 8}, TWO[1:], "micro_batch_size=4 instead of 8"),
        ({"num_workers": 1}, TWO[1:], None),  # what the checkpoint does not say is not compared
        ({"num_workers": 1, "cpus_per_worker": 1}, ("stages.left.resources.cpus_per_worker=2",),
         "cpus_per_worker=2 instead of 1"),
        ({"num_workers": 2, "zero_stage": 2}, (*TWO, ZERO), None),
    ],
)  # fmt: skip
def test_a_resume_with_other_workers_says_what_that_means(toy, saved, overrides, difference):
    save_left(toy(), **saved)
    planned = toy(*overrides).stage("left")
    assert planned.state == "resume"
    if difference is None:
        assert "instead of" not in planned.reason
    else:
        assert planned.reason.endswith(f"; with {difference}: within tolerance, not to the bit")


def test_a_state_that_no_other_division_can_read_is_refused(toy):
    save_left(toy(), num_workers=2, sharding="fsdp", can_move=False)
    with pytest.raises(ConfigError, match=r"an optimizer whose state is no .*set num_workers=2 and sharding=fsdp, or"):
        toy()
    assert toy(*TWO, "stages.left.resources.sharding=fsdp").stage("left").state == "resume"


EARLIER = r"step 7 lacks state.pt: an earlier version of posttrain wrote it, and {} reads .*finish the stage with that"


def test_what_an_earlier_version_wrote_is_refused_where_the_stage_would(toy, monkeypatch):
    save_left(toy(), num_workers=2)
    assert toy(*TWO).stage("left").state == "resume"  # weights, optimizer and schedule were written as now
    with pytest.raises(ConfigError, match=EARLIER.format("FSDP2") + r" version, or start again with restart=\[left\]"):
        toy(*TWO, "stages.left.resources.sharding=fsdp")
    monkeypatch.setattr(ToyTraining, "keeps_state", True)
    with pytest.raises(ConfigError, match=EARLIER.format("this method")):
        toy(*TWO)
    assert toy(*TWO, "restart=[left]").stage("left").state == "run"


@pytest.mark.parametrize(
    ("name", "fields", "refuses"),
    [
        ("sft", {}, False), ("dpo", {}, False), ("sft", {"adapter": Adapter(rank=4)}, False),
        ("grpo", {}, True), ("online_dpo", {}, True), ("ppo", {}, True), ("rloo", {}, True),
        ("dpo", {"reference_sync": ReferenceSync(every_steps=1)}, True),
        ("sft", {"adapter": Adapter(type="adalora", rank=4, target_rank=2)}, True),
    ],
)  # fmt: skip
def test_methods_with_more_state_than_transformers_saves_read_no_earlier_form(name, fields, refuses):
    stage, resources = training.method(name, **fields), Resources(micro_batch_size=1)
    record = {"step": 7, "time": 1.0, "train_seconds": 1.0, "num_workers": 1, "zero_stage": 0, "metrics": {}}
    now = Checkpoint(**record, sharding="none", files={"state.pt": "", "rank-0.pt": ""})
    earlier = Checkpoint(**record, files={"optimizer.pt": "", "rng_state.pth": ""})
    require_readable(now, stage, resources)
    with pytest.raises(ConfigError, match=EARLIER.format("this method")) if refuses else nullcontext():
        require_readable(earlier, stage, resources)


@pytest.mark.parametrize(("wrote", "reads"), [("fsdp", "none"), ("none", "fsdp")])
def test_a_loop_of_its_own_resumes_divided_weights_as_divided(wrote, reads):
    ours = {"state.pt": "", "rank-0.pt": ""}
    record = Checkpoint(
        step=7, time=1.0, train_seconds=1.0, num_workers=2, zero_stage=0, metrics={}, sharding=wrote, files=ours
    )
    resources = Resources(micro_batch_size=1, num_workers=2, sharding=reads)
    require_readable(record, training.method("sft"), resources)
    with pytest.raises(ConfigError, match=f"written with sharding={wrote}, and sharding={reads} cannot resume"):
        require_readable(record, training.method("ppo"), resources)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [
        ((4, "zero3"), (4, "none")), ((4, "zero3"), (2, "zero3")), ((2, "zero3"), (4, "zero3")),
        ((2, "zero3"), (2, "zero3_offload")), ((2, "zero3"), (2, "fsdp")), ((2, "fsdp"), (2, "zero3")),
    ],
)  # fmt: skip
def test_the_parts_of_zero_are_read_by_the_workers_that_wrote_them(wrote, reads):
    ours = {"state.pt": "", "rank-0.pt": ""} if wrote[1] == "fsdp" else {"optimizer.pt": ""}
    record = Checkpoint(
        step=7, time=1.0, train_seconds=1.0, num_workers=wrote[0], zero_stage=3 if wrote[1] == "zero3" else 0,
        metrics={}, sharding=wrote[1], files=ours,
    )  # fmt: skip
    same, other = (Resources(micro_batch_size=1, num_workers=each[0], sharding=each[1]) for each in (wrote, reads))
    require_readable(record, training.method("sft"), same)
    with pytest.raises(ConfigError, match=rf"set num_workers={wrote[0]} and sharding={wrote[1]}$"):
        require_readable(record, training.method("sft"), other)


@pytest.mark.parametrize(
    ("num_workers", "zero_stage", "overrides"),
    [(2, 2, ()), (2, 2, TWO), (2, 0, (*TWO, ZERO)), (1, 0, (*TWO, ZERO)), (4, 2, (*TWO, ZERO))],
)
def test_who_cannot_read_it_is_refused(toy, num_workers, zero_stage, overrides):
    save_left(toy(), num_workers=num_workers, zero_stage=zero_stage)
    with pytest.raises(ConfigError, match="cannot resume from it") as refused:
        toy(*overrides)
    assert str(refused.value).startswith("stages.left.resources: its checkpoint of step 7 was written with ")
    sharding = "zero2" if zero_stage else "none"
    remedy = f"set num_workers={num_workers} and sharding={sharding}, or start again with restart=[left]"
    assert str(refused.value).endswith(remedy)
    assert toy(*overrides, "restart=[left]").stage("left").state == "run"

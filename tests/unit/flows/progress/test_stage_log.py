import json
import threading
import time
from dataclasses import asdict, replace

import pytest

from flows.__main__ import main
from flows.progress import stage_log
from flows.progress.run_record import RunRecord, StageRecord, SweepRecord, new_id
from flows.progress.stage_log import begun_entry, follow_log, read_log, stage_entry
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.lock import Lock
from lineage.filesystem.owner import Owner
from lineage.store import Entry


@pytest.fixture
def entry(tmp_path):
    """Of a stage that was cut off: no manifest."""
    return unfinished(tmp_path, "dpo", "0123456789abcdef", "one\ntwo\n")


def unfinished(store, stage, digits, log):
    made = Entry(store / stage / digits)
    made.logs.mkdir(parents=True)
    (made.logs / "stage.log").write_text(log)
    return made


def noted(store, title, entry, state="running", pipeline="toy", driver=None, sweep=None, **fields):
    stage = StageRecord(state=state, since=0.0, directory=str(entry.path if entry else ""), **fields)
    number = len(list(store.glob("runs/*")))
    RunRecord(
        id=f"{new_id()[:15]}-{number:04d}", pipeline=pipeline, cli_args=[], driver=driver or Owner.here(), started=0.0,
        stages={title: stage}, sweep=sweep,
    ).write(store)  # fmt: skip


@pytest.mark.parametrize("ref", ["0123", "dpo@0123", "dpo", "{path}", "{path}/output", "0123456789abcdef" * 4])
def test_an_unfinished_stage_is_found(tmp_path, entry, ref):
    assert stage_entry(ref.format(path=entry.path), tmp_path).path == entry.path


def test_two_stages_with_the_same_digits_are_distinguished(tmp_path, entry):
    unfinished(tmp_path, "sft", "0123456789abcdef", "")
    with pytest.raises(ConfigError, match="0123 names 2 things: dpo@0123456789abcdef, sft@0123456789abcdef"):
        stage_entry("0123", tmp_path)
    assert stage_entry("dpo@0123", tmp_path).path == entry.path


@pytest.mark.parametrize("ref", ["dpo#3", "toy/dpo#3"])
def test_a_stage_goes_by_what_status_calls_it(tmp_path, entry, ref):
    noted(tmp_path, "dpo#3", entry)
    assert stage_entry(ref, tmp_path).path == entry.path
    with pytest.raises(ConfigError, match="no finished artifact"):
        stage_entry("other/dpo#3", tmp_path)


def test_the_last_run_of_a_stage_is_meant(tmp_path, entry):
    later = unfinished(tmp_path, "dpo", "fedcba9876543210", "")
    noted(tmp_path, "dpo", later)
    noted(tmp_path, "dpo", entry)
    assert stage_entry("dpo", tmp_path).path == entry.path
    noted(tmp_path, "dpo", None, state="pending")
    assert stage_entry("toy/dpo", tmp_path).path == entry.path


def test_a_stage_that_has_not_begun_or_will_never_begin_has_no_log(tmp_path):
    noted(tmp_path, "dpo", None, state="pending", after=["sft"])
    with pytest.raises(ArtifactError, match="dpo has not begun: it waits for sft"):
        stage_entry("dpo", tmp_path)
    noted(tmp_path, "dpo", None, state="pending", driver=replace(Owner.here(), started=0.0))
    for find in (stage_entry, begun_entry):
        with pytest.raises(ArtifactError, match=r"dpo has no log: the run .* was over before it began"):
            find("dpo", tmp_path)


def test_the_last_lines_are_read_and_a_stage_without_a_log_says_why(entry):
    assert [list(read_log(entry, count)) for count in (None, 1, 0)] == [["one\n", "two\n"], ["two\n"], []]
    (entry.logs / "stage.log").unlink()
    for read in (read_log, follow_log):
        with pytest.raises(ArtifactError, match=r"has no log .*launcher=foreground"):
            list(read(entry, None))


@pytest.mark.parametrize("ref", ["dpo", "toy/dpo", "dpo#1"])
def test_following_waits_for_a_stage_to_begin(tmp_path, monkeypatch, ref):
    """Although an earlier attempt has left a log."""
    monkeypatch.setattr(stage_log, "_POLL_SECONDS", 0.01)
    sweep = SweepRecord(folder="", own=["dpo"], trials=2) if "#" in ref else None
    earlier = unfinished(tmp_path, "dpo", "0123456789abcdef", "")
    later = unfinished(tmp_path, "dpo", "fedcba9876543210", "")
    title = ref.rpartition("/")[2]
    noted(tmp_path, title, earlier, driver=replace(Owner.here(), started=0.0))
    noted(tmp_path, "sft" if sweep else title, earlier, state="pending", sweep=sweep)
    begins = threading.Timer(0.1, noted, (tmp_path, title, later))
    begins.start()
    assert begun_entry(ref, tmp_path).path == later.path
    begins.join(120)


@pytest.mark.parametrize("overrides", [["dpo", "store={}"], ["store={}", "dpo"], ["store={}", "dpo", "--follow"]])
def test_a_stage_is_named_before_or_after_its_store(tmp_path, entry, capsys, overrides):
    assert main(["logs", *(word.format(tmp_path) for word in overrides)]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"


def test_following_ends_with_the_stage_and_loses_no_line(entry, monkeypatch):
    monkeypatch.setattr(stage_log, "_POLL_SECONDS", 0.01)
    lock = Lock(entry.path)
    assert lock.try_acquire()

    def write_on():
        time.sleep(0.05)
        with (entry.logs / "stage.log").open("a") as file:
            file.write("three\n")
            file.flush()
            time.sleep(0.05)
            file.write("four\n")
        with lock.holding():
            pass

    writer = threading.Thread(target=write_on)
    writer.start()
    assert list(follow_log(entry, 1)) == ["two\n", "three\n", "four\n"]
    writer.join(120)


def test_nobody_follows_a_stage_whose_owner_is_dead(entry):
    (entry.path / "lock").write_text(json.dumps(asdict(Owner.here())))
    assert list(follow_log(entry, None)) == ["one\n", "two\n"]


def test_what_has_begun_is_followed_at_once(tmp_path, entry):
    noted(tmp_path, "dpo", entry, state="waiting", reason="1 CPU")
    assert begun_entry("dpo", tmp_path).path == entry.path
    assert begun_entry("0123", tmp_path).path == entry.path


def test_what_names_nothing_is_refused(tmp_path, entry):
    with pytest.raises(ConfigError, match=r"nope: the store .* holds no finished artifact"):
        stage_entry("nope", tmp_path)

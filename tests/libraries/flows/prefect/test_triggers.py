"""When a watcher starts a run, by a clock that the test turns and a server that only records."""

from types import SimpleNamespace

import fsspec
import pytest
from huggingface_hub import HfApi

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.prefect.triggers import Watcher, last_taken
from tests.unit.flows.declare.test_config import CONF, toy
from tests.unit.flows.planning.test_plan import finish

POLL, SETTLE = 60.0, 10.0


class RecordedRuns:
    """A server: what it was asked to start, and what it says is under way."""

    def __init__(self) -> None:
        self.created: dict[str, tuple[str, ...]] = {}
        self.busy: str | None = None
        self.last_exit = "over"

    @property
    def causes(self) -> list[tuple[str, ...]]:
        return list(self.created.values())

    def under_way(self):
        return self.busy

    def create(self, causes, key):
        self.created.setdefault(key, tuple(causes))
        return str([*self.created].index(key)), "brave-run"

    def exit(self, run_id):
        return self.last_exit if int(run_id) == len(self.created) - 1 else "over"


class Watched:
    """The toy pipeline's source, who watches it, and the clock."""

    def __init__(self, folder, trigger="{sources: [rows]}", path=None) -> None:
        self.rows = folder / "rows.txt"
        self.rows.write_text("first")
        self.words = [
            "pipeline=toy", "model=none", f"trigger={trigger}",  # composed once: what follows differs in values alone
            f"sources.rows.path={path or self.rows}", f"store={folder}/store",
        ]  # fmt: skip
        self.runs = RecordedRuns()
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        self.pipeline = load_pipeline(self.words, CONF)
        self.watcher = Watcher(
            self.pipeline, self.pipeline.operation.trigger, "toy/local", self.runs, clock=lambda: self.now
        )

    def run_pipeline(self) -> None:
        """As someone else would, without the watcher."""
        finish(make_plan(self.pipeline))

    def poll(self, after: float = 0.0) -> float:
        self.now += after
        return self.watcher.poll()

    def poll_until_settled(self) -> None:
        for _ in range(3):
            self.poll(after=SETTLE)


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_another_store_on_the_same_server_starts_a_run_of_its_own_for_the_same_data(tmp_path):
    first, second = (tmp_path / name for name in ("first", "second"))
    runs = RecordedRuns()
    for number, folder in enumerate((first, second), start=1):
        folder.mkdir()
        watched = Watched(folder)
        watched.runs = runs
        watched.restart()
        watched.poll()
        watched.rows.write_text("second")
        watched.poll_until_settled()
        assert len(runs.created) == number


def test_what_is_there_when_watching_begins_starts_nothing(watched):
    watched.poll_until_settled()
    assert watched.runs.causes == []


def test_changed_data_starts_one_run_and_no_second(watched):
    watched.poll()
    watched.rows.write_text("second")
    watched.poll_until_settled()
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]


def test_a_burst_is_one_run_after_it_has_rested(watched):
    watched.poll()
    for content in ("a", "ab", "abc"):
        watched.rows.write_text(content)
        assert watched.poll(after=SETTLE / 2) == SETTLE
        assert watched.runs.causes == []
    assert watched.poll(after=SETTLE / 2) == SETTLE / 2
    watched.poll(after=SETTLE / 2)
    assert watched.runs.causes == [("rows",)]


def test_data_that_came_back_to_what_the_last_run_took_starts_nothing(watched):
    watched.poll()
    watched.rows.write_text("second")
    watched.poll()
    watched.rows.write_text("first")
    watched.poll_until_settled()
    assert watched.runs.causes == []


def test_data_that_comes_back_after_a_run_took_other_data_starts_another(watched):
    watched.poll()
    for content in ("second", "first", "second"):
        watched.rows.write_text(content)
        watched.poll_until_settled()
    assert len(watched.runs.causes) == 3


def test_a_run_under_way_is_not_overtaken_and_one_follows_with_the_newest_state(watched):
    watched.poll()
    watched.runs.busy = "slow-run"
    for content in ("second", "third"):
        watched.rows.write_text(content)
        watched.poll_until_settled()
        assert watched.runs.causes == []
    watched.runs.busy = None
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]


def test_data_that_a_run_under_way_has_taken_itself_starts_none_after_it(watched):
    watched.run_pipeline()
    watched.poll()
    watched.runs.busy = "slow-run"
    watched.rows.write_text("second")
    watched.poll_until_settled()
    watched.run_pipeline()
    watched.runs.busy = None
    watched.poll_until_settled()
    assert watched.runs.causes == []


def test_data_that_changed_while_nobody_watched_starts_a_run(watched):
    watched.poll()
    watched.rows.write_text("second")
    watched.restart()
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]


def test_data_that_changed_since_the_last_run_starts_one_though_it_was_never_watched_before(watched):
    watched.run_pipeline()
    watched.rows.write_text("second")
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]


def test_a_watcher_that_is_killed_between_the_run_and_its_note_starts_no_second(watched):
    watched.poll()
    taken = (watched.pipeline.store / "watch" / "toy.json").read_text()
    watched.rows.write_text("second")
    watched.poll_until_settled()
    (watched.pipeline.store / "watch" / "toy.json").write_text(taken)
    watched.restart()
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]


def test_what_a_run_was_to_take_in_that_crashed_is_due_again(watched):
    """Also where the run has made its data before it crashed, and over a restart of the watcher."""
    watched.poll()
    watched.rows.write_text("second")
    watched.runs.last_exit = "open"
    watched.poll_until_settled()
    finish(make_plan(watched.pipeline), "data")
    watched.poll_until_settled()
    assert len(watched.runs.causes) == 1
    watched.restart()
    watched.runs.last_exit = "lost"
    watched.poll(after=POLL)
    watched.runs.last_exit = "open"
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)] * 2
    watched.runs.last_exit = "over"
    watched.poll_until_settled()
    assert len(watched.runs.causes) == 2


def test_what_changes_while_a_run_is_under_way_that_dies_is_one_run_after_it(watched):
    watched.poll()
    watched.rows.write_text("second")
    watched.runs.last_exit = "open"
    watched.poll_until_settled()
    watched.rows.write_text("third")
    watched.poll_until_settled()
    assert len(watched.runs.causes) == 1
    watched.runs.last_exit = "lost"
    watched.poll(after=POLL)
    watched.runs.last_exit = "over"
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)] * 2


def test_runs_that_all_die_over_the_same_data_are_given_up_with_a_warning(watched, caplog):
    watched.poll()
    watched.rows.write_text("second")
    watched.runs.last_exit = "lost"
    for _ in range(10):
        watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)] * 5
    assert "crashed, as 4 before it; start the next yourself" in caplog.text
    watched.runs.last_exit = "over"
    watched.rows.write_text("third")
    watched.poll_until_settled()
    assert len(watched.runs.causes) == 6


def test_data_that_a_run_by_hand_has_begun_with_and_not_ended_is_due(watched):
    watched.run_pipeline()
    watched.poll()
    watched.rows.write_text("second")
    finish(make_plan(watched.pipeline), "data")
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]


def test_a_source_that_does_not_rest_is_said_once(watched, caplog):
    caplog.set_level("INFO", logger="flows.prefect.triggers")
    watched.poll()
    for number in range(5):
        watched.rows.write_text(str(number))
        watched.poll(after=SETTLE / 2)
    assert watched.runs.causes == []
    assert [record.message for record in caplog.records] == ["toy/local: new: rows; waits until it settles"]


def test_a_look_that_fails_is_told_once_and_watching_goes_on(watched, caplog):
    watched.poll()
    watched.rows.unlink()
    assert [watched.poll(after=POLL) for _ in range(3)] == [POLL] * 3
    assert len(caplog.records) == 1 and "no such file or directory" in caplog.text
    watched.rows.write_text("second")
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]


def test_a_damaged_note_begins_anew(watched):
    watched.poll()
    (watched.pipeline.store / "watch" / "toy.json").write_text("{")
    watched.poll_until_settled()
    assert watched.runs.causes == []


def test_the_poll_is_the_longest_pause(tmp_path):
    watched = Watched(tmp_path, "{sources: [rows], poll: 3, settle: 10}")
    assert watched.poll() == 3
    watched.rows.write_text("second")
    assert watched.poll() == 3


@pytest.mark.parametrize("path", ["data/a.jsonl", "data", "data/*.jsonl", "memory://watched"])
def test_a_file_a_directory_a_glob_and_a_bucket_are_followed(tmp_path, path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text("one")
    files = fsspec.filesystem("memory")
    files.pipe("/watched/a.jsonl", b"one")
    watched = Watched(tmp_path, path=path if "://" in path else tmp_path / path)
    watched.poll()
    (tmp_path / "data/a.jsonl").write_text("two")
    files.pipe("/watched/a.jsonl", b"two")
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]
    files.store.clear()


def test_a_branch_of_the_hub_is_followed(tmp_path, monkeypatch):
    commit = ["a" * 40]
    monkeypatch.setattr(HfApi, "repo_info", lambda self, path, **_: SimpleNamespace(sha=commit[0]))
    watched = Watched(tmp_path, path="owner/data")
    watched.poll()
    commit[0] = "b" * 40
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]


def test_what_a_pipeline_took_last_is_in_its_newest_output(tmp_path):
    watched = Watched(tmp_path)
    assert last_taken(watched.pipeline, "rows") is None
    taken = []
    for content in ("one", "two"):
        watched.rows.write_text(content)
        finish(make_plan(watched.pipeline), "data")
        taken.append(last_taken(watched.pipeline, "rows"))
    assert None not in taken and taken[0] != taken[1]
    assert last_taken(toy(f"sources.rows.path={watched.rows}", f"store={tmp_path}/store", "name=other"), "rows") is None

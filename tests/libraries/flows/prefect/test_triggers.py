"""When a watcher starts a run, by a clock that the test turns and a server that only records."""

from functools import partial
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
        self.overrides = [
            "pipeline=toy", "model=none", f"trigger={trigger}",  # composed once: what follows differs in values alone
            f"sources.rows.path={path or self.rows}", f"store={folder}/store",
        ]  # fmt: skip
        self.runs = RecordedRuns()
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        self.pipeline = load_pipeline(self.overrides, CONF)
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


# What happens, word by word: "rest" polls until the sources have settled, a digit is the number of runs so far.
STORIES = {
    "what is there when watching begins starts nothing": "rest 0",
    "changed data starts one run and no second": "poll write:b rest 1 rest 1",
    "data that came back to what the last run took starts nothing": "poll write:b poll write:first rest 0",
    "data that comes back after a run took other data starts another": (
        "poll write:b rest 1 write:first rest 2 write:b rest 3"
    ),
    "a run under way is not overtaken and one follows": "poll busy write:b rest 0 write:c rest 0 free rest 1",
    "what a run under way has taken itself starts none": "run poll busy write:b rest run free rest 0",
    "data that changed while nobody watched starts a run": "poll write:b restart rest 1",
    "data that changed since the last run starts one, first watched or not": "run write:b rest 1",
    "data that a run by hand has begun with and not ended is due": "run poll write:b data rest 1",
    # Also where the run has made its data before it crashed, and over a restart of the watcher.
    "what a crashed run was to take in is due again": (
        "poll write:b open rest data rest 1 restart lost poll open rest 2 over rest 2"
    ),
    "what changes while a run is under way that dies is one run after it": (
        "poll write:b open rest write:c rest 1 lost poll over rest 2"
    ),
    "a damaged note begins anew": "poll damage rest 0",
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_run_starts_when_data_is_new_and_none_is_under_way(watched, story):
    happenings = {
        "rest": watched.poll_until_settled,
        "poll": lambda: watched.poll(after=POLL),
        "run": watched.run_pipeline,
        "data": lambda: finish(make_plan(watched.pipeline), "data"),
        "restart": watched.restart,
        "busy": lambda: setattr(watched.runs, "busy", "slow-run"),
        "free": lambda: setattr(watched.runs, "busy", None),
        "damage": lambda: (watched.pipeline.store / "watch" / "toy.json").write_text("{"),
        **{each: partial(setattr, watched.runs, "last_exit", each) for each in ("open", "lost", "over")},
    }
    for word in story.split():
        verb, _, content = word.partition(":")
        if verb.isdecimal():
            assert watched.runs.causes == [("rows",)] * int(verb), word
        elif verb == "write":
            watched.rows.write_text(content)
        else:
            happenings[verb]()


def test_a_burst_is_one_run_after_it_has_rested(watched):
    watched.poll()
    for content in ("a", "ab", "abc"):
        watched.rows.write_text(content)
        assert watched.poll(after=SETTLE / 2) == SETTLE
        assert watched.runs.causes == []
    assert watched.poll(after=SETTLE / 2) == SETTLE / 2
    watched.poll(after=SETTLE / 2)
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


def test_a_source_that_does_not_rest_is_reported_once(watched, caplog):
    caplog.set_level("INFO", logger="flows.prefect.triggers")
    watched.poll()
    for number in range(5):
        watched.rows.write_text(str(number))
        watched.poll(after=SETTLE / 2)
    assert watched.runs.causes == []
    assert [record.message for record in caplog.records] == ["toy/local: new: rows; waits until it settles"]


def test_a_look_that_fails_is_reported_once_and_watching_resumes(watched, caplog):
    watched.poll()
    watched.rows.unlink()
    assert [watched.poll(after=POLL) for _ in range(3)] == [POLL] * 3
    assert len(caplog.records) == 1 and "no such file or directory" in caplog.text
    watched.rows.write_text("second")
    watched.poll_until_settled()
    assert watched.runs.causes == [("rows",)]


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

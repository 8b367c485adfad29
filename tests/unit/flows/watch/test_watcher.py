"""When a watcher starts a run, by a clock that the test turns and a server that only takes notes."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.watch.memory import Arrival, Memory, Seen
from flows.watch.watcher import Watcher
from tests.unit.flows.declare.test_config import CONF
from tests.unit.flows.planning.test_plan import finish

POLL, SETTLE = 60.0, 10.0


class NotedRuns:
    """A server: what it was asked to start, and what it says is under way."""

    def __init__(self) -> None:
        self.started: dict[str, tuple[str, ...]] = {}
        self.busy: str | None = None
        self.end = "over"
        self.events: list[Arrival] = []

    @property
    def causes(self) -> list[tuple[str, ...]]:
        return list(self.started.values())

    def under_way(self, deployment):
        assert deployment == "toy/local"
        return self.busy

    def arrivals(self, names, since):
        return tuple(each for each in self.events if each.name in names and each.occurred >= since.isoformat())

    def start(self, deployment, causes, key):
        self.started.setdefault(key, causes)
        return str([*self.started].index(key)), "brave-run"

    def fate(self, run_id):
        return (self.end if int(run_id) == len(self.started) - 1 else "over"), "brave-run"

    def send(self, name: str, ago: timedelta = timedelta()) -> None:
        occurred = (datetime.now(UTC) - ago).isoformat()
        self.events.append(Arrival(id=str(len(self.events)), name=name, occurred=occurred))


class Watched:
    """The toy pipeline's source, who watches it, and the clock."""

    def __init__(self, folder, trigger="{sources: [rows]}") -> None:
        self.rows = folder / "rows.txt"
        self.rows.write_text("first")
        self.words = [
            "pipeline=toy", "model=none", f"trigger={trigger}",  # composed once: what follows differs in values alone
            f"sources.rows.path={self.rows}", f"store={folder}/store",
        ]  # fmt: skip
        self.runs = NotedRuns()
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

    def look(self, after: float = 0.0) -> float:
        self.now += after
        return self.watcher.look()

    def look_until_rested(self) -> None:
        for _ in range(3):
            self.look(after=SETTLE)


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path)


def test_what_is_there_when_watching_begins_starts_nothing(watched):
    watched.look_until_rested()
    assert watched.runs.causes == []


def test_changed_data_starts_one_run_and_no_second(watched):
    watched.look()
    watched.rows.write_text("second")
    watched.look_until_rested()
    watched.look_until_rested()
    assert watched.runs.causes == [("rows",)]


def test_a_burst_is_one_run_after_it_has_rested(watched):
    watched.look()
    for content in ("a", "ab", "abc"):
        watched.rows.write_text(content)
        assert watched.look(after=SETTLE / 2) == SETTLE
        assert watched.runs.causes == []
    assert watched.look(after=SETTLE / 2) == SETTLE / 2
    watched.look(after=SETTLE / 2)
    assert watched.runs.causes == [("rows",)]


def test_data_that_came_back_to_what_the_last_run_took_starts_nothing(watched):
    watched.look()
    watched.rows.write_text("second")
    watched.look()
    watched.rows.write_text("first")
    watched.look_until_rested()
    assert watched.runs.causes == []


def test_data_that_comes_back_after_a_run_took_other_data_starts_another(watched):
    watched.look()
    for content in ("second", "first", "second"):
        watched.rows.write_text(content)
        watched.look_until_rested()
    assert len(watched.runs.causes) == 3


def test_a_run_under_way_is_not_overtaken_and_one_follows_with_the_newest_state(watched):
    watched.look()
    watched.runs.busy = "slow-run"
    for content in ("second", "third"):
        watched.rows.write_text(content)
        watched.look_until_rested()
        assert watched.runs.causes == []
    watched.runs.busy = None
    watched.look_until_rested()
    assert watched.runs.causes == [("rows",)]


def test_data_that_a_run_under_way_has_taken_itself_starts_none_after_it(watched):
    watched.run_pipeline()
    watched.look()
    watched.runs.busy = "slow-run"
    watched.rows.write_text("second")
    watched.look_until_rested()
    watched.run_pipeline()
    watched.runs.busy = None
    watched.look_until_rested()
    assert watched.runs.causes == []


def test_data_that_changed_while_nobody_watched_starts_a_run(watched):
    watched.look()
    watched.rows.write_text("second")
    watched.restart()
    watched.look_until_rested()
    assert watched.runs.causes == [("rows",)]


def test_data_that_changed_since_the_last_run_starts_one_though_it_was_never_watched_before(watched):
    watched.run_pipeline()
    watched.rows.write_text("second")
    watched.look_until_rested()
    assert watched.runs.causes == [("rows",)]


def test_a_watcher_that_is_killed_between_the_run_and_its_note_starts_no_second(watched):
    watched.look()
    memory = Memory.read(watched.pipeline.store / "watch" / "toy.json")
    watched.rows.write_text("second")
    watched.look_until_rested()
    memory.write(watched.pipeline.store / "watch" / "toy.json")
    watched.restart()
    watched.look_until_rested()
    assert watched.runs.causes == [("rows",)]


@pytest.mark.parametrize("trigger", ["{sources: [rows]}", "{events: [data.ready]}"])
def test_what_a_run_was_to_take_in_that_died_is_due_again(tmp_path, trigger):
    """Also where the run has made its data before it died, and over a restart of the watcher."""
    watched = Watched(tmp_path, trigger)
    watched.look()
    watched.rows.write_text("second")
    watched.runs.send("data.ready")
    watched.runs.end = "open"
    watched.look_until_rested()
    finish(make_plan(watched.pipeline), "data")
    watched.look_until_rested()
    assert len(watched.runs.causes) == 1
    watched.restart()
    watched.runs.end = "lost"
    watched.look(after=POLL)
    watched.runs.end = "open"
    watched.look_until_rested()
    assert len(watched.runs.causes) == 2
    assert watched.runs.causes[0] == watched.runs.causes[1]
    watched.runs.end = "over"
    watched.look_until_rested()
    assert len(watched.runs.causes) == 2


def test_what_changes_while_a_run_is_under_way_that_dies_is_one_run_after_it(watched):
    watched.look()
    watched.rows.write_text("second")
    watched.runs.end = "open"
    watched.look_until_rested()
    watched.rows.write_text("third")
    watched.look_until_rested()
    assert len(watched.runs.causes) == 1
    watched.runs.end = "lost"
    watched.look(after=POLL)
    watched.runs.end = "over"
    watched.look_until_rested()
    assert watched.runs.causes == [("rows",)] * 2


def test_runs_that_all_die_over_the_same_data_are_given_up_with_a_warning(watched, caplog):
    watched.look()
    watched.rows.write_text("second")
    watched.runs.end = "lost"
    for _ in range(10):
        watched.look_until_rested()
    assert watched.runs.causes == [("rows",)] * 5
    assert "died, as 4 before it; start the next yourself" in caplog.text
    watched.runs.end = "over"
    watched.rows.write_text("third")
    watched.look_until_rested()
    assert len(watched.runs.causes) == 6


def test_data_that_a_run_by_hand_has_begun_with_and_not_ended_is_due(watched):
    watched.run_pipeline()
    watched.look()
    watched.rows.write_text("second")
    finish(make_plan(watched.pipeline), "data")
    watched.look_until_rested()
    assert watched.runs.causes == [("rows",)]


def test_a_source_that_does_not_rest_is_said_once(watched, caplog):
    caplog.set_level("INFO", logger="flows.watch.watcher")
    watched.look()
    for number in range(5):
        watched.rows.write_text(str(number))
        watched.look(after=SETTLE / 2)
    assert watched.runs.causes == []
    assert [record.message for record in caplog.records] == ["toy/local: new: rows; waits until it rests"]


def test_a_look_that_fails_is_told_once_and_watching_goes_on(watched, caplog):
    watched.look()
    watched.rows.unlink()
    assert [watched.look(after=POLL) for _ in range(3)] == [POLL] * 3
    assert len(caplog.records) == 1 and "no such file or directory" in caplog.text
    watched.rows.write_text("second")
    watched.look_until_rested()
    assert watched.runs.causes == [("rows",)]


def test_a_damaged_note_begins_anew(watched):
    watched.look()
    (watched.pipeline.store / "watch" / "toy.json").write_text("{")
    watched.look_until_rested()
    assert watched.runs.causes == []


def test_events_of_a_burst_start_one_run(tmp_path):
    watched = Watched(tmp_path, "{events: [data.ready]}")
    watched.runs.send("data.ready")  # before anybody watched
    watched.look_until_rested()
    assert watched.runs.causes == []
    for name in ("data.ready", "data.ready", "another"):
        watched.runs.send(name)
        watched.look(after=SETTLE / 2)
    watched.look_until_rested()
    watched.look_until_rested()
    assert watched.runs.causes == [("data.ready",)]


def test_an_event_while_a_run_is_under_way_is_followed_by_one_more(tmp_path):
    watched = Watched(tmp_path, "{events: [data.ready]}")
    watched.look()
    watched.runs.send("data.ready")
    watched.runs.busy = "slow-run"
    watched.look_until_rested()
    watched.restart()
    watched.runs.busy = None
    watched.look_until_rested()
    assert watched.runs.causes == [("data.ready",)]


def test_an_event_of_a_clock_that_lags_is_not_passed_over(tmp_path):
    watched = Watched(tmp_path, "{events: [data.ready]}")
    watched.look()
    watched.runs.send("data.ready", ago=timedelta(minutes=30))
    watched.look_until_rested()
    assert watched.runs.causes == [("data.ready",)]


def test_data_and_events_are_one_run(tmp_path):
    watched = Watched(tmp_path, "{sources: [rows], events: [data.ready]}")
    watched.look()
    watched.rows.write_text("second")
    watched.runs.send("data.ready")
    watched.look_until_rested()
    assert watched.runs.causes == [("rows", "data.ready")]


def test_the_poll_is_the_longest_pause(tmp_path):
    watched = Watched(tmp_path, "{sources: [rows], poll: 3, settle: 10}")
    assert watched.look() == 3
    watched.rows.write_text("second")
    assert watched.look() == 3


def test_events_that_can_no_longer_be_met_are_forgotten():
    old = Arrival(id="old", name="e", occurred="2026-01-01T00:00:00+00:00")
    new = replace(old, id="new", occurred="2026-01-01T05:00:00+00:00")
    now = datetime(2026, 1, 1, 5, tzinfo=UTC)
    memory = Memory.beginning(now).following(Seen(arrivals=(old, new)), now)
    assert list(memory.followed) == ["new"]

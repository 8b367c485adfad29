import multiprocessing
from pathlib import Path

import pytest

from lineage.errors import ArtifactError
from lineage.promotions import PROMOTIONS, Event, append, decision, locked, read_events, rolled_back, stacks


def promote(store: Path, fingerprint: str, alias: str = "champion") -> None:
    with locked(store):
        append(store, Event(action="promote", alias=alias, fingerprint=fingerprint, who="me", why="ü\u2028"))


def roll_back(store: Path) -> None:
    with locked(store):
        append(store, Event(action="rollback", alias="champion", fingerprint="", who="me", why=""))


def held(store):
    """Alias -> fingerprints of its holders, the present one last."""
    return {alias: [event.fingerprint for event in stack] for alias, stack in stacks(read_events(store)).items()}


def test_a_promotion_pushes_and_a_rollback_pops(tmp_path):
    for fingerprint in ("a", "b", "a"):
        promote(tmp_path, fingerprint)
    promote(tmp_path, "x", "production")
    assert {alias: stack[-1] for alias, stack in held(tmp_path).items()} == {"champion": "a", "production": "x"}
    roll_back(tmp_path)
    assert held(tmp_path)["champion"][-1] == "b"
    roll_back(tmp_path)
    assert held(tmp_path) == {"champion": ["a"], "production": ["x"]}


def test_the_last_word_on_a_verdict_counts_and_only_for_its_bytes(tmp_path):
    for action in ("approve", "reject", "approve"):
        with locked(tmp_path):
            append(tmp_path, Event(action=action, fingerprint="v", digest="d", who=action, why=""))
    events = read_events(tmp_path)
    assert decision(events, "v", "d").action == "approve"
    assert decision(events[:2], "v", "d").action == "reject"
    assert decision(events, "v", "other bytes") is None
    assert decision(events, "other verdict", "d") is None


def _promote_many(store: Path, name: str) -> None:
    for index in range(8):
        promote(store, f"{name}{index}")


def test_writers_at_once_lose_no_event(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_promote_many, args=(tmp_path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    events = [event.fingerprint for event in read_events(tmp_path)]
    assert len(events) == 24
    for name in "abc":
        assert [each for each in events if each.startswith(name)] == [f"{name}{index}" for index in range(8)]


def test_a_model_that_was_rolled_back_is_taken_back_until_it_is_promoted_again(tmp_path):
    def taken() -> set[str]:
        return {fingerprint for _, fingerprint in rolled_back(read_events(tmp_path), "champion")}

    promote(tmp_path, "a")
    promote(tmp_path, "b")
    promote(tmp_path, "b", "production")
    assert taken() == set()
    roll_back(tmp_path)
    assert taken() == {"b"}
    promote(tmp_path, "b")
    assert taken() == set()


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    promote(tmp_path, "a")
    with (tmp_path / PROMOTIONS).open("a") as file:
        file.write("{}\n")
    promote(tmp_path, "b")
    with pytest.raises(ArtifactError, match=r"promotions\.jsonl:2: is not an event"):
        read_events(tmp_path)

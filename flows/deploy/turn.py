"""One run of a pipeline in a store at a time, and no second one that waits to do the same."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from prefect.logging import get_run_logger

from flows.declare.pipeline import Pipeline
from flows.progress.waiting_note import WaitingNote
from lineage.digest import digest_of
from lineage.fingerprint import short
from lineage.lock import Lock, acquire_or

_HOLDER = "run"  # the file in a place that names the run that has it


@contextlib.contextmanager
def turn(pipeline: Pipeline, words: Sequence[str], run: str, *, may_leave: bool) -> Iterator[str | None]:
    """The next run makes its plan when the one before it is over, of what is new then.

    Not a concurrency limit of Prefect's deployment: a run gives that up while it waits for a person, and is ended when
    the server that counts it is away for some minutes.

    Args:
        words: what states this run.
        run: its name.
        may_leave: to another that the same words state and that waits already: it will do all that this one would.

    Yields:
        The name of that other; None: it is our turn, for as long as the context lasts.
    """
    runs = pipeline.store / "runs"
    place = runs / f"{pipeline.name}.turn"
    lock = Lock(place)
    if not lock.try_acquire():
        alike = f"{pipeline.name}.next-{short(digest_of({'words': shlex.join(words)}))}"
        with _waiting(runs / alike, run) if may_leave else contextlib.nullcontext() as other:
            if other:
                yield other
                return
            get_run_logger().info(f"waits for another run of {pipeline.name}")
            note = WaitingNote(pipeline.store, pipeline.name, words)
            with note.open():
                acquire_or(lock, lambda: False, lambda: note.waits_for(_other(pipeline.name, place)))
    with lock.holding():
        (place / _HOLDER).write_text(run)
        yield None


def _other(pipeline: str, place: Path) -> str:
    """Whose turn it is, in words."""
    name = _holder(place)
    return f"another run of {pipeline}{f': {name}' if name else ''}"


@contextlib.contextmanager
def _waiting(place: Path, run: str) -> Iterator[str | None]:
    """Takes the one place there is to wait in; else who has it."""
    lock = Lock(place)
    if lock.try_acquire():
        with lock.holding():
            (place / _HOLDER).write_text(run)
            yield None
    else:
        yield _holder(place) or "that waits"


def _holder(place: Path) -> str:
    """The name of the run that has a place; empty: it has not written it yet."""
    name = place / _HOLDER
    return name.read_text() if name.exists() else ""

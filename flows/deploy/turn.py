"""One run of a pipeline in a store at a time, and no second one that waits to do the same."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from prefect.logging import get_run_logger

from flows.declare.pipeline import Pipeline
from lineage.digest import digest_of
from lineage.fingerprint import short
from lineage.lease import Lease, acquire_or


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
    lease = Lease(runs / f"{pipeline.name}.turn")
    if not lease.try_acquire():
        alike = f"{pipeline.name}.next-{short(digest_of({'words': shlex.join(words)}))}"
        with _waiting(runs / alike, run) if may_leave else contextlib.nullcontext() as other:
            if other:
                yield other
                return
            get_run_logger().info(f"waits for another run of {pipeline.name}")
            acquire_or(lease, lambda: False, lambda: None)
    with lease.holding():
        yield None


@contextlib.contextmanager
def _waiting(place: Path, run: str) -> Iterator[str | None]:
    """Takes the one place there is to wait in; else who has it."""
    lease, name = Lease(place), place / "run"
    if lease.try_acquire():
        with lease.holding():
            name.write_text(run)
            yield None
    else:
        yield name.read_text() if name.exists() else "that waits"

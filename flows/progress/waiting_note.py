"""The note of a run that has not begun: it waits as a whole, and has no plan and no stages yet."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flows.progress.run_record import Links, RunRecord, end_of, new_id, run_record_path, with_flow_run
from lineage.owner import HEARTBEAT_SECONDS, Owner


class WaitingNote:
    """Tells whoever asks from another process of a run that waits, and lets them cancel it.

    Args:
        words: the options and overrides of its command.
    """

    def __init__(self, store: Path, pipeline: str, words: Sequence[str]) -> None:
        self._store = store
        self._note = RunRecord(
            id=new_id(), pipeline=pipeline, words=list(words), driver=Owner.here(), started=time.time(), stages={},
            links=with_flow_run(Links(), is_ours=False),
        )  # fmt: skip
        self._written = 0.0

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Ends the note with what cuts the wait off; else it is gone: a run that begins writes one with its stages."""
        try:
            yield
        except BaseException as error:
            outcome, cause = end_of(error)
            self._write(replace(self._note, outcome=outcome, cause=cause, ended=time.time()))
            raise
        with contextlib.suppress(OSError):
            run_record_path(self._store, self._note.id).unlink(missing_ok=True)

    def waits_for(self, what: str) -> None:
        """Call it at every look that was in vain: that is the heartbeat too, by which another host hears of it."""
        now = time.monotonic()
        if what != self._note.waits_for or now - self._written >= HEARTBEAT_SECONDS:
            self._write(replace(self._note, waits_for=what))
            self._written = now

    def _write(self, note: RunRecord) -> None:
        self._note = note
        with contextlib.suppress(OSError):  # a store that cannot be written is told by whoever needs it
            note.write(self._store)

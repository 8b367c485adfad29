"""The logs of stages: which directory a REF means, finished or not, and reading while a stage writes."""

import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flows.progress.run_record import RunRecord, is_to_begin, latest, waits_for
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.lock import owner
from lineage.graph.index import Index
from lineage.graph.places import artifact_at, node_key
from lineage.graph.refs import resolve
from lineage.store import Entry, Store

_POLL_SECONDS = 0.3
_DIGITS = re.compile("[0-9a-f]{4,64}")


def stage_entry(ref: str, store: Path) -> Entry:
    """The directory of the stage that a REF names, also if it is running, failed, or was killed.

    Args:
        ref: what names an artifact (``lineage/graph/refs.py``); also a stage as ``posttrain status`` shows it:
            ``dpo``, ``dpo#3`` of a sweep, ``PIPELINE/dpo``. Then the last run of it is meant.

    Raises:
        ConfigError: nothing or several things bear that name.
        ArtifactError: the stage has not begun.
    """
    return _noted(ref, store) or _stored(ref, store) or _recorded(ref, store)


def begun_entry(ref: str, store: Path) -> Entry:
    """The same, once the last run that has the stage has begun it; at once where that run is over.

    Raises:
        ConfigError, ArtifactError: as above.
    """
    while True:
        run = next(_bearers(ref, store), None)
        if run is None or not (is_to_begin(_title(ref), run) and run.is_live(store)):
            return stage_entry(ref, store)
        time.sleep(_POLL_SECONDS)


def _title(ref: str) -> str:
    return ref.rpartition("/")[2]


def _bearers(ref: str, store: Path) -> Iterator[RunRecord]:
    """The runs that have, or will have, a stage of this title, the last one first."""
    pipeline, title = ref.rpartition("/")[0], _title(ref)
    for note in latest(store):
        if pipeline in ("", note.pipeline) and (title in note.stages or is_to_begin(title, note)):
            yield note


def _noted(ref: str, store: Path) -> Entry | None:
    """By the notes of the runs; one that has not begun it counts if no other bears the name."""
    first: RunRecord | None = None
    for note in _bearers(ref, store):
        stage = note.stages.get(_title(ref))
        directory = stage.directory if stage else ""
        if directory and Path(directory, "logs").is_dir():
            return Entry(Path(directory))
        first = first or note
    if first is None:
        return None
    if not first.is_live(store):
        raise ArtifactError(f"{ref} has no log: the run {first.id} was over before it began; see posttrain status")
    reason = waits_for(_title(ref), first)
    waits = f": it waits for {reason}" if reason else ""
    raise ArtifactError(f"{ref} has not begun{waits}, and so has no log; --follow waits for one")


def _stored(ref: str, store: Path) -> Entry | None:
    """By its directory, by the digits of its fingerprint, or the one of a stage's name whose log is the newest."""
    place = artifact_at(store, str(Path(ref).expanduser()))
    if place:
        entry = Store(store).entry(*place)
        return entry if entry.path.is_dir() else None
    stage, _, digits = ref.rpartition("@")
    if not _DIGITS.fullmatch(digits):
        named = [entry for name, entry in Store(store).entries() if name == ref and entry.logs.is_dir()]
        return max(named, key=lambda entry: entry.logs.stat().st_mtime, default=None)
    found = [
        (node_key(name, entry.path.name), entry)
        for name, entry in Store(store).entries()
        if entry.path.name.startswith(digits[:16]) and stage in ("", name)
    ]
    if len(found) > 1:
        raise ConfigError(f"{ref} names {len(found)} things: {', '.join(key for key, _ in found)}; name one of them")
    return found[0][1] if found else None


def _recorded(ref: str, store: Path) -> Entry:
    with Index(store) as index:
        found = resolve(ref, index)
    if found.entry is None:
        raise ConfigError(f"{ref} is the source {found.node}, which no stage of this store made; name an artifact")
    return found.entry


def read_log(entry: Entry, num_lines: int | None) -> Iterator[str]:
    """The content so far.

    Args:
        num_lines: so many, the last ones; None: all.

    Raises:
        ArtifactError: there is no log.
    """
    with _open(entry) as file:
        yield from file if num_lines is None else deque(file, maxlen=num_lines)


def follow_log(entry: Entry, num_lines: int | None) -> Iterator[str]:
    """The same, followed by further lines until the stage ends: it is committed, or no run produces it any more."""
    log = entry.log
    while not log.exists() and _is_made(entry):
        time.sleep(_POLL_SECONDS)
    with _open(entry) as file:
        yield from file if num_lines is None else deque(file, maxlen=num_lines)
        while True:
            is_made = _is_made(entry)  # before the last read, so that no line is lost
            yield from file
            if not is_made:
                return
            time.sleep(_POLL_SECONDS)


def _is_made(entry: Entry) -> bool:
    return owner(entry.path) is not None


def _open(entry: Entry) -> IO[str]:
    log = entry.log
    try:
        return log.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ArtifactError(
            f"{entry.path}: has no log ({error.strerror}); a stage with launcher=foreground writes to the screen, "
            "and an output that came by dvc pull brought none"
        ) from error

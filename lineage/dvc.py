"""DVC: the view of a pipeline's current artifacts, DVC's hashes, and the commit of a finished run."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from filelock import FileLock

from lineage.errors import ArtifactError
from lineage.filesystem.digest import DigestCache, digest_file, file_names
from lineage.filesystem.files import replace_jsonl
from lineage.filesystem.lock import Lock
from lineage.filesystem.remote_files import dvc_state
from lineage.fingerprint import digest_json
from lineage.store import MANIFEST, METRICS, PLOTS, Entry, Manifest, Store


def tracked_hash(path: Path, cache: DigestCache) -> str | None:
    """DVC's hash of a tracked file or directory; None: it is untracked, or has changed since ``dvc add``."""
    try:
        configured = yaml.safe_load(path.with_name(path.name + ".dvc").read_text())["outs"][0]["md5"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, IndexError, TypeError):
        return None
    return str(configured) if configured == dvc_hash(path, cache) else None


def dvc_hash(path: Path, cache: DigestCache) -> str:
    """MD5 of a file; for a directory, MD5 of the list of its files with the suffix ``.dir``, as DVC computes it."""
    if path.is_file():
        return cache.digest(path, "md5")
    listing = [{"md5": cache.digest(path / name, "md5"), "relpath": name} for name in file_names(path)]
    listing.sort(key=lambda entry: entry["relpath"])
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


VIEWS = "pipelines"

_Link = Callable[[Path, Path], object]


class View:
    """The current outputs of one pipeline, at paths without fingerprints: what DVC tracks."""

    def __init__(self, store: Path, pipeline: str) -> None:
        self.root = store / VIEWS / pipeline
        self.digests = DigestCache(store / "digests.json")
        self._store = store

    def place(self, stage: str) -> Path:
        return self.root / stage

    def show(self, entries: Mapping[str, Entry]) -> None:
        """Points the view to these finished entries of the store, atomically per stage."""
        stale = {stage: entry for stage, entry in entries.items() if not self.shows(stage, entry)}
        if not stale:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        with FileLock(self.root / ".lock"):
            for stage, entry in stale.items():
                if not self.shows(stage, entry):  # another run may have moved it meanwhile
                    self._move(stage, entry)

    def shows(self, stage: str, entry: Entry) -> bool:
        """Whether the view holds this entry: each file with the same inode or the same bytes."""
        manifest, place = entry.manifest(), self.place(stage)
        if manifest is None or set(file_names(place / "output")) != manifest.files.keys():
            return False
        return all(
            _is_same(entry.path / name, place / name, digest, self.digests)
            for name, digest in _contents(manifest).items()
        )

    def adopt(self, stage: str) -> str | None:
        """Links an artifact of the view into a store that lacks it: in a clone after ``dvc pull``.

        Returns:
            A message on what was done or why it failed; None: there is nothing to do.
        """
        place = self.place(stage)
        try:
            manifest = Entry(place).manifest()
        except ArtifactError as error:
            return f"{place}: is not adopted: {error}"
        if manifest is None:
            return None
        if manifest.stage != stage or not re.fullmatch("[0-9a-f]{64}", manifest.fingerprint):
            return f"{place}: is not adopted: its {MANIFEST} is of stage {manifest.stage}; restore it: dvc checkout"
        entry = Store(self._store).entry(stage, manifest.fingerprint)
        if entry.is_finished():
            return None
        damage = manifest.damage(place / "output", self.digests)
        if damage:
            return (
                f"{place}/output: is not adopted, since it differs from what was committed: {'; '.join(damage[:3])}; "
                "restore it with dvc pull --force, or run the stage again"
            )
        try:
            lock = Lock(entry.path)
            if not lock.try_acquire():  # another run is producing it
                return None
            with lock.holding():
                if entry.is_finished():  # by a run that ended since the first check
                    return None
                self._fill(entry, place, manifest, lock)
        except OSError as error:  # a read-only store
            return f"{place}: is not adopted: {error}"
        return f"{stage}: {place} adopted as {entry.path}"

    def _move(self, stage: str, entry: Entry) -> None:
        """Builds the links in a temporary directory and swaps: a kill leaves the old view, the new one, or none."""
        manifest = entry.manifest()
        assert manifest is not None
        entry.summarize(manifest)  # outputs of older versions lack the summary
        place, fresh, old = self.place(stage), self.root / f".{stage}.new", self.root / f".{stage}.old"
        for rest in (fresh, old):  # of an earlier attempt that was killed
            shutil.rmtree(rest, ignore_errors=True)
        for name in _contents(manifest):
            _place(entry.path / name, fresh / name, (os.link, os.symlink, shutil.copyfile))
        if place.exists():
            place.rename(old)
        fresh.rename(place)
        shutil.rmtree(old, ignore_errors=True)

    def _fill(self, entry: Entry, place: Path, manifest: Manifest, lock: Lock) -> None:
        entry.begin()
        for name in _contents(manifest):
            if (place / name).exists():
                # No symbolic link into the view: DVC deletes what lies there.
                target = entry.work if name == MANIFEST else entry.path
                _place(place / name, target / name, (os.link, shutil.copyfile))
        _restore_reports(entry)
        entry.finish(lock)


def _contents(manifest: Manifest) -> dict[str, str | None]:
    """Files of an entry that a view holds: path -> SHA-256; None: the manifest does not record it."""
    return {
        MANIFEST: None,
        METRICS: None,
        PLOTS: None,
        **{f"output/{name}": sha for name, sha in manifest.files.items()},
    }


def _is_same(stored: Path, shown: Path, digest: str | None, digests: DigestCache) -> bool:
    """Compares bytes if the inodes differ: DVC links equal files of several stages to one of them."""
    try:
        one, other = stored.stat(), shown.stat()
    except FileNotFoundError:
        return False
    if os.path.samestat(one, other):
        return True
    return one.st_size == other.st_size and digests.digest(shown) == (digest or digests.digest(stored))


def _place(source: Path, target: Path, ways: tuple[_Link, ...]) -> None:
    """Links or copies ``source`` to ``target`` in the first way that the file system supports."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source = source.resolve()  # DVC may have made it a symbolic link to its cache
    for way in ways[:-1]:
        with contextlib.suppress(OSError):
            way(source, target)
            return
    ways[-1](source, target)


def _restore_reports(entry: Entry) -> None:
    """Restores ``metrics.jsonl``, which is not in the view, from ``plots.json``."""
    try:
        reports = json.loads((entry.path / PLOTS).read_text())
        lines = [
            {"step": report.pop("step"), "time": report.pop("time"), "metrics": report} for report in reports if report
        ]
    except (OSError, ValueError, KeyError, AttributeError):  # only for display: no output depends on it
        return
    if lines:
        replace_jsonl(entry.metrics, lines)


FILE = "dvc.yaml"

# Longest wait for DVC's lock; after it, the commit is left to the next run.
PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.5
_BUSY = ("Unable to acquire lock", " is busy, it is being blocked by")


@dataclass(frozen=True, kw_only=True)
class DvcProject:
    """A folder whose ``dvc.yaml`` may declare a pipeline.

    Args:
        root: the DVC repository that contains the folder; None: there is none.
        stages: the stages of ``dvc.yaml`` by name; empty: there is no such file.
    """

    folder: Path
    root: Path | None
    stages: Mapping[str, Mapping[str, object]]

    @staticmethod
    def at(folder: Path) -> "DvcProject":
        root = next((each for each in (folder, *folder.parents) if (each / ".dvc").is_dir()), None)
        return DvcProject(folder=folder, root=root, stages=read_stages(folder))

    def keeps(self, view: View, stage: str) -> bool:
        """Whether ``dvc.yaml`` has the stage with its output in the view."""
        outs = self.stages.get(stage, {}).get("outs")
        paths = [path for out in (outs if isinstance(outs, list) else []) for path in _names(out)]
        return any(os.path.abspath(self.folder / path) == str(view.place(stage) / "output") for path in paths)

    def overrides(self, stage: str) -> list[str]:
        """The arguments of a stage's command after ``stage NAME``: options and overrides of the pipeline."""
        with contextlib.suppress(ValueError):  # the user's own command
            parts = shlex.split(str(self.stages[stage].get("cmd")))
            return parts[parts.index(stage, parts.index("stage")) + 1 :]
        return []

    def is_committed(self, view: View, stages: Iterable[str]) -> bool:
        """Whether neither DVC's files nor the view have changed since our last commit."""
        try:
            return self._mark(view).read_text() == self._state(view, stages)
        except OSError:
            return False

    def commit(self, view: View, entries: Mapping[str, Entry], patience: float = PATIENCE_SECONDS) -> None:
        """Commits the view of all stages at once; waits while another ``dvc`` process holds DVC's lock.

        Raises:
            ArtifactError: an output is damaged, or ``dvc commit`` failed.
        """
        assert self.root is not None
        guard = self.root / ".dvc" / "tmp" / "posttrain.lock"
        guard.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(guard):
            if self.is_committed(view, entries):  # by the run that we waited for
                return
            for entry in entries.values():
                entry.require_intact(view.digests)
            self._commit(entries, patience)
            if self._drop_damaged(view, entries):
                view.show(entries)
                self._commit(entries, patience)
            self._mark(view).write_text(self._state(view, entries))

    def _commit(self, stages: Collection[str], patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            result = self._dvc("commit", "--force", *stages)
            if result.returncode == 0:
                return
            is_busy = any(phrase in result.stderr for phrase in _BUSY)
            if not is_busy or time.monotonic() > deadline:
                waited = f"another dvc was at work, and still after {patience:.0f} s: " if is_busy else ""
                repair = shlex.join(["dvc", "commit", "--force", *stages])
                raise ArtifactError(f"{waited}{_reason(result.stderr)}; then repair with: {repair}")
            time.sleep(_POLL_SECONDS)

    def _dvc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # -P: the user's files in this folder must not shadow modules of DVC.
        return subprocess.run(
            [sys.executable, "-P", "-m", "dvc", *arguments],
            cwd=self.folder, env={"DVC_SITE_CACHE_DIR": dvc_state(), **os.environ, "DVC_NO_ANALYTICS": "1"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def _drop_damaged(self, view: View, entries: Mapping[str, Entry]) -> bool:
        """Deletes files of DVC's cache that were modified through a hard link: DVC trusts its cache.

        Returns:
            Whether there were any.
        """
        damaged = [stage for stage, entry in entries.items() if not view.shows(stage, entry)]
        if not damaged:
            return False
        cache = Path(self._dvc("cache", "dir").stdout.strip()) / "files" / "md5"
        for stage in damaged:
            for name in file_names(entries[stage].output):
                md5 = digest_file(entries[stage].output / name, "md5")
                cached = cache / md5[:2] / md5[2:]
                if cached.is_file() and digest_file(cached, "md5") != md5:
                    cached.unlink()
        return True

    def _mark(self, view: View) -> Path:
        return view.root / ".committed"

    def _state(self, view: View, stages: Iterable[str]) -> str:
        """Digest of everything that DVC compares, except the sources: the manifests record those."""
        files = [FILE, "dvc.lock", *self._parameter_files()]
        texts = {name: _text(self.folder / name) for name in files}
        shown = {stage: [_text(view.place(stage) / MANIFEST), *_times(view.place(stage))] for stage in stages}
        return digest_json({"files": texts, "view": shown})

    def _parameter_files(self) -> list[str]:
        configured = [stage.get("params") for stage in self.stages.values()]
        return sorted(
            {name for params in configured if isinstance(params, list) for each in params for name in _names(each)}
        )


def read_stages(folder: Path) -> dict[str, Mapping[str, object]]:
    """The stages of a folder's ``dvc.yaml``; empty if it is missing or invalid, which DVC itself will report."""
    try:
        document = yaml.safe_load((folder / FILE).read_text())
        return {str(name): stage for name, stage in document["stages"].items() if isinstance(stage, dict)}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return {}


def _names(configured: object) -> list[str]:
    """The path of an output or a parameter file: a string, or the only key of a mapping."""
    return [str(key) for key in configured] if isinstance(configured, dict) else [str(configured)]


def _times(place: Path) -> list[str]:
    """Size and mtime of each file."""
    status = {name: (place / name).stat() for name in file_names(place)}
    return [f"{name}:{each.st_size}:{each.st_mtime_ns}" for name, each in status.items()]


def _text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return next(iter([*errors, *reversed(lines)]), "dvc commit failed without a message")

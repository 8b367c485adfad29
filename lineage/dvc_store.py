"""DVC's side of a pipeline: which stages of ``dvc.yaml`` keep its view, and ``dvc commit`` of them."""

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from filelock import FileLock

from lineage.digest import digest_file, file_names
from lineage.errors import ArtifactError
from lineage.fingerprint import canonical_json
from lineage.private_folder import dvc_state
from lineage.store import MANIFEST, Entry
from lineage.view import View

FILE = "dvc.yaml"

# How long another `dvc` of the user may hold DVC's lock before we leave the commit to the next run.
PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.5
_BUSY = ("Unable to acquire lock", " is busy, it is being blocked by")


@dataclass(frozen=True, kw_only=True)
class DvcProject:
    """A folder whose ``dvc.yaml`` may keep a pipeline.

    Args:
        root: the DVC repository that the folder lies in; None: it lies in none.
        stages: of ``dvc.yaml``, by name; empty where there is none.
    """

    folder: Path
    root: Path | None
    stages: Mapping[str, Mapping[str, object]]

    @staticmethod
    def at(folder: Path) -> "DvcProject":
        root = next((each for each in (folder, *folder.parents) if (each / ".dvc").is_dir()), None)
        return DvcProject(folder=folder, root=root, stages=read_stages(folder))

    def keeps(self, view: View, stage: str) -> bool:
        """Whether ``dvc.yaml`` has the stage, with its output at the place of the view."""
        outs = self.stages.get(stage, {}).get("outs")
        paths = [path for out in (outs if isinstance(outs, list) else []) for path in _names(out)]
        return any(os.path.abspath(self.folder / path) == str(view.place(stage) / "output") for path in paths)

    def words(self, stage: str) -> list[str]:
        """What its command states after ``stage NAME``: the options and overrides that declare the pipeline."""
        with contextlib.suppress(ValueError):  # it is no such command
            parts = shlex.split(str(self.stages[stage].get("cmd")))
            return parts[parts.index(stage, parts.index("stage")) + 1 :]
        return []

    def is_committed(self, view: View, stages: Iterable[str]) -> bool:
        """Whether nothing changed since the last commit of ours: neither DVC's files nor the view."""
        try:
            return self._mark(view).read_text() == self._state(view, stages)
        except OSError:
            return False

    def commit(self, view: View, entries: Mapping[str, Entry], patience: float = PATIENCE_SECONDS) -> None:
        """Records what the view holds, once for all stages; waits while another ``dvc`` works.

        Raises:
            ArtifactError: an output is damaged, or DVC could not: its reason, in one line.
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
        # -P: a file of the user's in this folder shadows no module of DVC's.
        return subprocess.run(
            [sys.executable, "-P", "-m", "dvc", *arguments],
            cwd=self.folder, env={"DVC_SITE_CACHE_DIR": dvc_state(), **os.environ, "DVC_NO_ANALYTICS": "1"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def _drop_damaged(self, view: View, entries: Mapping[str, Entry]) -> bool:
        """Deletes cached files that were written through a hard link: DVC trusts its cache, and just linked them.

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
        """Digest of all that DVC compares but the sources: those are in the manifests."""
        files = [FILE, "dvc.lock", *self._parameter_files()]
        texts = {name: _text(self.folder / name) for name in files}
        shown = {stage: [_text(view.place(stage) / MANIFEST), *_times(view.place(stage))] for stage in stages}
        return hashlib.sha256(canonical_json({"files": texts, "view": shown}).encode()).hexdigest()

    def _parameter_files(self) -> list[str]:
        stated = [stage.get("params") for stage in self.stages.values()]
        return sorted(
            {name for params in stated if isinstance(params, list) for each in params for name in _names(each)}
        )


def read_stages(folder: Path) -> dict[str, Mapping[str, object]]:
    """The stages of a folder's ``dvc.yaml``; none where it is absent or no such file: DVC will say what is wrong."""
    try:
        document = yaml.safe_load((folder / FILE).read_text())
        return {str(name): stage for name, stage in document["stages"].items() if isinstance(stage, dict)}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return {}


def _names(stated: object) -> list[str]:
    """The path of an output or a parameter file, which stands alone or as the one key of a mapping."""
    return [str(key) for key in stated] if isinstance(stated, dict) else [str(stated)]


def _times(place: Path) -> list[str]:
    """Tells whether a file was written since, without reading it."""
    status = {name: (place / name).stat() for name in file_names(place)}
    return [f"{name}:{each.st_size}:{each.st_mtime_ns}" for name, each in status.items()]


def _text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return next(iter([*errors, *reversed(lines)]), "dvc commit ended without a word")

"""Checks the view against the store, and ``dvc.lock`` against the view."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from lineage.digest import DigestCache
from lineage.dvc_hash import dvc_hash
from lineage.errors import ArtifactError
from lineage.graph.places import node_key
from lineage.store import MANIFEST, Entry
from lineage.verify.finding import Fault, Finding
from lineage.verify.store import Checked


def check_view(store: Path, checked: Checked) -> Iterator[Finding]:
    """That each stage of each pipeline's view is a finished artifact of the store, with the same files."""
    for view in sorted((store / "pipelines").glob(f"*/*/{MANIFEST}")):
        what = f"{view.parents[1].name}/{view.parent.name}"
        try:
            manifest = Entry(view.parent).manifest()
        except ArtifactError as error:
            yield _finding(Fault.CHANGED, what, str(error))
            continue
        if manifest is None:  # moved on between the look and the reading
            continue
        node = node_key(manifest.stage, manifest.fingerprint)
        if node not in checked.all:
            yield _finding(Fault.ORPHANED, what, f"{view.parent} shows {node}, which is not in the store")
        elif node in checked.chosen:
            for phrase in manifest.damage(view.parent / "output"):
                yield _finding(Fault.CHANGED, what, f"{view.parent / 'output'}: {phrase}")


def check_lock(repository: Path, store: Path, cache: DigestCache) -> Iterator[Finding]:
    """That every output which ``dvc.lock`` names below the store has the hash that it states."""
    lock = repository / "dvc.lock"
    try:
        stages = yaml.safe_load(lock.read_text())["stages"]
        outs = [(name, out["path"], out["md5"]) for name, stage in stages.items() for out in stage.get("outs", [])]
    except FileNotFoundError:
        return
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        yield _finding(Fault.CHANGED, "dvc.lock", f"{lock} cannot be read: {error}")
        return
    for name, path, md5 in outs:
        place = repository / path
        if not place.is_relative_to(store):
            continue
        if not place.exists():
            yield _finding(Fault.MISSING, f"dvc.lock {name}", f"{path} is not there; `dvc checkout` restores it")
        elif dvc_hash(place, cache) != md5:
            yield _finding(Fault.CHANGED, f"dvc.lock {name}", f"{path} is not what DVC committed")


def _finding(fault: Fault, what: str, why: str) -> Finding:
    mend = "posttrain run, with no overrides, moves the view and commits it"
    return Finding(fault=fault, what=what, why=why, mend=mend)

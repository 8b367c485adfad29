"""Verification of the record: manifests, outputs, views and DVC's cache against their digests."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import yaml

from lineage.dvc import dvc_hash
from lineage.errors import ArtifactError, PipelineError
from lineage.filesystem.digest import DigestCache, damage_of, digest_file, digest_of
from lineage.filesystem.lock import owner
from lineage.fingerprint import fingerprint, short
from lineage.graph.places import node_key
from lineage.promotions import PROMOTIONS, Event, read_events, stacks
from lineage.record.certificate import certificate_path, read_certificate
from lineage.record.exports import EXPORTS, read_exports
from lineage.store import MANIFEST, Entry, InputRecord, Manifest, Store


class Fault(StrEnum):
    """How the record and what it records disagree."""

    MISSING = "missing"
    CHANGED = "changed"
    ORPHANED = "orphaned"  # a mirror refers to something that is not in the store
    NOTE = "note"  # not a fault: an unfinished stage, changed data


@dataclass(frozen=True)
class Finding:
    """One disagreement.

    Args:
        what: the artifact, link or file.
        why: what was found, and what was expected.
        mend: what to do.
    """

    fault: Fault
    what: str
    why: str
    mend: str  # its name in `verify --json`


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The finished artifacts that a check covers.

    Args:
        all: every finished artifact of the store, by node id.
        chosen: the ids that are checked.
    """

    all: Mapping[str, tuple[Entry, Manifest]]
    chosen: Collection[str]

    def items(self) -> Iterator[tuple[str, Entry, Manifest]]:
        for node in self.chosen:
            if node in self.all:
                yield (node, *self.all[node])

    @property
    def is_whole(self) -> bool:
        """Whether the whole store is checked, so that what is only in a mirror is an orphan."""
        return self.all.keys() <= set(self.chosen)


def read_store(root: Path) -> tuple[dict[str, tuple[Entry, Manifest]], list[Finding]]:
    """Every finished artifact by node id, and findings on all other directories."""
    found: dict[str, tuple[Entry, Manifest]] = {}
    findings = []
    for stage, entry in Store(root).entries():
        try:
            manifest = entry.manifest()
        except ArtifactError as error:
            findings.append(
                Finding(Fault.CHANGED, f"{stage}@{entry.path.name}", str(error), f"delete {entry.path}, and run again")
            )
            continue
        if manifest:
            found[node_key(stage, manifest.fingerprint)] = (entry, manifest)
        elif not owner(entry.path):
            why = f"{entry.path} was begun and never finished"
            remedy = "run its pipeline again, or delete the directory"
            findings.append(Finding(Fault.NOTE, f"{stage}@{entry.path.name}", why, remedy))
    return found, findings


def check_outputs(checked: Checked) -> Iterator[Finding]:
    """Compares every byte of every output with its digest."""
    for node, entry, manifest in checked.items():
        for phrase in manifest.damage(entry.output):
            fault = Fault.MISSING if phrase.endswith("is missing") else Fault.CHANGED
            remedy = f"restore it, or delete {entry.path} and run its pipeline again"
            yield Finding(fault, node, f"{entry.output}: {phrase}", remedy)
        yield from _check_identity(node, entry, manifest)
        if short(manifest.fingerprint) != entry.path.name:
            why = f"{entry.path} holds the manifest of {short(manifest.fingerprint)}"
            yield Finding(Fault.CHANGED, node, why, f"delete {entry.path}, and run its pipeline again")


def _check_identity(node: str, entry: Entry, manifest: Manifest) -> Iterator[Finding]:
    """Detects edited manifests: recipe and inputs must yield the fingerprint, files the output digest."""
    inputs = {slot: record.fingerprint for slot, record in manifest.inputs.items()}
    remedy = f"restore {entry.path / MANIFEST}, or delete {entry.path} and run its pipeline again"
    if fingerprint(manifest.recipe, inputs) != manifest.fingerprint:
        yield Finding(
            Fault.CHANGED,
            node,
            f"{entry.path / MANIFEST}: its recipe and inputs are not those of its fingerprint",
            remedy,
        )
    if digest_of(manifest.files) != manifest.output_digest:
        yield Finding(Fault.CHANGED, node, f"{entry.path / MANIFEST}: its digest is not that of its files", remedy)


def check_links(checked: Checked) -> Iterator[Finding]:
    """Checks that every input is in the store with the recorded digest."""
    for node, _, manifest in checked.items():
        for slot, record in manifest.inputs.items():
            if record.source is None and not record.artifact.startswith("source:"):
                yield from _check_parent(f"{node} input {slot}", record, checked)


def _check_parent(what: str, record: InputRecord, checked: Checked) -> Iterator[Finding]:
    parent = node_key(record.artifact, record.fingerprint)
    remedy = "run its pipeline again: finished stages are reused"
    if parent not in checked.all:
        yield Finding(Fault.MISSING, what, f"{parent} is not in the store", remedy)
        return
    digest = checked.all[parent][1].output_digest
    if record.digest != digest:
        why = f"it was made from {parent} with digest {str(record.digest)[:16]}, which now has {digest[:16]}"
        yield Finding(
            Fault.CHANGED,
            what,
            why,
            "the parent was produced again with other bytes: delete the child and run it again",
        )


def check_sources(checked: Checked, cache: DigestCache) -> Iterator[Finding]:
    """Notes on data files that have changed since a stage read them, which is normal."""
    seen: set[tuple[str, str]] = set()
    for node, _, manifest in checked.items():
        for record in manifest.inputs.values():
            for name, digest in (record.source.files if record.source else {}).items():
                if (name, digest) not in seen:
                    seen.add((name, digest))
                    yield from _check_file(f"{node} {record.artifact}", Path(name), digest, cache)


def _check_file(what: str, path: Path, digest: str, cache: DigestCache) -> Iterator[Finding]:
    try:
        why = "" if cache.digest(path) == digest else f"{path} has changed since it was read"
    except OSError:
        why = f"{path} is gone since it was read"
    if why:
        remedy = "nothing, if it was meant; the manifest keeps its digest"
        yield Finding(Fault.NOTE, what, why, remedy)


def check_promotions(root: Path, checked: Checked) -> Iterator[Finding]:
    """Checks that the model and the verdict of each promotion are in the store."""
    try:
        events = read_events(root)
    except PipelineError as error:
        yield Finding(Fault.CHANGED, PROMOTIONS, str(error), "correct the line")
        return
    held = {manifest.fingerprint for _, manifest in checked.all.values()}
    for alias, stack in stacks(events).items():
        if stack:
            yield from _check_promoted_bytes(alias, stack[-1], checked)
    for event in events:
        for role, named in (("model", event.fingerprint), ("verdict", event.verdict)):
            if named and named not in held:
                what = f"{event.action} of {event.alias or short(named)}"
                why = f"its {role} {short(named)} is not in the store"
                yield Finding(Fault.MISSING, what, why, "restore it, or roll the alias back")


def _check_promoted_bytes(alias: str, event: Event, checked: Checked) -> Iterator[Finding]:
    """Checks that the bytes of a promoted model are those that were judged."""
    known = checked.all.get(node_key(str(event.stage), event.fingerprint))
    if known and event.digest and known[1].output_digest != event.digest:
        why = f"{event.digest[:16]} was promoted, and that output has digest {known[1].output_digest[:16]} now"
        yield Finding(
            Fault.CHANGED, f"alias {alias}", why, "judge the new bytes and promote them, or roll the alias back"
        )


def check_certificates(root: Path, checked: Checked) -> Iterator[Finding]:
    """Checks that the certificate of each manifest exists and is unmodified."""
    for node, _, manifest in checked.items():
        if manifest.certificate:
            try:
                read_certificate(root, manifest.certificate)
            except ArtifactError as error:
                lost = not certificate_path(root, manifest.certificate).exists()
                fault = Fault.MISSING if lost else Fault.CHANGED
                remedy = "restore it; a new one, by posttrain certify, holds for what is made after it"
                yield Finding(fault, node, str(error), remedy)


def check_exports(root: Path, checked: Checked) -> Iterator[Finding]:
    """Compares what was exported, where it still exists, with its digests; notes what does not."""
    try:
        exports = [each for each in read_exports(root) if each.node in checked.chosen or checked.is_whole]
    except PipelineError as error:
        yield Finding(Fault.CHANGED, EXPORTS, str(error), "correct the line")
        return
    newest = {each.place: each for each in exports}  # a later one has replaced an earlier one there
    for export in newest.values():
        what = f"{export.form} of {export.node}"
        if not Path(export.place).exists():
            yield Finding(Fault.NOTE, what, f"{export.place} is gone since it was exported", "nothing, if it was meant")
            continue
        present = {name: export.folder / name for name in export.files if (export.folder / name).is_file()}
        found = {name: digest_file(path) for name, path in present.items()}
        for phrase in damage_of(export.files, found):
            yield Finding(Fault.CHANGED, what, f"{export.place}: {phrase}", "export it again, or delete it")
        if export.node not in checked.all:
            why = f"its model is no longer in the store, and {export.place} is still there"
            yield Finding(Fault.NOTE, what, why, "nothing, if it was meant; its record is kept")


def check_view(store: Path, checked: Checked) -> Iterator[Finding]:
    """Checks that each stage of each pipeline's view is a finished artifact of the store with the same files."""
    for view in sorted((store / "pipelines").glob(f"*/*/{MANIFEST}")):
        what = f"{view.parents[1].name}/{view.parent.name}"
        try:
            manifest = Entry(view.parent).manifest()
        except ArtifactError as error:
            yield _finding(Fault.CHANGED, what, str(error))
            continue
        if manifest is None:  # replaced since the glob
            continue
        node = node_key(manifest.stage, manifest.fingerprint)
        if node not in checked.all:
            yield _finding(Fault.ORPHANED, what, f"{view.parent} shows {node}, which is not in the store")
        elif node in checked.chosen:
            for phrase in manifest.damage(view.parent / "output"):
                yield _finding(Fault.CHANGED, what, f"{view.parent / 'output'}: {phrase}")


def check_lock(repository: Path, store: Path, cache: DigestCache) -> Iterator[Finding]:
    """Checks that every output of ``dvc.lock`` below the store has the recorded hash."""
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
    remedy = "posttrain run, with no overrides, moves the view and commits it"
    return Finding(fault, what, why, remedy)

"""Checks the store against its own manifests: every byte, every link, every promotion."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lineage.digest import DigestCache
from lineage.errors import ArtifactError, PipelineError
from lineage.fingerprint import short
from lineage.graph.places import node_key
from lineage.lease import living_holder
from lineage.manifest import InputRecord, Manifest
from lineage.promotions import PROMOTIONS, read_events
from lineage.store import Entry, Store
from lineage.verify.finding import Fault, Finding


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
        """Whether nothing of the store is left out, so that what is only elsewhere is an orphan."""
        return self.all.keys() <= set(self.chosen)


def read_store(root: Path) -> tuple[dict[str, tuple[Entry, Manifest]], list[Finding]]:
    """Every finished artifact by node id, and what is wrong with the directories of the others."""
    found: dict[str, tuple[Entry, Manifest]] = {}
    findings = []
    for stage, entry in Store(root).entries():
        try:
            manifest = entry.manifest()
        except ArtifactError as error:
            findings.append(_changed(f"{stage}@{entry.path.name}", str(error), f"delete {entry.path}, and run again"))
            continue
        if manifest:
            found[node_key(stage, manifest.fingerprint)] = (entry, manifest)
        elif not living_holder(entry.path):
            why = f"{entry.path} was begun and never finished"
            mend = "run its pipeline again, or delete the directory"
            findings.append(Finding(fault=Fault.NOTE, what=f"{stage}@{entry.path.name}", why=why, mend=mend))
    return found, findings


def check_outputs(checked: Checked) -> Iterator[Finding]:
    """Reads every byte of every output again."""
    for node, entry, manifest in checked.items():
        for phrase in manifest.damage(entry.output):
            fault = Fault.MISSING if phrase.endswith("is missing") else Fault.CHANGED
            mend = f"restore it, or delete {entry.path} and run its pipeline again"
            yield Finding(fault=fault, what=node, why=f"{entry.output}: {phrase}", mend=mend)
        if short(manifest.fingerprint) != entry.path.name:
            why = f"{entry.path} holds the manifest of {short(manifest.fingerprint)}"
            yield _changed(node, why, f"delete {entry.path}, and run its pipeline again")


def check_links(checked: Checked) -> Iterator[Finding]:
    """Follows every input to the artifact that it names."""
    for node, _, manifest in checked.items():
        for slot, record in manifest.inputs.items():
            if record.source is None and not record.artifact.startswith("source:"):
                yield from _check_parent(f"{node} input {slot}", record, checked)


def _check_parent(what: str, record: InputRecord, checked: Checked) -> Iterator[Finding]:
    parent = node_key(record.artifact, record.fingerprint)
    mend = "run its pipeline again: what is there still is reused"
    if parent not in checked.all:
        yield Finding(fault=Fault.MISSING, what=what, why=f"{parent} is not in the store", mend=mend)
        return
    digest = checked.all[parent][1].output_digest
    if record.digest != digest:
        why = f"it was made from {parent} with digest {str(record.digest)[:16]}, which now has {digest[:16]}"
        yield _changed(what, why, "the parent was made again with other bytes: delete the child and run it again")


def check_sources(checked: Checked, cache: DigestCache) -> Iterator[Finding]:
    """Notes the data files that are no longer what a stage read: the usual fate of data, but worth knowing."""
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
        mend = "nothing, if it was meant; the manifest keeps its digest"
        yield Finding(fault=Fault.NOTE, what=what, why=why, mend=mend)


def check_promotions(root: Path, checked: Checked) -> Iterator[Finding]:
    """That what each promotion named, and the verdict behind it, is in the store."""
    try:
        events = read_events(root)
    except PipelineError as error:
        yield _changed(PROMOTIONS, str(error), "mend the line")
        return
    held = {manifest.fingerprint for _, manifest in checked.all.values()}
    for event in events:
        for role, fingerprint in (("model", event.fingerprint), ("verdict", event.verdict)):
            if fingerprint and fingerprint not in held:
                what = f"{event.action} of {event.alias or short(fingerprint)}"
                why = f"its {role} {short(fingerprint)} is not in the store"
                yield Finding(fault=Fault.MISSING, what=what, why=why, mend="restore it, or roll the alias back")


def _changed(what: str, why: str, mend: str) -> Finding:
    return Finding(fault=Fault.CHANGED, what=what, why=why, mend=mend)

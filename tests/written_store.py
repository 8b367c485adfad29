"""A store whose manifests are written by hand: any graph, in no time."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from lineage.filesystem.digest import digest_files, digest_of
from lineage.fingerprint import fingerprint, short
from lineage.promotions import Event, append
from lineage.store import InputRecord, Manifest, Provenance, SourceRecord, Store

KINDS = {"corpus": "text", "pairs": "preferences", "evaluate": "report", "reward": "reward_model"}


class WrittenStore:
    """Finished artifacts, one after the other; each ends a minute after the one before."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._clock = 1_700_000_000.0

    def source(self, name: str, content: str = "a", path: str = "", **fields) -> InputRecord:
        """What a manifest says of a source of that content."""
        identity = hashlib.sha256(f"{name}{content}".encode()).hexdigest()
        path = path or f"/data/{name}.jsonl"
        record = {
            "kind": "rows",
            "revision": None,
            "split": "train",
            "labels": [],
            "files": {path: identity},
            "dvc": None,
        }
        source = SourceRecord(path=path, **{**record, **fields})
        return InputRecord(artifact=f"source:{name}", fingerprint=identity, digest=identity, source=source)

    def stage(self, name: str, inputs: dict[str, Manifest | InputRecord], *, output: str = "", **fields) -> Manifest:
        """Commits an artifact: of a recipe, made from manifests and sources. ``output`` is what it holds."""
        recipe = {"method": name.capitalize(), **fields.pop("recipe", {})}
        given = {slot: each if isinstance(each, InputRecord) else read(each) for slot, each in inputs.items()}
        identity = fingerprint(recipe, {slot: each.fingerprint for slot, each in given.items()})
        self._clock += 60
        ran = ran_at(
            self._clock - 10, self._clock, libraries={"torch": "2.13.0"}, git_commit="c" * 40, git_dirty=False,
            code_digest="d" * 64, resources={"num_workers": 1},
        )  # fmt: skip
        ran = replace(ran, **fields.pop("provenance", {}))
        entry = Store(self.root).entry(name, identity)
        entry.output.mkdir(parents=True, exist_ok=True)
        (entry.output / "content.txt").write_text(output or identity)
        files = digest_files(entry.output)
        known = {
            "pipeline": "p", "stage": name, "method": f"tasks.{name}", "recipe": recipe, "fingerprint": identity,
            "inputs": given, "files": files, "output_digest": digest_of(files), "metrics": {},
            "provenance": ran, "produces": KINDS.get(name, "checkpoint"),
        }  # fmt: skip
        manifest = Manifest(**{**known, **fields})
        (entry.path / "manifest.json").write_text(manifest.to_json())
        return manifest

    def chain(self, content: str = "a", beta: float = 0.1, **fields) -> dict[str, Manifest]:
        """corpus -> base, corpus -> cpt(base) -> dpo, evaluate(cpt, dpo): the shapes of a real pipeline."""
        made = {}
        made["corpus"] = self.stage("corpus", {"rows": self.source("corpus", content)}, metrics={"rows": 7.0})
        made["base"] = self.stage("base", {"rows": made["corpus"]})
        made["cpt"] = self.stage("cpt", {"policy": made["base"], "rows": made["corpus"]})
        made["pairs"] = self.stage("pairs", {"rows": self.source("pairs", labels=["cc-by-nc-4.0"])})
        policy, pairs = made["cpt"], made["pairs"]
        made["dpo"] = self.stage("dpo", {"policy": policy, "pairs": pairs}, recipe={"beta": beta}, **fields)
        made["evaluate"] = self.stage("evaluate", {"cpt": policy, "dpo": made["dpo"], "text": made["corpus"]})
        return made

    def event(self, manifest: Manifest, alias: str = "champion", **fields) -> None:
        """Appends a promotion, or another event, on an artifact."""
        known = {"action": "promote", "stage": manifest.stage, "digest": manifest.output_digest, "who": "me", "why": ""}
        append(self.root, Event(alias=alias, fingerprint=manifest.fingerprint, **{**known, **fields}))

    def delete(self, manifest: Manifest) -> None:
        shutil.rmtree(self.root / manifest.stage / short(manifest.fingerprint))


def ran_at(start: float = 0.0, end: float = 1.0, **fields) -> Provenance:
    """What a manifest says of a run of those seconds."""
    known = {
        "hosts": ["here"], "python": "3.11", "libraries": {}, "git_commit": None, "git_dirty": None, "code_digest": "c",
        "seed": 0, "resources": {},
    }  # fmt: skip
    return Provenance(start=start, end=end, **{**known, **fields})


def read(manifest: Manifest) -> InputRecord:
    """An artifact as what is made from it records it."""
    return InputRecord(artifact=manifest.stage, fingerprint=manifest.fingerprint, digest=manifest.output_digest)


def node(manifest: Manifest) -> str:
    return f"{manifest.stage}@{short(manifest.fingerprint)}"

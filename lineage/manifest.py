"""The record of a finished artifact, ``manifest.json``: recipe, inputs, output digests, metrics and provenance."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lineage.artifact import SOURCE
from lineage.digest import DigestCache, damage_of, digest_files
from lineage.secrets import redacted

SCHEMA_VERSION = 2  # 1: no `produces`, `source` and `execution_run_id`


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """A source as it was when a stage read it.

    Args:
        files: absolute path -> SHA-256 of every file that was read; empty if the revision is the identity.
        dvc: the hash in its ``.dvc`` file, if DVC tracks it.
        reading: the reading options that were set: format, columns, sample_count ...
    """

    path: str
    kind: str
    revision: str | None
    split: str
    labels: list[str]
    files: dict[str, str]
    dvc: str | None
    reading: dict[str, object] = field(default_factory=dict)

    def stated(self) -> dict[str, object]:
        """The declared fields besides the path, all of which are identity."""
        return {"kind": self.kind, "revision": self.revision, "split": self.split, **self.reading}


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """One slot of a finished stage: the artifact that filled it, by identity and by content."""

    artifact: str  # pipeline name of the stage, or source:NAME
    fingerprint: str
    digest: str | None  # of the bytes; None if the revision is the identity (hub ids, quickstart)
    source: SourceRecord | None = None  # None if a stage produced it


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """When, where and with what a stage ran. Not identity."""

    start: float  # seconds since the epoch
    end: float = 0.0
    hosts: list[str] = field(default_factory=list)
    python: str = ""
    libraries: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    git_dirty: bool | None = None
    code_digest: str = ""  # of the method's source files
    seed: int | None = None
    resources: dict[str, object] = field(default_factory=dict)
    resumed_at: list[int] = field(default_factory=list)  # steps of the checkpoints that it was resumed from
    earlier_code_digests: list[str] = field(default_factory=list)  # other code that some steps were trained by
    changed_at: list[int] = field(default_factory=list)  # those of resumed_at where the environment signature changed
    hardware: dict[str, str] = field(default_factory=dict)  # of its workers: names of cpu and gpu; empty: unknown
    because: str = ""  # why its settings were changed: RULE:STAGE@FINGERPRINT of `posttrain diagnose`

    @property
    def code_digests(self) -> list[str]:
        """Digests of all code that trained it, oldest first."""
        return [*self.earlier_code_digests, self.code_digest]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record of a finished artifact, written last and atomically; a directory without one is unfinished."""

    pipeline: str
    stage: str
    method: str
    recipe: dict[str, object]
    fingerprint: str
    inputs: dict[str, InputRecord]
    files: dict[str, str]  # below output/: path -> SHA-256
    output_digest: str
    metrics: dict[str, float]
    provenance: Provenance
    produces: str | None = None  # kind of the output
    schema_version: int = SCHEMA_VERSION
    mlflow_run_id: str | None = None  # of this stage
    execution_run_id: str | None = None  # of the pipeline execution that produced it
    parent_run_ids: list[str] = field(default_factory=list)  # of the stages that it reads
    certificate: str | None = None  # SHA-256 of the certificate of its recipe, by `posttrain certify`

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "Manifest":
        fields = json.loads(redacted(text))  # older versions may have recorded an address with a secret
        for slot, record in fields["inputs"].items():
            source = record.pop("source", None)
            fields["inputs"][slot] = InputRecord(**record, source=SourceRecord(**source) if source else None)
        fields["provenance"] = Provenance(**fields["provenance"])
        return Manifest(**fields)

    def missing(self, output: Path) -> list[str]:
        """Recorded files that are not below ``output``; contents are not read."""
        return [name for name in self.files if not (output / name).is_file()]

    def damage(self, output: Path, cache: DigestCache | None = None) -> list[str]:
        """How the files below ``output`` differ from the recorded ones, one phrase per file.

        Args:
            cache: as in ``digest_files``.
        """
        return damage_of(self.files, digest_files(output, cache))


DATA_REPORT = "report.json"  # of a data stage, in its output
OUTSIDE = "outside the slice"  # the report's reason for rows that the source's ``split`` excludes


def rows_read(manifest: Manifest, output: Path) -> dict[str, int]:
    """Slot -> rows that its source has: bad, held-out and excluded ones count, those outside its slice do not.

    Args:
        output: of the stage. Without its report, as after gc, a stage that reads one source has the sum in its metrics.
    """
    try:
        sources = json.loads((output / DATA_REPORT).read_text(encoding="utf-8"))["sources"]
        return {slot: each["rows_read"] - each["dropped"].get(OUTSIDE, 0) for slot, each in sources.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        slots = [slot for slot, each in manifest.inputs.items() if each.artifact.startswith(SOURCE)]
        if len(slots) != 1 or "rows" not in manifest.metrics:
            return {}
        return {slots[0]: int(manifest.metrics["rows"] + manifest.metrics.get("dropped", 0))}

"""The record of a finished artifact, ``manifest.json``: recipe, inputs, output digests, metrics and provenance."""

import contextlib
import importlib.metadata
import json
import platform
import socket
import subprocess
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from lineage.digest import DigestCache, damage_of, digest_files
from lineage.secrets import redacted

_CPUS = Path("/proc/cpuinfo")
_SECONDS = 20


@cache
def hardware() -> dict[str, str]:
    """Names of ``cpu`` and, if any, ``gpu``; each model once."""
    gpus = ", ".join(sorted(set(list_gpus("name"))))
    return {"cpu": _cpu(), **({"gpu": gpus} if gpus else {})}


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in _CPUS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@cache
def list_gpus(*properties: str) -> list[str]:
    """A line per NVIDIA GPU with these properties, by the driver: importing torch takes seconds. Empty: no driver."""
    query = ("nvidia-smi", f"--query-gpu={','.join(properties)}", "--format=csv,noheader,nounits")
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listing.splitlines() if line.strip()]


SCHEMA_VERSION = 2  # 1: no `produces`, `source` and `execution_run_id`

# Libraries whose version can change the result of a stage.
_LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "tokenizers",
    "safetensors",
    "bitsandbytes",
    "deepspeed",
    "numpy",
    "ray",
    "prefect",
)


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


def provenance_here(start: float) -> Provenance:
    """Provenance of work that this host has started, with its environment."""
    commit, dirty = _git()
    return Provenance(
        start=start, hosts=[socket.gethostname()], python=platform.python_version(),
        libraries=dict(library_versions()), git_commit=commit, git_dirty=dirty,
    )  # fmt: skip


@cache
def library_versions() -> dict[str, str]:
    """Installed versions, read from package metadata: nothing is imported."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git() -> tuple[str | None, bool | None]:
    """Commit of the repository that holds this code, and whether its files differ from it."""
    here = Path(__file__).parent
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
    try:
        commit, status = (
            subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(status)

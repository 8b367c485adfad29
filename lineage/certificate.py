"""How a training survives interruptions: measured in short, written once, named by the manifests of its recipe."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from lineage.artifact import MODELS
from lineage.errors import ArtifactError
from lineage.fingerprint import canonical_json, short
from lineage.manifest import InputRecord, Manifest, Provenance
from lineage.store import Store

CERTIFICATES = "certificates"  # the directory of the store

_STEPS = ("num_steps", "best")  # of a recipe what counts steps: in short there are few
# Of a stage's resources what may change the order of a sum, and so its last bits.
_KIND = ("num_nodes", "num_workers", "cpus_per_worker", "gpus_per_worker", "micro_batch_size", "zero_stage")
_ADAPTER = "adapter_config.json"  # an output that is one has it, in which its base is named with its weights

Verdict = Literal["bit-identical", "within tolerance", "differs", "not compared"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An interrupted training beside the unbroken one.

    Args:
        detail: what differs first; why it was not compared.
        num_workers: before and after the interruption.
        resumed_at: steps of the checkpoints that it went on from.
        loss_difference: the largest of a step's loss or count of tokens, relative; None: no number says.
        weight_difference: the largest of a tensor, norm of the difference by the norm; None: as before.
    """

    verdict: Verdict
    detail: str = ""
    num_workers: tuple[int, int]
    resumed_at: tuple[int, ...] = ()
    loss_difference: float | None = None
    weight_difference: float | None = None


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was found of one training stage.

    Args:
        key: of all that the verdicts depend on, as ``basis`` states it.
        comparisons: how it was interrupted -> what came of it.
        tolerance: relative, of losses and weights.
        provenance: of the unbroken training.
    """

    key: str
    basis: Mapping[str, object]
    pipeline: str
    stage: str
    num_steps: int
    save_steps: int
    tolerance: float
    comparisons: Mapping[str, Comparison]
    provenance: Provenance

    def words(self) -> str:
        """The verdicts: ``killed bit-identical, resharded within tolerance``."""
        return ", ".join(f"{how} {comparison.verdict}" for how, comparison in self.comparisons.items())

    @staticmethod
    def from_json(text: str) -> "Certificate":
        fields = json.loads(text)
        comparisons = {
            how: Comparison(
                **{**each, "num_workers": tuple(each["num_workers"]), "resumed_at": tuple(each["resumed_at"])}
            )
            for how, each in fields["comparisons"].items()
        }
        return Certificate(**{**fields, "comparisons": comparisons, "provenance": Provenance(**fields["provenance"])})


def basis(manifest: Manifest, parents: Mapping[str, Manifest], store: Path) -> dict[str, object]:
    """What the verdicts depend on: recipe, kind of models, workers, code, libraries and hardware; no data, no steps.

    Args:
        parents: name -> record of what it was made from; of models their architecture counts, not their weights.
        store: of what those were made from.
    """
    models = {slot: _architecture(given, parents.get(given.artifact), store) for slot, given in manifest.inputs.items()}
    ran = manifest.provenance
    return {
        "recipe": {name: value for name, value in manifest.recipe.items() if name not in _STEPS},
        "models": {slot: found for slot, found in models.items() if found is not None},
        "resources": {name: ran.resources[name] for name in _KIND if name in ran.resources},
        "code_digest": ran.code_digest,
        "python": ran.python,
        "libraries": ran.libraries,
        "hardware": ran.hardware,
    }


def key_of(basis: Mapping[str, object]) -> str:
    """SHA-256 of what the verdicts depend on."""
    return hashlib.sha256(canonical_json(basis).encode()).hexdigest()


def certified(manifest: Manifest, parents: Mapping[str, Manifest], store: Path) -> Manifest:
    """The manifest with the newest certificate of its recipe in it, where the store has one."""
    if manifest.provenance.earlier_code_digests or not (store / CERTIFICATES).is_dir():
        return manifest
    key = key_of(basis(manifest, parents, store))
    found = [(each.provenance.end, digest) for digest, each in _certificates(store) if each.key == key]
    return replace(manifest, certificate=max(found)[1]) if found else manifest


def write_certificate(store: Path, certificate: Certificate) -> Path:
    """Writes it under its own digest: one that a manifest names is never replaced."""
    text = json.dumps(asdict(certificate), indent=2, ensure_ascii=False) + "\n"
    path = certificate_path(store, hashlib.sha256(text.encode()).hexdigest())
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return path


def read_certificate(store: Path, digest: str) -> Certificate:
    """The certificate that a manifest names.

    Raises:
        ArtifactError: it is gone, or no longer what was written.
    """
    path = certificate_path(store, digest)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} is missing ({error.strerror})") from error
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise ArtifactError(f"{path} has SHA-256 {short(found)}, recorded is {short(digest)}")
    try:
        return Certificate.from_json(content.decode())
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{path} is not a certificate of this version ({error})") from error


def certificate_path(store: Path, digest: str) -> Path:
    """Where the certificate of a digest lies."""
    return store / CERTIFICATES / f"{short(digest)}.json"


def _certificates(store: Path) -> Iterator[tuple[str, Certificate]]:
    """Those that are whole, by digest; of a damaged one ``posttrain verify`` tells, where a manifest names it."""
    for path in sorted((store / CERTIFICATES).glob("*.json")):
        with contextlib.suppress(OSError, ArtifactError):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            yield digest, read_certificate(store, digest)


def _architecture(given: InputRecord, parent: Manifest | None, store: Path) -> object:
    """Of a stage's model what configures it, of any other model its fingerprint; None: it is data."""
    if parent is None:
        return given.fingerprint if given.source is None or given.source.kind in MODELS else None
    if parent.produces not in MODELS:
        return None
    if _ADAPTER not in parent.files:
        return parent.files.get("config.json", "")
    made = {
        name: Store(store).entry(each.artifact, each.fingerprint).manifest() for name, each in parent.inputs.items()
    }
    bases = {name: _architecture(each, made[name], store) for name, each in parent.inputs.items()}
    return {"adapter": parent.recipe.get("adapter"), **{name: base for name, base in bases.items() if base is not None}}

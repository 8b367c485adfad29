"""Certificates: what a short training loses by interruptions; manifests of the same recipe name them."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lineage.artifact import MODELS
from lineage.errors import ArtifactError
from lineage.filesystem.files import atomic_write
from lineage.fingerprint import digest_json, short
from lineage.record.environment import environment_signature
from lineage.store import InputRecord, Manifest, Provenance, Store

CERTIFICATES = "certificates"  # the directory of the store
Verdict = Literal["bit-identical", "within tolerance", "differs", "not compared"]

_STEPS = ("num_steps", "num_epochs", "validation", "best")  # fields of a recipe that the short training shortens
_ADAPTER = "adapter_config.json"  # marks an output that is an adapter


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An interrupted training compared with the uninterrupted one.

    Args:
        detail: what differs first; why it was not compared.
        num_workers: before and after the interruption.
        resumed_at: steps of the checkpoints from which it resumed.
        loss_difference: largest relative difference of a step's loss or token count; None: unknown.
        weight_difference: norm of the difference of all weights, relative to the update of the uninterrupted training;
            None: unknown.
    """

    verdict: Verdict
    detail: str = ""
    num_workers: tuple[int, int]
    resumed_at: tuple[int, ...] = ()
    loss_difference: float | None = None
    weight_difference: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The relative differences that another number of workers may cause, as in ``Comparison``."""

    losses: float
    weights: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The results for one training stage.

    Args:
        key: digest of ``basis``: everything that the verdicts depend on.
        comparisons: kind of interruption -> result.
        tolerance: with another number of workers; with the same number the result must be bit-identical.
        provenance: of the uninterrupted training.
    """

    key: str
    basis: Mapping[str, object]
    pipeline: str
    stage: str
    num_steps: int
    save_steps: int
    tolerance: Tolerance
    comparisons: Mapping[str, Comparison]
    provenance: Provenance

    def summary(self) -> str:
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
        tolerance, ran = Tolerance(**fields["tolerance"]), Provenance(**fields["provenance"])
        return Certificate(**{**fields, "comparisons": comparisons, "tolerance": tolerance, "provenance": ran})


def basis(manifest: Manifest, parents: Mapping[str, Manifest], *stores: Path) -> dict[str, object]:
    """What the verdicts depend on: recipe, models, workers, code, libraries and hardware; not on data or steps.

    Args:
        parents: name -> manifest of an input; only the architecture of a model counts, not its weights.
        stores: where to find the parents of the inputs.
    """
    models = {slot: _architecture(each, parents.get(each.artifact), stores) for slot, each in manifest.inputs.items()}
    ran = manifest.provenance
    return {
        "recipe": {name: value for name, value in manifest.recipe.items() if name not in _STEPS},
        "models": {slot: found for slot, found in models.items() if found is not None},
        "code_digest": ran.code_digest,
        **environment_signature(ran),
    }


def key_of(basis: Mapping[str, object]) -> str:
    """SHA-256 of what the verdicts depend on."""
    return digest_json(basis)


def _architecture(record: InputRecord, parent: Manifest | None, stores: Sequence[Path]) -> object:
    """The configuration of a model that a stage produced, the fingerprint of a source model; None: it is data."""
    if parent is None:
        return record.fingerprint if record.source is None or record.source.kind in MODELS else None
    if parent.produces not in MODELS:
        return None
    if _ADAPTER not in parent.files:
        return parent.files.get("config.json", "")
    bases = {}
    for name, each in parent.inputs.items():
        made = (Store(store).entry(each.artifact, each.fingerprint).manifest() for store in stores)
        bases[name] = _architecture(each, next(filter(None, made), None), stores)
    return {"adapter": parent.recipe.get("adapter"), **{name: base for name, base in bases.items() if base is not None}}


def certificate_of(manifest: Manifest, parents: Mapping[str, Manifest], store: Path) -> str | None:
    """The digest of the newest certificate of a manifest's recipe; None: the store has none.

    A training that was resumed by other code or on another machine, or ran on unknown hardware, gets none.
    """
    ran = manifest.provenance
    if ran.earlier_code_digests or ran.changed_at or not ran.hardware or not (store / CERTIFICATES).is_dir():
        return None
    key = key_of(basis(manifest, parents, store))
    found = []
    for path in (store / CERTIFICATES).glob("*.json"):
        with contextlib.suppress(OSError, ArtifactError):  # `posttrain verify` reports a damaged one
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            each = read_certificate(store, digest)
            if each.key == key:
                found.append((each.provenance.end, digest))
    return max(found)[1] if found else None


def write_certificate(store: Path, certificate: Certificate) -> Path:
    """Writes a certificate under its own digest, so that a certificate named by a manifest is never overwritten."""
    text = json.dumps(asdict(certificate), indent=2, ensure_ascii=False) + "\n"
    path = certificate_path(store, hashlib.sha256(text.encode()).hexdigest())
    atomic_write(path, text)
    return path


def read_certificate(store: Path, digest: str) -> Certificate:
    """The certificate that a manifest names (ArtifactError: it is missing or was changed)."""
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
    """The file of a certificate."""
    return store / CERTIFICATES / f"{short(digest)}.json"

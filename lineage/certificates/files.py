"""Certificates in a store: each under its own digest, by which manifests name it."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from lineage.certificates.basis import basis, key_of
from lineage.certificates.certificate import Certificate
from lineage.errors import ArtifactError
from lineage.fingerprint import short
from lineage.manifest import Manifest

CERTIFICATES = "certificates"  # the directory of the store


def certified(manifest: Manifest, parents: Mapping[str, Manifest], store: Path) -> Manifest:
    """The manifest with the newest certificate of its recipe in it, where the store has one.

    Where it was gone on with by other code or on another kind of machine, nobody has tried that; nor is anything known
    of machines that are not.
    """
    ran = manifest.provenance
    if ran.earlier_code_digests or ran.changed_at or not ran.hardware or not (store / CERTIFICATES).is_dir():
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

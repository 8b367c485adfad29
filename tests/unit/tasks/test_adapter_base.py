"""Where the base of an adapter is looked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from lineage.errors import ArtifactError
from lineage.manifest import InputRecord, Manifest, SourceRecord
from lineage.store import Entry, Store
from tasks.train.adapter_files import Base, base_and_adapters
from tests.written_store import WrittenStore

CHAMPION = "source:champion"


@pytest.fixture
def champion(tmp_path: Path) -> tuple[Entry, Manifest]:
    """A model of the real store, which an alias names there."""
    written = WrittenStore(tmp_path / "store")
    manifest = written.stage("sft", {"rows": written.source("rows")})
    return Store(written.root).entry("sft", manifest.fingerprint), manifest


@pytest.fixture
def adapter(tmp_path: Path, champion: tuple[Entry, Manifest]) -> Path:
    """An adapter on it, in the store of a rehearsal."""
    entry, manifest = champion
    place = tmp_path / "store" / "rehearsals" / "1" / "dpo" / ("a" * 16)
    output = place / "output"
    output.mkdir(parents=True)
    Base(name=CHAMPION, fingerprint=manifest.fingerprint, digest=manifest.output_digest).write(output)
    named = SourceRecord(
        path=str(entry.output), kind="checkpoint", revision="alias:champion", split="train", labels=[], files={},
        dvc=None,
    )  # fmt: skip
    given = InputRecord(
        artifact=CHAMPION, fingerprint=manifest.fingerprint, digest=manifest.output_digest, source=named
    )
    (place / "manifest.json").write_text(replace(manifest, inputs={"policy": given}).to_json())
    return output


def test_what_an_alias_named_is_found_in_its_store(adapter: Path, champion: tuple[Entry, Manifest]) -> None:
    assert base_and_adapters(adapter) == (champion[0].output, [adapter])


def test_and_is_refused_where_it_is_gone_or_another(adapter: Path, champion: tuple[Entry, Manifest]) -> None:
    entry, manifest = champion
    (entry.path / "manifest.json").write_text(replace(manifest, fingerprint="f" * 64).to_json())
    with pytest.raises(ArtifactError, match=r"is an adapter on source:champion .* has no such artifact"):
        base_and_adapters(adapter)
    (entry.path / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="has no such artifact"):
        base_and_adapters(adapter)

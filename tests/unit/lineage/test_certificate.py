"""What a certificate holds for, and that nobody changes it afterwards."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lineage.errors import ArtifactError
from lineage.record.certificate import (
    Certificate,
    Comparison,
    Tolerance,
    basis,
    certificate_of,
    key_of,
    read_certificate,
    write_certificate,
)
from lineage.store import InputRecord, Manifest, Provenance, SourceRecord, Store
from tests.written_store import ran_at

RESOURCES = {"num_workers": 1, "micro_batch_size": 8, "save_steps": 2, "launcher": "auto"}
RECIPE = {"method": "SFT", "version": 1, "learning_rate": 0.1, "num_steps": 6}


def ran(**fields: object) -> Provenance:
    known = {"end": 2.0, "libraries": {"torch": "2"}, "resources": RESOURCES, "hardware": {"cpu": "one"}}
    return ran_at(**{**known, **fields})


def given(name: str, fingerprint: str) -> InputRecord:
    return InputRecord(artifact=name, fingerprint=fingerprint, digest="d")


def manifest(produces: str = "checkpoint", files: dict[str, str] | None = None, **fields: object) -> Manifest:
    known: dict[str, object] = {
        "pipeline": "p", "stage": "sft", "method": "m", "recipe": RECIPE, "fingerprint": "f", "output_digest": "o",
        "inputs": {"policy": given("base", "1"), "rows": given("data", "2")}, "metrics": {}, "provenance": ran(),
    }  # fmt: skip
    return Manifest(**{**known, "files": files or {}, "produces": produces, **fields})


PARENTS = {"base": manifest(files={"config.json": "small"}), "data": manifest("conversations", {"rows.parquet": "a"})}
TRAINED = manifest()


NOWHERE = Path("no store")


def key(made: Manifest, **parents: Manifest) -> str:
    return key_of(basis(made, {**PARENTS, **parents}, NOWHERE))


@pytest.mark.parametrize(
    "made",
    [
        replace(TRAINED, recipe={**RECIPE, "num_steps": 1000, "best": {"every_steps": 7}}),
        replace(TRAINED, provenance=ran(end=9.0, hosts=["there"], resources={**RESOURCES, "save_steps": 99})),
        replace(TRAINED, inputs={"policy": given("base", "9"), "rows": given("data", "8")}, stage="other"),
    ],
    ids=["steps", "when and where", "data and weights"],
)
def test_it_holds_for_more_steps_on_other_data(made: Manifest) -> None:
    assert key(made) == key(TRAINED)
    assert key(made, data=manifest("conversations", {"rows.parquet": "b"})) == key(TRAINED)


def test_it_holds_for_nothing_else() -> None:
    others = [
        key(replace(TRAINED, recipe={**RECIPE, "learning_rate": 0.2})),
        key(replace(TRAINED, provenance=ran(resources={**RESOURCES, "num_workers": 2}))),
        key(replace(TRAINED, provenance=ran(code_digest="other"))),
        key(replace(TRAINED, provenance=ran(libraries={"torch": "3"}))),
        key(replace(TRAINED, provenance=ran(hardware={"cpu": "one", "gpu": "another"}))),
        key(TRAINED, base=manifest(files={"config.json": "large"})),
    ]
    assert len({key(TRAINED), *others}) == 7


def certificate(end: float = 2.0, verdict: str = "bit-identical") -> Certificate:
    comparison = Comparison(verdict=verdict, num_workers=(1, 1), resumed_at=(2,))  # type: ignore[arg-type]
    kind = basis(TRAINED, PARENTS, NOWHERE)
    return Certificate(
        key=key_of(kind), basis=kind, pipeline="p", stage="sft", num_steps=6, save_steps=2,
        tolerance=Tolerance(losses=1e-4, weights=0.1), comparisons={"killed": comparison}, provenance=ran(end=end),
    )  # fmt: skip


def test_a_manifest_gets_the_newest_of_its_recipe(tmp_path: Path) -> None:
    assert certificate_of(TRAINED, PARENTS, tmp_path) is None
    write_certificate(tmp_path, certificate(end=5.0, verdict="differs"))
    write_certificate(tmp_path, certificate(end=3.0))
    found = certificate_of(TRAINED, PARENTS, tmp_path)
    assert found
    assert read_certificate(tmp_path, found) == certificate(end=5.0, verdict="differs")
    assert certificate().summary() == "killed bit-identical"
    other = replace(TRAINED, recipe={**RECIPE, "learning_rate": 0.2})
    assert certificate_of(other, PARENTS, tmp_path) is None


def test_one_that_was_altered_or_lost_is_named(tmp_path: Path) -> None:
    path = write_certificate(tmp_path, certificate(verdict="differs"))
    digest = certificate_of(TRAINED, PARENTS, tmp_path)
    assert digest
    path.write_text(path.read_text().replace("differs", "bit-identical"))
    with pytest.raises(ArtifactError, match="has SHA-256"):
        read_certificate(tmp_path, digest)
    path.unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        read_certificate(tmp_path, digest)


@pytest.mark.parametrize(
    "ran_as", [{"earlier_code_digests": ["d"]}, {"changed_at": [4]}], ids=["other code", "another machine"]
)
def test_what_was_gone_on_with_otherwise_nobody_has_tried(tmp_path: Path, ran_as: dict[str, object]) -> None:
    write_certificate(tmp_path, certificate())
    assert certificate_of(TRAINED, PARENTS, tmp_path)
    assert certificate_of(replace(TRAINED, provenance=ran(**ran_as)), PARENTS, tmp_path) is None


def test_of_machines_that_nobody_knows_nothing_is_certified(tmp_path: Path) -> None:
    unknown = replace(TRAINED, provenance=ran(hardware={}))
    kind = basis(unknown, PARENTS, NOWHERE)
    write_certificate(tmp_path, replace(certificate(), key=key_of(kind), basis=kind))
    assert certificate_of(unknown, PARENTS, tmp_path) is None


def test_a_manifest_from_before_certificates_is_read() -> None:
    fields = json.loads(TRAINED.to_json())
    del fields["certificate"]
    assert Manifest.from_json(json.dumps(fields)) == TRAINED


@pytest.mark.parametrize("source", [True, False], ids=["source", "stage"])
def test_of_an_adapter_its_own_shape_and_that_of_its_base_count(tmp_path: Path, source: bool) -> None:
    def trained_on(base: str, rank: str, weights: str, beside: str = "") -> str:
        """The key of a training whose policy is an adapter on a base of some architecture, looked for beside too."""
        record = given("base", (base if source else weights) * 64)
        full = manifest(files={"config.json": base, "model.safetensors": weights}, fingerprint=record.fingerprint)
        if source:
            record = replace(record, source=SourceRecord(
                path="base", kind="checkpoint", revision=None, split="train", labels=[], files={}, dvc=None
            ))  # fmt: skip
        else:
            entry = Store(tmp_path / base / rank / weights).entry("base", record.fingerprint)
            entry.path.mkdir(parents=True)
            (entry.path / "manifest.json").write_text(full.to_json())
        adapter = manifest(
            files={"adapter_config.json": base + weights}, recipe={**RECIPE, "adapter": {"rank": rank}},
            inputs={"policy": record, "rows": given("data", "2")},
        )  # fmt: skip
        stores = tmp_path / beside, tmp_path / base / rank / weights
        return key_of(basis(TRAINED, {**PARENTS, "base": adapter}, *stores))

    assert trained_on("a", "4", "1") == trained_on("a", "4", "2") == trained_on("a", "4", "5", beside="other")
    assert len({trained_on("b", "4", "3"), trained_on("a", "4", "3"), trained_on("a", "8", "3")}) == 3

from dataclasses import replace

import pytest

from flows.promotion.promote import all_labels, require_commercial
from lineage.errors import ArtifactError, GateError
from lineage.fingerprint import short
from lineage.graph.ancestry import ancestry
from lineage.graph.impact import impact
from lineage.graph.index import Index
from lineage.stated_labels import LABELS, Statement, record_labels, stated_labels
from tests.written_store import WrittenStore, node


@pytest.fixture
def store(tmp_path):
    return WrittenStore(tmp_path / "store")


def graph(store, manifest):
    with Index(store.root) as index:
        return ancestry(index, node(manifest))


def found(store, ref: str) -> set[str]:
    with Index(store.root) as index:
        return {each.id for each in impact(ref, index).below.newest()}


def test_a_label_is_of_the_bytes_under_whatever_name_they_are_read(store):
    first = store.source("corpus", labels=["NC"])
    model = store.stage("dpo", {"rows": replace(store.source("other"), fingerprint=first.fingerprint)})
    assert graph(store, model).labels == set()
    store.stage("sft", {"rows": first})
    assert graph(store, model).labels == {"NC"}
    assert node(model) in found(store, "label:nc")
    (labels,) = all_labels(graph(store, model), {"corpus": ["unread"]}).values()
    assert labels == {"NC"}


def test_what_is_stated_now_is_of_all_sources_with_those_bytes(store):
    first = store.source("corpus")
    same = replace(first, artifact="source:other")
    model = store.stage("dpo", {"rows": first, "more": same, "else": store.source("else")})
    labels = all_labels(graph(store, model), {"other": ["nc"]})
    assert sorted(map(sorted, labels.values())) == [[], ["nc"], ["nc"]]


def test_a_refusal_names_the_way_from_the_first_source(store):
    made = store.stage("left", {"rows": store.source("rows", labels=["nc"])})
    output = str(store.root / "left" / short(made.fingerprint) / "output")
    champion = replace(store.source("champion", path=output, kind="checkpoint"), fingerprint=made.fingerprint)
    model = graph(store, store.stage("sft", {"policy": champion}))
    with pytest.raises(GateError, match=r": source:rows@\w+ -> left@\w+ -> source:champion@\w+ -> sft@"):
        require_commercial(model, all_labels(model, {}), ["*nc*"], "production")
    with pytest.raises(GateError, match=r": source:champion@\w+ -> sft@"):
        require_commercial(model, all_labels(model, {"champion": ["cc-nd"]}), ["*nd*"], "production")


def test_a_label_stated_later_reaches_what_was_made_before(store):
    rows = store.source("rows")
    model = store.stage("dpo", {"rows": rows})
    record_labels(store.root, [Statement(fingerprint=rows.fingerprint, source="rows", labels=["Late"])])
    assert graph(store, model).labels == {"Late"}
    assert found(store, "label:late") == {node(model)}


def test_only_what_is_new_is_written(store):
    said = Statement(fingerprint="a" * 64, source="rows", labels=["x"])
    record_labels(store.root, [replace(said, labels=[])])
    assert not store.root.exists()
    for each in (said, said, replace(said, labels=["x", "y"]), replace(said, labels=["y"])):
        record_labels(store.root, [each])
    assert len((store.root / LABELS).read_text().splitlines()) == 2
    assert stated_labels(store.root) == {"a" * 16: {"x", "y"}}


def test_a_torn_last_line_is_passed_over_and_a_damaged_one_is_named(store):
    said = Statement(fingerprint="a" * 64, source="rows", labels=["x"])
    record_labels(store.root, [said])
    with (store.root / LABELS).open("a") as file:
        file.write('{"fingerprint": "b')
    assert stated_labels(store.root) == {"a" * 16: {"x"}}
    record_labels(store.root, [replace(said, labels=["y"])])
    assert stated_labels(store.root) == {"a" * 16: {"x", "y"}}
    (store.root / LABELS).write_text("{}\n")
    with pytest.raises(ArtifactError, match=r"labels\.jsonl:1"):
        stated_labels(store.root)

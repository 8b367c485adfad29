import json

import pytest

from lineage.fingerprint import short
from lineage.graph.ancestry import ancestry
from lineage.graph.index import Index
from lineage.promotions import Event, append
from tests.written_store import WrittenStore, node


@pytest.fixture
def store(tmp_path):
    return WrittenStore(tmp_path / "store")


def graph(store, manifest):
    with Index(store.root) as index:
        return ancestry(index, node(manifest))


def test_it_holds_every_ancestor_and_link_once(store):
    made = store.chain()
    found = graph(store, made["evaluate"])
    names = sorted(each.name for each in found.nodes.values())
    assert names == ["base", "corpus", "cpt", "dpo", "evaluate", "pairs", "source:corpus", "source:pairs"]
    links = {(edge.parent.partition("@")[0], edge.child.partition("@")[0], edge.slot) for edge in found.edges}
    assert ("cpt", "evaluate", "cpt") in links and ("cpt", "dpo", "policy") in links
    assert len(links) == len(found.edges) == 10


def test_labels_flow_down_and_not_up(store):
    made = store.chain()
    found = graph(store, made["evaluate"])
    assert found.labels == {"cc-by-nc-4.0"}
    assert found.nodes[node(made["dpo"])].labels == {"cc-by-nc-4.0"}
    assert found.nodes[node(made["cpt"])].labels == set()
    assert graph(store, made["cpt"]).labels == set()


def test_a_label_that_any_manifest_states_of_a_source_counts(store):
    dpo = store.stage("dpo", {"rows": store.source("corpus")})
    assert graph(store, dpo).labels == set()
    store.stage("sft", {"rows": store.source("corpus", labels=["nc"])})
    assert graph(store, dpo).labels == {"nc"}


def test_the_path_is_the_shortest_from_source_to_model(store):
    made = store.chain()
    found = graph(store, made["evaluate"])
    source = next(each for each in found.nodes if each.startswith("source:pairs"))
    path = [each.partition("@")[0] for each in found.path(source, found.root)]
    assert path == ["source:pairs", "pairs", "dpo", "evaluate"]
    assert found.path(found.root, source) == []


def test_a_parent_that_is_gone_is_named_as_missing(store):
    made = store.chain()
    store.delete(made["cpt"])
    rows = {row["name"]: row for row in graph(store, made["dpo"]).to_dict("x")["nodes"]}
    assert rows["cpt"]["state"] == "missing" and rows["cpt"]["fingerprint"] == made["cpt"].fingerprint
    assert rows["dpo"]["state"] == "present"
    assert "base" not in rows


def test_it_shows_an_artifact_as_it_was_made_last_whatever_the_index_says(store):
    made = store.stage("dpo", {}, recipe={"beta": 1}, output="one")
    with Index(store.root) as index:
        again = store.stage("dpo", {}, recipe={"beta": 1}, output="two")
        assert ancestry(index, node(made)).nodes[node(made)].manifest.output_digest == again.output_digest


def test_the_json_is_that_of_the_page(store):
    made = store.chain()
    append(
        store.root,
        Event(action="promote", alias="champion", fingerprint=made["dpo"].fingerprint, stage="dpo", who="me", why=""),
    )
    document = json.loads(json.dumps(graph(store, made["dpo"]).to_dict("p/dpo")))
    assert document["ref"] == "p/dpo" and document["root"] == node(made["dpo"])
    rows = {row["name"]: row for row in document["nodes"]}
    dpo, corpus = rows["dpo"], rows["source:corpus"]
    assert dpo["kind"] == "stage" and dpo["artifact_kind"] == "checkpoint" and dpo["aliases"] == ["champion"]
    assert dpo["recipe"]["beta"] == 0.1 and dpo["provenance"]["git_commit"] == "c" * 40
    assert dpo["path"] == str(store.root / "dpo" / short(made["dpo"].fingerprint))
    assert corpus["kind"] == "source" and corpus["rows"] == 7 and corpus["source"]["path"] == "/data/corpus.jsonl"
    assert {"from", "to", "slot"} == set(document["edges"][0])


def test_a_champion_leads_on_to_the_stage_that_made_it(store):
    made = store.chain()
    output = store.root / "dpo" / short(made["dpo"].fingerprint) / "output"
    judge = store.stage("judge", {"champion": store.source("champion", path=str(output), kind="checkpoint")})
    found = graph(store, judge)
    assert node(made["dpo"]) in found.nodes
    assert found.labels == {"cc-by-nc-4.0"}


def test_manifests_of_the_first_schema_are_read(store):
    source = store.source("corpus")
    made = store.stage("dpo", {"rows": source})
    file = store.root / "dpo" / short(made.fingerprint) / "manifest.json"
    fields = json.loads(file.read_text())
    for name in ("produces", "execution_run_id"):
        del fields[name]
    del fields["inputs"]["rows"]["source"]
    file.write_text(json.dumps({**fields, "schema_version": 1}))
    rows = graph(store, made).to_dict("x")["nodes"]
    assert [row["artifact_kind"] for row in rows] == [None, None]

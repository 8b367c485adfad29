import json
from dataclasses import replace

import pytest

from flows.promotion.promote import all_labels, require_commercial
from lineage.errors import ArtifactError, ConfigError, GateError
from lineage.fingerprint import short
from lineage.graph.ancestry import ancestry
from lineage.graph.impact import impact
from lineage.graph.index import Index
from lineage.graph.refs import resolve
from lineage.record.labels import LABELS, Statement, record_labels, recorded_labels
from lineage.store import Store
from tests.written_store import node


def graph(store, manifest):
    with Index(store.root) as index:
        return ancestry(index, node(manifest))


def test_it_holds_every_ancestor_and_link_once_and_labels_flow_down(store):
    made = store.chain()
    found = graph(store, made["evaluate"])
    names = sorted(each.name for each in found.nodes.values())
    assert names == ["base", "corpus", "cpt", "dpo", "evaluate", "pairs", "source:corpus", "source:pairs"]
    links = {(edge.parent.partition("@")[0], edge.child.partition("@")[0], edge.slot) for edge in found.edges}
    assert ("cpt", "evaluate", "cpt") in links and ("cpt", "dpo", "policy") in links
    assert len(links) == len(found.edges) == 10
    assert found.labels == found.nodes[node(made["dpo"])].labels == {"cc-by-nc-4.0"}
    assert found.nodes[node(made["cpt"])].labels == graph(store, made["cpt"]).labels == set()
    source = next(each for each in found.nodes if each.startswith("source:pairs"))
    path = [each.partition("@")[0] for each in found.path(source, found.root)]
    assert path == ["source:pairs", "pairs", "dpo", "evaluate"]  # the shortest
    assert found.path(found.root, source) == []


def test_a_label_that_any_manifest_states_of_a_source_counts(store):
    dpo = store.stage("dpo", {"rows": store.source("corpus")})
    assert graph(store, dpo).labels == set()
    store.stage("sft", {"rows": store.source("corpus", labels=["nc"])})
    assert graph(store, dpo).labels == {"nc"}


def test_a_parent_that_is_gone_is_named_as_missing(store):
    made = store.chain()
    store.delete(made["cpt"])
    rows = {row["name"]: row for row in graph(store, made["dpo"]).to_dict("x")["nodes"]}
    assert rows["cpt"]["state"] == "missing" and rows["cpt"]["fingerprint"] == made["cpt"].fingerprint
    assert rows["dpo"]["state"] == "present"
    assert "base" not in rows


@pytest.mark.parametrize(
    ("report", "metrics", "counts"),
    [
        ({"rows": {"rows_read": 2017, "dropped": {"between the sides": 65}}}, {"rows": 1952, "dropped": 65}, [2017]),
        ({"rows": {"rows_read": 1000, "dropped": {"outside the slice": 990}}}, {"rows": 10, "dropped": 990}, [10]),
        (None, {"rows": 1952, "dropped": 65}, [2017]),  # its report is gone
        (
            {"rows": {"rows_read": 20, "dropped": {}}, "rows_2": {"rows_read": 30, "dropped": {"no answer": 1}}},
            {"rows": 49, "dropped": 1},
            [20, 30],
        ),
    ],
)
def test_a_source_has_all_its_rows(store, report, metrics, counts):
    sources = {"rows": store.source("rows"), "rows_2": store.source("more")}
    made = store.stage("corpus", dict(list(sources.items())[: len(counts)]), metrics=metrics)
    if report:
        (Store(store.root).entry("corpus", made.fingerprint).output / "report.json").write_text(
            json.dumps({"sources": report, **metrics})
        )
    found = {each["name"]: each.get("rows") for each in graph(store, made).to_dict("x")["nodes"]}
    assert [found[name] for name in ("source:rows", "source:more")[: len(counts)]] == counts


def test_the_json_is_that_of_the_page(store):
    made = store.chain()
    store.event(made["dpo"])
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


def found(store, ref: str) -> str:
    with Index(store.root) as index:
        return resolve(ref, index).node


def test_every_form_finds_the_artifact(store, monkeypatch):
    dpo = store.chain()["dpo"]
    store.event(dpo, stage=None)  # as a version wrote it that did not know the stage
    entry = store.root / "dpo" / short(dpo.fingerprint)
    monkeypatch.chdir(store.root.parent)
    forms = [
        dpo.fingerprint, dpo.fingerprint[:4], dpo.fingerprint[:20], "p/dpo", node(dpo), node(dpo)[:8], "alias:champion",
        str(entry), str(entry / "output"), str(entry / "output" / "content.txt"), f"store/dpo/{entry.name}/output/",
    ]  # fmt: skip
    assert {form: found(store, form) for form in forms} == dict.fromkeys(forms, node(dpo))


def test_pipeline_and_stage_mean_the_newest_unless_there_is_a_view(store, tmp_path):
    viewed, newest = (store.stage("dpo", {}, recipe={"beta": beta}) for beta in (1, 2))
    store.stage("dpo", {}, recipe={"beta": 3}, pipeline="other")
    assert found(store, "p/dpo") == node(newest)
    (tmp_path / "link").symlink_to(store.root)
    assert found(store, str(tmp_path / "link" / "dpo" / short(newest.fingerprint) / "output")) == node(newest)
    view = store.root / "pipelines" / "p" / "dpo"
    (view / "output").mkdir(parents=True)
    (view / "manifest.json").write_text(viewed.to_json())
    assert found(store, "p/dpo") == found(store, str(view / "output" / "content.txt")) == node(viewed)


def test_a_stage_means_what_its_pipeline_declares_or_its_newest_artifact(store, caplog):
    declared = store.stage("dpo", {}, recipe={"method": "Same", "n": 1})
    newest = store.stage("dpo", {}, recipe={"method": "Same", "n": 2})
    assert found(store, "dpo") == node(newest) and not caplog.messages
    view = store.root / "pipelines" / "p" / "dpo"
    view.mkdir(parents=True)
    (view / "manifest.json").write_text(declared.to_json())
    assert found(store, "dpo") == node(declared)
    assert caplog.messages == [
        f"dpo is {node(declared)}, of p as declared; newer, of other settings: {node(newest)}"
    ]  # fmt: skip


def test_a_source_means_the_version_read_last(store):
    store.stage("corpus", {"rows": store.source("corpus", "a")})
    store.stage("corpus", {"rows": store.source("corpus", "b")})
    newest = f"source:corpus@{short(store.source('corpus', 'b').fingerprint)}"
    older = f"source:corpus@{short(store.source('corpus', 'a').fingerprint)}"
    assert found(store, "source:corpus") == newest
    assert found(store, older) == older
    assert found(store, older.partition("@")[2]) == older


def test_an_alias_of_a_fingerprint_that_two_stages_share_means_the_promoted_one(store):
    left = store.stage("left", {}, recipe={"method": "Same"})
    right = store.stage("right", {}, recipe={"method": "Same"})
    assert left.fingerprint == right.fingerprint
    store.event(right)
    assert found(store, "alias:champion") == node(right)
    with pytest.raises(ConfigError, match=f"names 2 things: {node(left)}, {node(right)}"):
        found(store, left.fingerprint)


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("p/dpoo", "did you mean p/dpo"),
        ("q/dpo", "did you mean p/dpo"),
        ("dpoo", r"accepted: .*PIPELINE/STAGE, STAGE,.*did you mean p/dpo"),
        ("nothing", r"there are: p/base, p/corpus"),
        ("source:corpse", "did you mean source:corpus"),
        ("alias:champion", "aliases now: none; set it with: posttrain promote"),
        ("0000000", "no such artifact"),
        ("abc", "at least 4 digits"),
        ("", "no such artifact"),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_near(store, ref, says):
    store.chain()
    with pytest.raises(ConfigError, match=says):
        found(store, ref)


def test_an_empty_store_and_a_path_without_an_artifact_are_refused_as_such(store):
    with pytest.raises(ConfigError, match="no finished artifact: nothing is trained here yet; posttrain run first"):
        found(store, "p/dpo")
    store.chain()
    with pytest.raises(ConfigError, match="a path of this store, but no finished artifact"):
        found(store, str(store.root / "dpo" / ("0" * 16)))


def reached(store, ref: str) -> set[str]:
    with Index(store.root) as index:
        return {each.id for each in impact(ref, index).below.newest()}


def test_a_label_is_of_the_bytes_under_whatever_name_they_are_read(store):
    first = store.source("corpus", labels=["NC"])
    model = store.stage("dpo", {"rows": replace(store.source("other"), fingerprint=first.fingerprint)})
    assert graph(store, model).labels == set()
    store.stage("sft", {"rows": first})
    assert graph(store, model).labels == {"NC"}
    assert node(model) in reached(store, "label:nc")
    (labels,) = all_labels(graph(store, model), {"corpus": ["unread"]}).values()
    assert labels == {"NC"}


def test_what_is_set_now_is_of_all_sources_with_those_bytes(store):
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


def test_a_label_set_later_reaches_what_was_made_before(store):
    rows = store.source("rows")
    model = store.stage("dpo", {"rows": rows})
    record_labels(store.root, [Statement(fingerprint=rows.fingerprint, source="rows", labels=["Late"])])
    assert graph(store, model).labels == {"Late"}
    assert reached(store, "label:late") == {node(model)}


def test_a_torn_last_line_is_passed_over_and_a_damaged_one_is_named(store):
    message = Statement(fingerprint="a" * 64, source="rows", labels=["x"])
    record_labels(store.root, [message])
    with (store.root / LABELS).open("a") as file:
        file.write('{"fingerprint": "b')
    assert recorded_labels(store.root) == {"a" * 16: {"x"}}
    record_labels(store.root, [replace(message, labels=["y"])])
    assert recorded_labels(store.root) == {"a" * 16: {"x", "y"}}
    (store.root / LABELS).write_text("{}\n")
    with pytest.raises(ArtifactError, match=r"labels\.jsonl:1"):
        recorded_labels(store.root)


def test_it_shows_an_artifact_as_it_was_made_last_whatever_the_index_says(store):
    made = store.stage("dpo", {}, recipe={"beta": 1}, output="one")
    with Index(store.root) as index:
        again = store.stage("dpo", {}, recipe={"beta": 1}, output="two")
        assert ancestry(index, node(made)).nodes[node(made)].manifest.output_digest == again.output_digest

import json
from dataclasses import replace

from flows.reports.diff import diff_text
from lineage.fingerprint import short
from lineage.graph.diff import diff
from lineage.graph.index import Index
from tests.written_store import node


def answer(store, a, b) -> dict:
    with Index(store.root) as index:
        return json.loads(json.dumps(diff(index, node(a), node(b)).to_dict()))


def text(store, a, b) -> str:
    with Index(store.root) as index:
        return diff_text(diff(index, node(a), node(b)))


def found(store, a, b) -> list[tuple[str, str]]:
    return [(each["what"], each["text"]) for each in answer(store, a, b)["differences"]]


def test_its_own_recipe_comes_first_then_data_then_the_environment(store):
    first = store.chain()
    ran = {"libraries": {"torch": "2.14.0"}, "seed": 1}
    second = store.chain(content="b", beta=0.2, provenance=ran)
    whats = [what for what, _ in found(store, first["dpo"], second["dpo"])]
    assert whats == ["recipe", "data", "libraries"]
    assert found(store, first["dpo"], second["dpo"])[0] == ("recipe", "dpo: beta: 0.1 -> 0.2")


def test_a_changed_file_is_named_and_a_moved_one_is_not(store):
    rows = {"/d/a": "1", "/d/b": "2", "/d/c": "3"}
    first = store.stage("corpus", {"rows": store.source("corpus", "a", path="/d", files=rows)})
    moved = {"/e/a": "1", "/d/b": "4", "/d/n": "5"}
    second = store.stage("corpus", {"rows": store.source("corpus", "b", path="/d", files=moved)})
    texts = [each for what, each in found(store, first, second) if what == "data"]
    assert texts == [
        "source:corpus: file /d/b: changed, SHA-256 2 -> 4",
        "source:corpus: file /d/c: only in A",
        "source:corpus: file /d/n: only in B",
    ]


def test_a_revision_and_a_label_are_data(store):
    first = store.stage("dpo", {"rows": store.source("hub", "a", revision="1" * 40, files={})})
    second = store.stage("dpo", {"rows": store.source("hub", "b", revision="2" * 40, files={}, labels=["nc"])})
    texts = [each for _, each in found(store, first, second)]
    assert texts == ['source:hub: labels: [] -> ["nc"]', f'source:hub: revision: "{"1" * 40}" -> "{"2" * 40}"']


def test_how_a_source_is_read_is_data(store):
    first = store.stage("corpus", {"rows": store.source("rows", "a", reading={"columns": {"q": "prompt"}})})
    read = {"columns": {"q": "prompt", "a": "completion"}, "format": "prompt"}
    second = store.stage("corpus", {"rows": store.source("rows", "b", split="train[:5]", reading=read, files={})})
    texts = [each for what, each in found(store, first, second) if what == "data" and "file" not in each]
    assert texts == [
        'source:rows: columns.a: (none) -> "completion"', 'source:rows: format: (none) -> "prompt"',
        'source:rows: split: "train" -> "train[:5]"',
    ]  # fmt: skip


def test_another_shape_of_the_graph_is_named(store):
    made = store.chain()
    direct = store.stage("dpo", {"policy": made["base"], "pairs": made["pairs"]}, recipe={"beta": 0.1})
    texts = [each for _, each in found(store, made["dpo"], direct)]
    assert "dpo: input policy: cpt -> base" in texts
    assert f"cpt: only A was made with {node(made['cpt'])}" in texts
    assert not any("base: " in each and "recipe" in each for each in texts)


def test_one_cause_in_many_stages_is_reported_once(store):
    first = store.chain()
    second = {}
    for name, manifest in store.chain(content="b").items():
        ran = replace(manifest.provenance, git_commit="e" * 40)
        second[name] = replace(manifest, provenance=ran)
        file = store.root / name / short(manifest.fingerprint) / "manifest.json"
        file.write_text(second[name].to_json())
    git = [each for each in answer(store, first["dpo"], second["dpo"])["differences"] if each["what"] == "git"]
    assert len(git) == 1 and set(git[0]["stages"]) == {"dpo", "cpt", "base", "corpus"}


def test_metrics_are_the_consequence(store):
    first = store.chain(metrics={"loss": 0.5, "train_seconds": 3.0})
    second = store.chain(beta=0.2, metrics={"loss": 0.25, "train_seconds": 4.0})
    assert answer(store, first["dpo"], second["dpo"])["metrics"] == {"dpo": {"loss": [0.5, 0.25]}}
    assert text(store, first["dpo"], second["dpo"]).splitlines()[-1] == "  dpo: loss: 0.5 -> 0.25"


def test_equal_outputs_equal_fingerprints_and_one_artifact_are_named_as_such(store):
    first = store.stage("dpo", {}, recipe={"beta": 1}, output="same")
    second = store.stage("dpo", {}, recipe={"beta": 2}, output="same")
    assert "the outputs are equal, byte for byte, though the fingerprints differ" in text(store, first, second)
    assert answer(store, first, second)["same_output"]
    left, right = (store.stage(name, {}, recipe={"method": "Same"}, output=name) for name in ("left", "right"))
    assert "the same work gave other bytes; likely causes are code, libraries and hardware" in text(store, left, right)
    assert found(store, left, left) == []
    assert "A and B are one artifact" in text(store, left, left)


def test_a_parent_made_again_between_the_two_is_named(store):
    base = store.stage("base", {}, output="one")
    first = store.stage("dpo", {"policy": base}, recipe={"seed": 1})
    again = store.stage("base", {}, output="two")
    second = store.stage("dpo", {"policy": again}, recipe={"seed": 2})
    assert base.fingerprint == again.fingerprint
    whats = [what for what, _ in found(store, first, second)]
    assert whats == ["bytes of an input", "seed"]


def test_a_parents_recipe_comes_after_data_and_before_code(store):
    first = store.chain()
    base = store.stage("base", {"rows": first["corpus"]}, recipe={"size": 2})
    other = store.stage("dpo", {"policy": base, "pairs": first["pairs"]}, provenance={"code_digest": "e" * 64})
    plain = store.stage("dpo", {"policy": first["base"], "pairs": first["pairs"]}, recipe={"seed": 1})
    assert [what for what, _ in found(store, plain, other)] == ["recipe of a parent", "seed", "code"]

from flows.reports.lineage import ancestry_tree
from lineage.graph.ancestry import ancestry
from lineage.graph.index import Index
from tests.written_store import node


def tree(store, manifest) -> list[str]:
    with Index(store.root) as index:
        return ancestry_tree(ancestry(index, node(manifest))).splitlines()


def test_each_artifact_is_reported_once_and_named_where_it_comes_again(store):
    lines = tree(store, store.chain()["evaluate"])
    assert sum("7 rows" in line for line in lines) == 2  # the data stage and its source
    assert sum("corpus " in line and line.endswith("(above)") for line in lines) == 2


def test_it_tells_recipe_rows_time_commit_and_labels(store):
    made = store.chain(provenance={"git_dirty": True}, metrics={"loss": 0.25, "trained_tokens_percent": 61.5})
    shown = "\n".join(tree(store, made["dpo"]))
    for text in ("Dpo  beta=0.1", "loss 0.25", "61.5 % of the tokens trained", "10.0 s on here", "git cccccccc (dirty)",
                 "code dddddddd", "/data/corpus.jsonl", "SHA-256", "7 rows", "labels: cc-by-nc-4.0"):  # fmt: skip
        assert text in shown, text


def test_libraries_are_reported_once_and_where_they_differ(store):
    made = store.chain(provenance={"libraries": {"torch": "2.14.0"}})
    assert tree(store, made["evaluate"])[-2:] == ["made with python 3.11, torch 2.13.0", "but dpo with torch 2.14.0"]


def test_what_is_gone_is_reported_as_gone(store):
    made = store.chain()
    store.delete(made["base"])
    assert any("deleted from the store" in line for line in tree(store, made["cpt"]))


def test_the_dvc_hash_and_the_revision_of_a_source_are_reported(store):
    tracked = store.source("rows", dvc="0a1b.dir")
    hub = store.source("hub", revision="1" * 40, files={})
    from dataclasses import replace

    made = store.stage("dpo", {"rows": tracked, "hub": replace(hub, digest=None)})
    shown = "\n".join(tree(store, made))
    assert "DVC 0a1b.dir" in shown and f"revision {'1' * 40}" in shown


def test_the_folder_of_the_images_of_rows_is_reported(store):
    files = {"/data/rows.jsonl": "a" * 64, "/pictures/a/1.png": "b" * 64, "/pictures/2.png": "c" * 64}
    rows = store.source("rows", path="/data/rows.jsonl", files=files)
    assert any("images: 2 files, /pictures" in line for line in tree(store, store.stage("dpo", {"rows": rows})))


def test_control_characters_are_escaped(store):
    lines = tree(store, store.stage("dpo", {"rows": store.source("rows", labels=["n\x1b[31mc\n"])}))
    assert any("labels: n\\x1b[31mc\\n" in line for line in lines)


def test_a_source_alone_has_no_environment(store):
    store.chain()
    with Index(store.root) as index:
        lines = ancestry_tree(ancestry(index, index.sources("corpus")[-1])).splitlines()
    assert lines[0].startswith("source:corpus") and lines[-1]


def test_long_lines_go_on_beside_the_branches_of_the_tree(store, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    whole, made = tree(store, store.chain()["evaluate"]), store.chain()["evaluate"]
    assert all(len(line) <= 60 or " " not in line.strip(" │├└─") for line in whole)
    assert all(line[0] in "e│├└ m" for line in whole if line), whole
    monkeypatch.delenv("COLUMNS")
    assert len(tree(store, made)) < len(whole)

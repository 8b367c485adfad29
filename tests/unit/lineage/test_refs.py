import pytest

from lineage.errors import ConfigError
from lineage.fingerprint import short
from lineage.graph.index import Index
from lineage.graph.refs import resolve
from lineage.promotions import Event, append
from tests.written_store import WrittenStore, node


@pytest.fixture
def store(tmp_path):
    return WrittenStore(tmp_path / "store")


def found(store, ref: str) -> str:
    with Index(store.root) as index:
        return resolve(ref, index).node


def promote(store, alias, manifest, stage=None):
    event = Event(action="promote", alias=alias, fingerprint=manifest.fingerprint, stage=stage, who="me", why="")
    append(store.root, event)


def test_every_form_finds_the_artifact(store, monkeypatch):
    dpo = store.chain()["dpo"]
    promote(store, "champion", dpo)
    entry = store.root / "dpo" / short(dpo.fingerprint)
    monkeypatch.chdir(store.root.parent)
    forms = [
        dpo.fingerprint, dpo.fingerprint[:4], dpo.fingerprint[:20], "p/dpo", node(dpo), node(dpo)[:8], "alias:champion",
        str(entry), str(entry / "output"), str(entry / "output" / "content.txt"), f"store/dpo/{entry.name}/output/",
    ]  # fmt: skip
    assert {form: found(store, form) for form in forms} == dict.fromkeys(forms, node(dpo))


def test_a_link_to_the_store_leads_to_its_outputs(store, tmp_path):
    dpo = store.chain()["dpo"]
    (tmp_path / "link").symlink_to(store.root)
    assert found(store, str(tmp_path / "link" / "dpo" / short(dpo.fingerprint) / "output")) == node(dpo)


def test_pipeline_and_stage_mean_the_newest(store):
    store.stage("dpo", {}, recipe={"beta": 1})
    newest = store.stage("dpo", {}, recipe={"beta": 2})
    store.stage("dpo", {}, recipe={"beta": 3}, pipeline="other")
    assert found(store, "p/dpo") == node(newest)


def test_the_view_goes_before_the_newest(store):
    viewed = store.stage("dpo", {}, recipe={"beta": 1})
    store.stage("dpo", {}, recipe={"beta": 2})
    view = store.root / "pipelines" / "p" / "dpo"
    (view / "output").mkdir(parents=True)
    (view / "manifest.json").write_text(viewed.to_json())
    assert found(store, "p/dpo") == node(viewed)
    assert found(store, str(view / "output" / "content.txt")) == node(viewed)


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
    promote(store, "champion", right, "right")
    assert found(store, "alias:champion") == node(right)
    with pytest.raises(ConfigError, match=f"names 2 things: {node(left)}, {node(right)}"):
        found(store, left.fingerprint)


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("p/dpoo", "did you mean p/dpo"),
        ("q/dpo", "did you mean p/dpo"),
        ("dpo", r"accepted: .*PIPELINE/STAGE.*did you mean p/dpo"),
        ("nothing", r"there are: p/base, p/corpus"),
        ("source:corpse", "did you mean source:corpus"),
        ("alias:champion", "aliases now: none; give one with: posttrain promote"),
        ("0000000", "no such artifact"),
        ("abc", "at least 4 digits"),
        ("", "no such artifact"),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_near(store, ref, says):
    store.chain()
    with pytest.raises(ConfigError, match=says):
        found(store, ref)


def test_a_path_of_the_store_without_an_artifact_is_refused_as_such(store):
    store.chain()
    with pytest.raises(ConfigError, match="a path of this store, but no finished artifact"):
        found(store, str(store.root / "dpo" / ("0" * 16)))


def test_an_empty_store_says_what_to_run(store):
    with pytest.raises(ConfigError, match="no finished artifact; make one with: posttrain run"):
        found(store, "p/dpo")

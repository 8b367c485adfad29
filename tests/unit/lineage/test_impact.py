import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.reports import impact as impact_report
from flows.reports.impact import impact_text
from lineage.errors import ConfigError
from lineage.filesystem.digest import digest_file
from lineage.fingerprint import short
from lineage.graph import impact as impact_module
from lineage.graph.impact import impact
from lineage.graph.index import Index
from lineage.record.run_file import RunFile
from lineage.store import Store
from tests.written_store import node


def stages(answer: dict) -> set[str]:
    return {row["stage"] for row in answer["artifacts"]}


def answer(store, ref: str) -> dict:
    with Index(store.root) as index:
        return json.loads(json.dumps(impact(ref, index).to_dict()))


def text(store, ref: str) -> str:
    """As a person reads it."""
    with Index(store.root) as index:
        return impact_text(impact(ref, index))


def test_a_source_reaches_all_that_was_made_from_any_version_of_it(store):
    store.chain("a")
    store.chain("b", beta=0.2)
    both, one = answer(store, "source:corpus"), answer(store, f"source:corpus@{_digits(store, 'a')}")
    assert len(both["artifacts"]) == 10 and len(one["artifacts"]) == 5
    assert stages(both) == {"corpus", "base", "cpt", "dpo", "evaluate"}


def _digits(store, content: str) -> str:
    return short(store.source("corpus", content).fingerprint)


def test_a_file_is_found_by_its_recorded_path_and_by_what_it_holds(store, tmp_path):
    there = tmp_path / "moved.jsonl"
    there.write_text("rows")
    files = {"/data/gone.jsonl": digest_file(there), "/data/other.jsonl": "0" * 64}
    store.stage("corpus", {"rows": store.source("corpus", path="/data", files=files)})
    for ref in ("/data/gone.jsonl", "/data", str(there)):
        assert stages(answer(store, ref)) == {"corpus"}, ref
    (tmp_path / "new.jsonl").write_text("other")
    with pytest.raises(ConfigError, match="the path of a data file"):
        answer(store, str(tmp_path / "new.jsonl"))


def test_a_label_reaches_what_its_sources_went_into_whatever_its_case(store):
    store.chain()
    assert stages(answer(store, "label:CC-by-nc-4.0")) == {"pairs", "dpo", "evaluate"}
    with pytest.raises(ConfigError, match=r"labels there: cc-by-nc-4\.0"):
        answer(store, "label:cc-by")


def test_a_base_model_is_answered_for_also_when_it_is_gone_and_another_takes_its_place(store):
    made = store.chain()
    assert "stages.cpt.inputs.policy=ANOTHER" in text(store, node(made["base"]))
    store.delete(made["base"])
    assert stages(answer(store, node(made["base"]))) == {"cpt", "dpo", "evaluate"}


def test_registered_versions_and_aliases_are_named(store, monkeypatch):
    made = store.chain()
    store.event(made["dpo"])
    found = answer(store, "label:cc-by-nc-4.0")
    assert found["aliases"] == {"champion": node(made["dpo"])}
    assert {row["registered_model"] for row in found["artifacts"]} == {None}  # no MLflow registered one
    entry = Store(store.root).entry("dpo", made["dpo"].fingerprint)
    RunFile(uri="", run_id="r", execution_id="e", cli_args=[], version=3).write(entry.path)
    found = answer(store, "label:cc-by-nc-4.0")
    assert {row["stage"]: (row["registered_model"], row["registered_version"]) for row in found["artifacts"]} == {
        "pairs": (None, None), "dpo": ("p", 3), "evaluate": (None, None),
    }  # fmt: skip
    assert "registered versions: 1 of p" in text(store, "label:cc-by-nc-4.0")
    monkeypatch.setattr(impact_module, "MOST_VERSIONS", 0)
    monkeypatch.setattr(impact_report, "MOST_VERSIONS", 0)
    assert "registered versions: not counted: 1 models" in text(store, "label:cc-by-nc-4.0")
    assert {row["registered_model"] for row in answer(store, "label:cc-by-nc-4.0")["artifacts"]} == {None}
    assert answer(store, node(made["evaluate"]))["aliases"] == {}


def test_a_rollback_is_offered_where_the_holder_before_never_met_it(store):
    clean = store.stage("dpo", {}, recipe={"beta": 5})
    made = store.chain()
    store.event(clean)
    store.event(made["dpo"])
    shown = text(store, "source:pairs")
    assert f"alias champion names {node(made['dpo'])}; 0 s: posttrain rollback --alias champion" in shown
    assert "rollback" not in text(store, node(clean))


def test_only_what_descends_from_it_must_run_again(store):
    made = store.chain()
    (plan,) = answer(store, "source:pairs")["retraining"]
    assert [row["stage"] for row in plan["run_again"]] == ["pairs", "dpo", "evaluate"]
    assert {row["stage"] for row in plan["reused"]} == {"corpus", "base", "cpt"}
    assert plan["restart_from"] == [node(made["cpt"])]
    assert plan["estimated_seconds"] == pytest.approx(30)
    shown = text(store, "source:pairs")
    assert "run again pairs 10 s, dpo 10 s, evaluate 10 s: about 30 s" in shown
    assert f"to do: posttrain run pipeline=p store={store.root} sources.pairs.path=DATA-WITHOUT-IT" in shown


def test_a_finished_model_that_never_met_it_is_cheaper(store):
    clean = store.stage("dpo", {}, recipe={"beta": 5})
    store.chain()
    (plan,) = answer(store, "source:pairs")["retraining"]
    assert plan["instead"] == {"dpo": node(clean)}


def test_control_characters_are_escaped_for_people(store):
    store.stage("dpo", {"rows": store.source("corpus", path="/data/\x1b[2J\nevil", labels=["nc"])})
    shown = text(store, "/data/\x1b[2J\nevil")
    assert "\\x1b[2J\\nevil" in shown and "\x1b" not in shown


TRAINED, HELD = "a secret in training", "a secret held out"


def write_rows(store, manifest, train: list[str], held_out: list[str]) -> None:
    """Rows below a written output, as the data stages write them."""
    output = store.root / manifest.stage / short(manifest.fingerprint) / "output"
    for side, texts in (("train", train), ("held_out", held_out)):
        ids = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
        pq.write_table(pa.table({"row_id": ids, "text": texts}), output / f"{side}.parquet")


@pytest.fixture
def with_rows(store):
    """One version of the corpus holds a row in training, a later one held out."""
    first, second = store.chain("a"), store.chain("b", beta=0.2)
    write_rows(store, first["corpus"], ["plain", TRAINED], ["other", HELD])
    write_rows(store, second["corpus"], ["plain"], ["other", TRAINED])
    return first, second


def test_a_row_reaches_the_models_that_trained_on_it_and_not_those_that_held_it_out(store, with_rows):
    first, second = with_rows
    found = answer(store, f"source:corpus#{TRAINED}")
    roles = {row["id"]: row["role"] for row in found["artifacts"]}
    assert roles == {
        node(first["corpus"]): "has it in train",
        node(first["base"]): "trained on it",
        node(first["cpt"]): "trained on it",
        node(first["dpo"]): "trained on it",
        node(first["evaluate"]): "measured on it",
        node(second["corpus"]): "has it in held_out",
        node(second["evaluate"]): "measured on it",
    }
    assert found["unaffected_models"] == 3
    assert [row["text"] for row in found["rows"]] == [TRAINED]


def test_rows_are_found_by_id_and_by_a_part_of_their_text(store, with_rows):
    (row,) = answer(store, f"source:corpus#{TRAINED}")["rows"]
    assert answer(store, f"source:corpus#{row['row_id']}")["rows"] == [row]
    found = answer(store, "source:corpus#a secret")
    assert sorted(row["text"] for row in found["rows"]) == [HELD, TRAINED]
    for wanted in ("A Secret", "0123456789abcdef", ""):
        with pytest.raises(ConfigError, match="row"):
            answer(store, f"source:corpus#{wanted}")


def test_a_row_that_was_only_held_out_asks_for_no_training(store, with_rows):
    shown = text(store, f"source:corpus#{HELD}")
    assert "registered versions: none" in shown
    assert "of such data, not on it" in shown
    shown = text(store, f"source:corpus#{TRAINED}")  # of what stands now, held out as well
    assert "no current model was trained on it" in shown
    assert "delete the row from /data/corpus.jsonl; posttrain run pipeline=p" in shown


def test_a_source_without_rows_of_ours_is_refused(store):
    store.stage("dpo", {"policy": store.source("model", kind="checkpoint")})
    with pytest.raises(ConfigError, match=r"no data stage .* has read rows of that source"):
        answer(store, "source:model#text")


def test_a_text_is_found_in_nested_rows(store):
    made = store.stage("pairs", {"rows": store.source("pairs")})
    output = store.root / "pairs" / short(made.fingerprint) / "output"
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    schema = pa.schema([("row_id", pa.string()), ("prompt", messages), ("kind", pa.string())])
    rows = [
        {"row_id": "0" * 16, "prompt": [], "kind": "x"},
        {"row_id": "1" * 16, "prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "to find"}]},
        {"row_id": "1" * 16 + "-1", "prompt": None, "kind": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), output / "train.parquet")
    assert [row["row_id"] for row in answer(store, "source:pairs#to find")["rows"]] == ["1" * 16]
    assert len(answer(store, f"source:pairs#{'1' * 16}")["rows"]) == 2  # with its duplicate


def test_data_that_cannot_be_searched_is_named_and_not_answered_for(store, caplog):
    first, second = store.chain("a"), store.chain("b", beta=0.2)
    with pytest.raises(ConfigError, match=f"{node(first['corpus'])}.* cannot be searched"):
        answer(store, "source:corpus#text")
    write_rows(store, first["corpus"], [TRAINED], [])
    assert answer(store, f"source:corpus#{TRAINED}")["rows"]
    assert node(second["corpus"]) in caplog.text


def test_what_no_pipeline_stands_on_any_more_needs_no_retraining_unless_a_view_says_so(store):
    first = store.chain("a")
    store.chain("b", beta=0.2)
    found = answer(store, f"source:corpus@{_digits(store, 'a')}")
    assert found["artifacts"] and found["retraining"] == []
    for stage, manifest in first.items():
        view = store.root / "pipelines" / "p" / stage
        view.mkdir(parents=True)
        (view / "manifest.json").write_text(manifest.to_json())
    assert answer(store, f"source:corpus@{_digits(store, 'a')}")["retraining"]
    assert answer(store, f"source:corpus@{_digits(store, 'b')}")["retraining"] == []


@pytest.mark.parametrize("ref", ["", "  "])
def test_an_empty_ref_is_refused(store, ref):
    store.chain()
    with pytest.raises(ConfigError, match="REF is empty"):
        answer(store, ref)


def test_without_mlflow_no_version_is_registered(store):
    store.chain()
    assert "registered versions: none" in text(store, "source:corpus")

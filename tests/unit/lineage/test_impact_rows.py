import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.errors import ConfigError
from lineage.fingerprint import short
from tests.impact_answers import answer, text
from tests.written_store import WrittenStore, node

TRAINED, HELD = "a secret in training", "a secret held out"


@pytest.fixture
def store(tmp_path):
    return WrittenStore(tmp_path / "store")


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


def test_a_row_is_found_by_its_id_too(store, with_rows):
    (row,) = answer(store, f"source:corpus#{TRAINED}")["rows"]
    assert answer(store, f"source:corpus#{row['row_id']}")["rows"] == [row]


def test_several_rows_with_a_text_are_answered_for_together(store, with_rows):
    found = answer(store, "source:corpus#a secret")
    assert sorted(row["text"] for row in found["rows"]) == [HELD, TRAINED]


def test_a_row_that_was_only_held_out_asks_for_no_training(store, with_rows):
    shown = text(store, f"source:corpus#{HELD}")
    assert "registered versions: none" in shown
    assert "they never saw it" in shown
    shown = text(store, f"source:corpus#{TRAINED}")  # of what stands now, held out as well
    assert "no model that stands now was trained on it" in shown
    assert "delete the row from /data/corpus.jsonl; posttrain run pipeline=p" in shown


@pytest.mark.parametrize("wanted", ["A Secret", "0123456789abcdef", ""])
def test_a_row_that_is_not_there_is_refused(store, with_rows, wanted):
    with pytest.raises(ConfigError, match="row"):
        answer(store, f"source:corpus#{wanted}")


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

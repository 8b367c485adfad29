"""Documents are joined and cut in chunks; what fills none is named."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests import tiny
from tests.libraries.tasks.data.tokens.tokens import tokenized

END = "<|endoftext|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_documents_are_joined_and_cut_in_chunks_and_the_rest_is_reported(directory: Path, tmp_path: Path) -> None:
    rows = [{"row_id": str(i), "text": text} for i, text in enumerate(["sum adds", "map applies", "list", "new"])]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("".join(f"{row['text']}{END}" for row in rows), add_special_tokens=False)["input_ids"]
    length = ids.index(tokenizer.convert_tokens_to_ids(END)) + 2  # one token of the second document
    result = tokenized(rows[:2], directory, tmp_path, length)
    assert result.columns == {"input_ids": [ids[:length]], "labels": [ids[:length]]}
    assert (result.stats.cut.row_ids, result.stats.dropped) == (["1"], {})
    assert result.stats.samples == [f"⟦{tokenizer.decode(ids[:length])}⟧"]
    result = tokenized(rows, directory, tmp_path, len(ids) - 4)
    assert result.columns["labels"] == [ids[: len(ids) - 4]]
    assert result.stats.dropped["fills_no_chunk"].row_ids[-1] == "3"
    assert result.metrics["trained_tokens_percent"] == 100


@settings(max_examples=10)
@given(words=st.lists(st.integers(0, 12), min_size=1, max_size=12), max_length=st.integers(1, 30))
def test_chunks_are_the_stream_and_every_document_is_counted_once(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, words: list[int], max_length: int
) -> None:
    rows = [{"row_id": str(i), "text": tiny.sentence(i, count)} for i, count in enumerate(words)]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    documents = [tokenizer(f"{row['text']}{END}", add_special_tokens=False)["input_ids"] for row in rows]
    stream = [token for ids in documents for token in ids]
    kept = len(stream) // max_length * max_length
    result = tokenized(rows, directory, tmp_path_factory.mktemp("rows"), max_length)
    assert result.columns["input_ids"] == [stream[at : at + max_length] for at in range(0, kept, max_length)]
    cut, dropped, place = [], [], 0
    for row, ids in zip(rows, documents, strict=True):
        if place >= kept:
            dropped.append(row["row_id"])
        elif place + len(ids) > kept:
            cut.append(row["row_id"])
        place += len(ids)
    stats = result.stats
    assert stats.cut.row_ids == cut
    assert [row_id for named in stats.dropped.values() for row_id in named.row_ids] == dropped
    assert (stats.num_rows, stats.num_tokens, stats.num_trained) == (len(rows), kept, kept)

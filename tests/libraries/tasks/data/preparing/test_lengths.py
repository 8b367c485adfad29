"""Lengths: quantiles, a histogram that holds every row, and what they suggest."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.artifact import Kind
from lineage.errors import DataError
from tasks.data.kinds import ROW_KINDS
from tasks.data.preparing.prepare import measure, token_lengths


def test_quantiles_are_lengths_that_rows_have():
    found = measure(np.arange(1, 101), tokenizer="tiny")
    assert (found.rows, found.p50, found.p95, found.p99, found.max) == (100, 50, 95, 99, 100)
    assert (found.unit, found.tokenizer) == ("tokens", "tiny")


@pytest.mark.parametrize(("p95", "suggested"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_the_suggested_length_is_the_smallest_multiple_of_64_that_holds_95_percent(p95, suggested):
    found = measure(np.array([p95] * 95 + [10_000] * 5), tokenizer="tiny")
    assert found.suggested_max_length == suggested


def test_packing_is_suggested_where_the_mean_row_fills_less_than_half():
    assert measure(np.array([31] * 100), tokenizer="tiny").suggests_packing
    assert not measure(np.array([32] * 100), tokenizer="tiny").suggests_packing
    assert "packing" in measure(np.array([31] * 100), tokenizer="tiny").described()


def test_bytes_suggest_nothing():
    found = measure(np.array([31, 32]))
    assert (found.unit, found.tokenizer, found.suggested_max_length, found.suggests_packing) == (
        "bytes",
        None,
        None,
        None,
    )
    assert found.described() == "of 2 rows, bytes at most:  50 %: 31  95 %: 32  99 %: 32  100 %: 32"


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=50))
def test_the_histogram_holds_every_row_in_at_most_forty_bins(values):
    found = measure(np.array(values, dtype=np.int64))
    assert sum(found.counts) == len(values) and len(found.counts) == len(found.edges) - 1 <= 40
    assert list(found.edges) == sorted(set(found.edges))
    assert found.edges[0] <= min(values) and found.edges[-1] > max(values)


class Words:
    """A tokenizer of words, with a template that marks roles by one word each."""

    chat_template = None
    special_tokens_map = {}
    name_or_path = "words"

    def __init__(self, template=None):
        self.chat_template = template

    def get_chat_template(self, tools=None):
        return self.chat_template

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [text.split() for text in texts]}


TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
STRICT = "{{ raise_exception('no') }}"


def write(path, kind, rows):
    named = [{"row_id": f"{place:016x}", **row} for place, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(named, ROW_KINDS[kind].schema), path)
    return path


def turn(role, text):
    return [{"role": role, "content": text}]


Q = turn("user", "a")


@pytest.mark.parametrize(
    ("kind", "row", "template", "count"),
    [
        (Kind.TEXT, {"text": "a b c"}, TEMPLATE, 3),
        (Kind.CONVERSATIONS, {"messages": [*turn("user", "a b"), *turn("assistant", "c")]}, TEMPLATE, 5),
        (Kind.CONVERSATIONS, {"messages": [*turn("user", "a b"), *turn("assistant", "c")]}, None, 3),
        (Kind.PREFERENCES, {"prompt": Q, "chosen": turn("assistant", "b"), "rejected": turn("assistant", "c d e")},
         TEMPLATE, 6),
        (Kind.UNPAIRED, {"prompt": Q, "completion": turn("assistant", "b c"), "label": True}, TEMPLATE, 5),
        (Kind.PROMPTS, {"prompt": Q}, TEMPLATE, 2),
    ],
)  # fmt: skip
def test_rows_are_counted_through_the_chat_template_and_pairs_by_their_longer_answer(
    tmp_path, kind, row, template, count
):
    assert token_lengths([write(tmp_path / "rows.parquet", kind, [row])], Words(template)).tolist() == [count]


def test_a_row_that_the_template_refuses_is_named(tmp_path):
    file = write(tmp_path / "rows.parquet", Kind.CONVERSATIONS, [{"messages": turn("user", "a")}])
    with pytest.raises(DataError) as refusal:
        token_lengths([file], Words(STRICT))
    assert str(refusal.value) == (
        "row 0000000000000000: the model's chat template refuses its messages: no; correct the row's roles "
        "and their order"
    )

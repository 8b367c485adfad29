"""Near-duplicates: what is planted is found, what is merely of one subject is not."""

import random

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.data.preparing.near_duplicates import BANDS, NUM_BANDS, band_hashes, find


def words(generator, count=200):
    return [f"w{generator.randrange(20_000)}" for _ in range(count)]


def changed(text, generator, edits):
    """The same words, some of them others: each edit takes five 5-grams out and brings five in."""
    other = list(text)
    for place in generator.sample(range(5, len(text) - 5, 5), edits):
        other[place] = f"new{generator.randrange(10**6)}"
    return other


def jaccard(one, other):
    first, second = ({tuple(each[start : start + 5]) for start in range(len(each) - 4)} for each in (one, other))
    return len(first & second) / len(first | second)


@pytest.fixture
def search(tmp_path):
    """Finds the near-duplicates of texts whose ids are given."""

    def found(rows):
        bands = band_hashes([text for _, text in rows])
        keys = {"ordinal": range(len(rows)), "content": [row_id for row_id, _ in rows]}
        keys["row_id"] = keys["content"]
        table = pa.table({**keys, **{band: bands[:, place] for place, band in enumerate(BANDS)}})
        pq.write_table(table, tmp_path / "keys.parquet")
        with duckdb.connect() as connection:
            return find(connection, f"read_parquet('{tmp_path}/keys.parquet')", tmp_path)

    return found


def test_rows_alike_to_nine_tenths_are_found_and_rows_alike_to_a_half_are_not(search):
    generator = random.Random(0)
    near, far = [], []
    for _ in range(50):
        text = words(generator)
        near.append((text, changed(text, generator, 2)))
        text = words(generator)
        far.append((text, changed(text, generator, 13)))
    assert all(0.88 < jaccard(*pair) < 0.92 for pair in near) and all(0.45 < jaccard(*pair) < 0.55 for pair in far)
    rows = [(f"{kind}{place}{side}", " ".join(text)) for kind, pairs in (("near", near), ("far", far))
            for place, pair in enumerate(pairs) for side, text in zip("ab", pair, strict=True)]  # fmt: skip

    count, listed = search(rows)

    assert count == 50
    assert listed[0].row_id == "near0b" and listed[0].other_row_id == "near0a"
    assert listed[0].similarity == pytest.approx(jaccard(*near[0]), abs=0.08)


def test_an_exact_copy_is_no_near_duplicate(search):
    text = " ".join(words(random.Random(0)))

    assert search([("a", text), ("a", text), ("b", "something else altogether")]) == (0, [])


def test_rows_that_differ_in_case_and_punctuation_are_near_duplicates(search):
    text = " ".join(words(random.Random(0)))

    count, listed = search([("a", text), ("b", text.upper().replace(" ", ", "))])

    assert count == 1 and listed[0].similarity == 1.0


@pytest.mark.parametrize(
    ("edits", "index", "least", "most"), [(17, 0.7, 0, 0.05), (11, 0.8, 0.3, 0.7), (8, 0.85, 0.9, 1), (5, 0.9, 1, 1)]
)
def test_as_many_pairs_are_found_as_is_said(search, edits, index, least, most):
    generator = random.Random(0)
    pairs = [(text, changed(text, generator, edits)) for text in (words(generator, 500) for _ in range(100))]
    assert sum(jaccard(*pair) for pair in pairs) / 100 == pytest.approx(index, abs=0.01)

    count, _ = search([(f"{place}{side}", " ".join(text)) for place, pair in enumerate(pairs)
                       for side, text in zip("ab", pair, strict=True)])  # fmt: skip

    assert least <= count / 100 <= most


def test_short_rows_are_compared_with_their_punctuation(search):
    assert search([("a", "What is 1 + 1?"), ("b", "What is 1 - 1?")]) == (0, [])
    count, _ = search([("a", "What is 1 + 1?"), ("b", "what is  1 + 1?\n")])
    assert count == 1


def test_a_thousand_rows_alike_are_a_thousand_pairs_each_with_an_earlier_one(search, tmp_path):
    generator = random.Random(0)
    text = words(generator)
    rows = [(f"row{place:04}", " ".join([*text, f"x{place}"])) for place in range(1000)]

    count, listed = search(rows)

    written = pq.read_table(tmp_path / "near_duplicates.parquet").to_pylist()
    assert count == 999 == len(written)
    assert all(row["other_row_id"] < row["row_id"] and row["similarity"] > 0.95 for row in written)
    assert len(listed) == 20 and [pair.row_id for pair in listed] == [row_id for row_id, _ in rows[1:21]]


def test_rows_without_words_are_like_nothing(search):
    assert search([("a", "?!"), ("b", "..."), ("c", "")]) == (0, [])


def test_bands_do_not_depend_on_how_many_rows_are_hashed_at_once():
    texts = [" ".join(words(random.Random(seed), 30)) for seed in range(300)]

    assert (band_hashes(texts)[200] == band_hashes(texts[200:201])[0]).all()
    assert band_hashes([]).shape == (0, NUM_BANDS)

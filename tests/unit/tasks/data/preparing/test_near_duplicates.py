"""Word n-grams as hashes: the words of a row and nothing else make them."""

import random

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.preparing.repeats import BANDS, NUM_BANDS, band_hashes, find_near_duplicates, shingles


def grams(texts, size):
    """The hashes of each row."""
    found = shingles(texts, size)
    return [found.hashes[start:end].tolist() for start, end in zip(found.offsets, found.offsets[1:], strict=False)]


def test_a_row_has_the_same_grams_whatever_stands_beside_it():
    text = "the row in the middle has nine words here"

    assert grams(["first row", text, "last"], 5)[1] == grams([text], 5)[0] == grams([text, "more words"], 5)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a b c d e", "b a c d e"),  # order
        ("a b c d e", "a b c d"),  # a row that is shorter than a gram
        ("a bb c d e", "ab b c d e"),  # where words end
        ("a b c d aaaaaaaab", "a b c d aaaaaaaac"),  # the ninth character of a word
        ("a b c d " + "a" * 100, "a b c d " + "a" * 101),  # the length of a long word
        ("a b c d " + "a" * 100 + "b", "a b c d " + "a" * 100 + "c"),  # the end of a long word
    ],
)
def test_other_words_are_other_grams(one, other):
    assert not set(grams([one], 5)[0]) & set(grams([other], 5)[0])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("今天天气很好", 6),
        ("今天 天气\uff0c很好。", 6),
        ("ภาษา", 4),
        ("Python很好", 3),
        ("𠀀𠀁", 2),
        ("안녕 세상", 2),
        ("Ünïcode", 1),
    ],
)
def test_of_a_script_without_spaces_each_character_is_a_word(text, count):
    assert len(grams([text], 1)[0]) == count


def test_a_part_of_an_arrow_array_is_read_as_a_list_is():
    texts = ["not this one", "straße UND haus", "", "the last one of these"]

    assert grams(pa.array(texts).slice(1), 2) == grams(texts[1:], 2)


@given(st.lists(st.lists(st.text("aAbé.", max_size=5), max_size=8).map(" ".join), max_size=5), st.integers(1, 4))
def test_grams_are_equal_exactly_where_their_words_are(texts, size):
    table = str.maketrans(".", " ")
    words = [text.lower().translate(table).split() for text in texts]
    expected = [
        [tuple(row[start : start + size]) for start in range(max(len(row) - size + 1, 1))] if row else []
        for row in words
    ]
    found = grams(texts, size)

    named = dict(zip((each for row in found for each in row), (each for row in expected for each in row), strict=True))
    assert [[named[each] for each in row] for row in found] == expected
    assert len(set(named.values())) == len(named)


def test_no_two_of_many_words_have_one_hash():
    words = [f"{prefix}{number}" for prefix in ("w", "word", "alongerwordthansixteen") for number in range(50_000)]

    assert len(np.unique(shingles(words, 1).hashes)) == len(words)


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
            return find_near_duplicates(connection, f"read_parquet('{tmp_path}/keys.parquet')", tmp_path)

    return found


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
def test_as_many_pairs_are_found_as_is_reported(search, edits, index, least, most):
    generator = random.Random(0)
    pairs = [(text, changed(text, generator, edits)) for text in (words(generator, 500) for _ in range(100))]
    assert sum(jaccard(*pair) for pair in pairs) / 100 == pytest.approx(index, abs=0.01)

    count, _ = search([(f"{place}{side}", " ".join(text)) for place, pair in enumerate(pairs)
                       for side, text in zip("ab", pair, strict=True)])  # fmt: skip

    assert least <= count / 100 <= most


def test_a_thousand_rows_alike_are_a_thousand_pairs_each_with_an_earlier_one(search, tmp_path):
    generator = random.Random(0)
    text = words(generator)
    rows = [(f"row{place:04}", " ".join([*text, f"x{place}"])) for place in range(1000)]

    count, listed = search(rows)

    written = pq.read_table(tmp_path / "near_duplicates.parquet").to_pylist()
    assert count == 999 == len(written)
    assert all(row["other_row_id"] < row["row_id"] and row["similarity"] > 0.95 for row in written)
    assert len(listed) == 20 and [pair.row_id for pair in listed] == [row_id for row_id, _ in rows[1:21]]


def test_bands_do_not_depend_on_how_many_rows_are_hashed_at_once():
    texts = [" ".join(words(random.Random(seed), 30)) for seed in range(300)]

    assert (band_hashes(texts)[200] == band_hashes(texts[200:201])[0]).all()
    assert band_hashes([]).shape == (0, NUM_BANDS)


def test_rows_without_words_are_like_nothing(search):
    assert search([("a", "?!"), ("b", "..."), ("c", "")]) == (0, [])


def test_short_rows_are_compared_with_their_punctuation(search):
    assert search([("a", "What is 1 + 1?"), ("b", "What is 1 - 1?")]) == (0, [])
    count, _ = search([("a", "What is 1 + 1?"), ("b", "what is  1 + 1?\n")])
    assert count == 1


@pytest.mark.parametrize(
    "other", ["the “cat” sat — on the mat…", "the cat、sat　on the mat。", "the cat\u00a0sat on the mat ¡"]
)
def test_punctuation_and_white_space_beyond_ascii_make_no_difference_either(other):
    assert grams(["the cat sat on the mat"], 5) == grams([other], 5)


def test_capitals_beyond_ascii_are_folded_too():
    assert grams(["ÄRGER über ПРИВЕТ"], 2) == grams(["ärger ÜBER привет"], 2)

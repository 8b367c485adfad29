"""Word n-grams as hashes: the words of a row and nothing else make them."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.preparing.shingles import shingles


def grams(texts, size):
    """The hashes of each row."""
    found = shingles(texts, size)
    return [found.hashes[start:end].tolist() for start, end in zip(found.offsets, found.offsets[1:], strict=False)]


def test_a_row_has_one_gram_for_each_window_of_words():
    counts = [len(row) for row in grams(["a b c d e f", "a b c", "a b", "", " !? "], 3)]

    assert counts == [4, 1, 1, 0, 0]


def test_a_row_has_the_same_grams_whatever_stands_beside_it():
    text = "the row in the middle has nine words here"

    assert grams(["first row", text, "last"], 5)[1] == grams([text], 5)[0] == grams([text, "more words"], 5)[0]


@pytest.mark.parametrize(
    "other", ["The cat, SAT on the mat!", "the\tcat\nsat  on (the) mat", " the cat sat on the mat "]
)
def test_case_punctuation_and_white_space_make_no_difference(other):
    assert grams(["the cat sat on the mat"], 5) == grams([other], 5)


def test_capitals_beyond_ascii_are_folded_too():
    assert grams(["ÄRGER über ПРИВЕТ"], 2) == grams(["ärger ÜBER привет"], 2)


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
    "other", ["the “cat” sat — on the mat…", "the cat、sat　on the mat。", "the cat\u00a0sat on the mat ¡"]
)
def test_punctuation_and_white_space_beyond_ascii_make_no_difference_either(other):
    assert grams(["the cat sat on the mat"], 5) == grams([other], 5)


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


def test_two_sentences_without_spaces_share_what_both_say():
    one, other = (set(grams([text], 3)[0]) for text in ("今天天气很好我们去公园", "今天天气很好他们去学校"))

    assert len(one & other) == 4


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

"""Leakage: held-out rows that training rows repeat, whole or in good part."""

import random

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.artifact import Kind
from tasks.data.kinds import ROW_KINDS
from tasks.data.preparing.repeats import NamedSet, find_leakage, prompts_of


def words(seed, count=100):
    generator = random.Random(seed)
    return [f"w{generator.randrange(20_000)}" for _ in range(count)]


def turns(message):
    """Turns, or the one of a user."""
    return [{"role": "user", "content": message}] if isinstance(message, str) else message


@pytest.fixture
def rows(tmp_path):
    """Writes a set of rows of some kind; a text or turns for each id."""

    def written(name, texts, kind=Kind.TEXT):
        columns = {
            Kind.TEXT: lambda text: {"text": text},
            Kind.CONVERSATIONS: lambda text: {"messages": turns(text)},
            Kind.PREFERENCES: lambda text: {
                "prompt": turns(text), "kind": "wrong",
                **{side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")},
            },
        }[kind]  # fmt: skip
        table = pa.Table.from_pylist(
            [{"row_id": row_id, **columns(text)} for row_id, text in texts.items()], ROW_KINDS[kind].schema
        )
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
        return NamedSet(name=name, file=tmp_path / f"{name}.parquet")

    return written


@pytest.fixture
def leaks(tmp_path):
    def found(train, held_out):
        with duckdb.connect() as connection:
            return find_leakage(train, held_out, connection, tmp_path)

    return found


def described(overlaps):
    return [(each.kind, each.held_out_row_id, each.train_row_id) for each in overlaps]


def test_a_row_that_stands_in_both_sets_is_exact_whatever_its_case_and_white_space(rows, leaks):
    text = " ".join(words(0))
    train = rows("train", {"t0": " ".join(words(1)), "t1": text.upper().replace(" ", "\n\n")})

    count, overlaps = leaks([train], [rows("held_out", {"h0": " ".join(words(2)), "h1": text})])

    assert count == 1 and described(overlaps) == [("exact", "h1", "t1")]
    assert (overlaps[0].train_set, overlaps[0].held_out_set, overlaps[0].shared) == ("train", "held_out", 1.0)


def test_a_row_half_of_whose_n_grams_are_trained_on_is_named_with_the_row_that_has_most_of_them(rows, leaks):
    text = words(0)
    train = rows("train", {
        "little": " ".join([*text[:30], *words(1)]),
        "much": " ".join([*words(2), *text[30:90]]),
        "none": " ".join(words(3)),
    })  # fmt: skip

    count, overlaps = leaks([train], [rows("held_out", {"h": " ".join(text)})])

    assert count == 1 and described(overlaps) == [("n-gram", "h", "much")]
    assert overlaps[0].shared == pytest.approx((30 - 12 + 60 - 12) / 88, abs=0.001)


def test_a_row_less_than_half_of_whose_n_grams_are_trained_on_is_not_named(rows, leaks):
    text = words(0)
    train = rows("train", {"t": " ".join([*text[:55], *words(1)])})  # 43 of 88

    assert leaks([train], [rows("held_out", {"h": " ".join(text)})]) == (0, [])


def test_short_rows_are_compared_as_a_whole_with_their_punctuation(rows, leaks):
    train = rows("train", {"t0": "What is 1 + 1?", "t1": "Say yes."})

    _, overlaps = leaks([train], [rows("held_out", {"h0": "what is  1 + 1?", "h1": "What is 1 - 1?", "h2": "Say"})])

    assert described(overlaps) == [("exact", "h0", "t0")]


def test_what_many_held_out_rows_share_is_their_template_and_no_leak(rows, leaks):
    template = " ".join(words(0, 60))
    train = rows("train", {f"t{place}": f"{template} asked {' '.join(words(place + 1, 20))}" for place in range(30)})
    asked = {f"h{place}": f"{template} asked {' '.join(words(place + 1000, 20))}" for place in range(30)}

    assert leaks([train], [rows("held_out", asked)]) == (0, [])
    count, overlaps = leaks([train], [rows("few", dict(list(asked.items())[:10]))])
    assert count == 10 and {each.kind for each in overlaps} == {"n-gram"}


def test_a_prompt_that_is_answered_otherwise_or_in_another_kind_is_found(rows, leaks):
    asked = {"role": "user", "content": "What is 1 + 1?"}

    def answer(text):
        return {"role": "assistant", "content": text}

    reported, long = {"role": "system", "content": "Be brief."}, " ".join(words(0))
    train = rows("train", {
        "said": [reported, asked, answer(long)],
        "earlier": [asked, answer("2"), {"role": "user", "content": "And 2 + 2?"}, answer("4")],
        "other": [reported, {**asked, "content": "What is 1 - 1?"}, answer("0")],
    }, Kind.CONVERSATIONS)  # fmt: skip
    exam = [
        rows("chats", {"c0": [asked, answer("Two.")], "c1": [reported, answer("Hi")]}, Kind.CONVERSATIONS),
        rows("pairs", {"p0": [asked]}, Kind.PREFERENCES),
        rows("texts", {"x0": "what is 1 + 1? ", "x1": "What is 1 * 1?"}),
    ]

    count, overlaps = leaks([train], exam)

    found = [("prompt", "c0", "said"), ("prompt", "p0", "said"), ("prompt", "x0", "said")]
    assert count == 3 and described(overlaps) == found


def test_every_pair_of_sets_is_compared_and_all_that_is_found_is_written(rows, leaks, tmp_path):
    texts = [" ".join(words(seed)) for seed in range(30)]
    first, second = (rows(name, {f"{name}{place}": text for place, text in enumerate(texts)}) for name in ("a", "b"))
    third = rows("c", {"c0": texts[3]})

    count, overlaps = leaks([first, second], [third, rows("d", dict(enumerated(texts)))])

    written = pq.read_table(tmp_path / "leakage.parquet").to_pylist()
    assert (count, len(written), len(overlaps)) == (31, 62, 20)  # rows, each of them in two training sets
    assert [(each.train_set, each.held_out_set) for each in overlaps[:2]] == [("a", "c"), ("b", "c")]
    assert [row["held_out_row_id"] for row in written[2:32]] == [row_id for row_id, _ in enumerated(texts)]


def enumerated(texts):
    return [(f"d{place}", text) for place, text in enumerate(texts)]


def test_a_row_that_says_nothing_but_what_many_say_is_compared_all_the_same(rows, leaks):
    text = " ".join(words(0, 60))
    train = rows("train", {"t": f"{text} and more"})

    count, overlaps = leaks([train], [rows("held_out", {f"h{place}": text for place in range(12)})])

    assert count == 12 and {each.kind for each in overlaps} == {"n-gram"}


def test_a_part_of_a_set_asks_what_its_own_rows_ask(rows):
    turns = [{"role": role, "content": f"{role} {place}"} for place in range(2) for role in ("user", "assistant")]
    written = rows("rows", {"a": turns, "b": turns[:1], "c": turns[1:2], "d": []}, Kind.CONVERSATIONS)
    (batch,) = pq.ParquetFile(written.file).iter_batches()

    whole = ["user 0\nassistant 0\nuser 1", "user 0", "", ""]
    assert prompts_of(batch).to_pylist() == whole
    assert prompts_of(batch.slice(1)).to_pylist() == whole[1:]

"""Prompts keep the tools that they are asked with; what does not fit is cut, counted, and refused if it is too much."""

import json

import pytest
from transformers import AutoTokenizer

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.data.tokens.tokenization import Tokenization
from tasks.evaluate.answers import Answer
from tasks.evaluate.rows import Lengths, _tokens, answered_tokens, distinct_prompts, draw, pair_tokens, prompt_tokens
from tasks.method import Input
from tasks.model.chat_template import HERMES
from tests import tiny


def pair(row_id, tool=None):
    tools = None if tool is None else json.dumps([{"type": "function", "function": {"name": tool}}])
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    return {"row_id": row_id, "prompt": [{"role": "user", "content": "sum"}], **answers, "kind": None, "tools": tools}


ROWS = [pair("a", "adder"), pair("b", "adder"), pair("c", "counter"), pair("d")]
SHORT = Lengths(max_length=128, max_new_tokens=32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(
        tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=HERMES)
    )


def pairs_of(rows, tokenizer):
    return pair_tokens(_tokens(Tokenization(kind=Kind.PREFERENCES, max_length=10**4), rows, tokenizer))


def answers_of(texts, finished=True):
    return [Answer(text=text, finished=finished, num_tokens=1) for text in texts]


def test_prompts_and_answers_are_read_with_their_tools_as_in_training(tokenizer):
    prompts = distinct_prompts(ROWS, 9)
    assert len(prompts) == len({prompt.name for prompt in prompts}) == 3  # with other tools they are others
    assert len(distinct_prompts(ROWS, 2)) == 2
    groups = [row.group for row in pairs_of(ROWS, tokenizer).chosen]
    assert groups == [prompts[0].name, prompts[0].name, prompts[1].name, prompts[2].name]
    trained = [row.input_ids for row in pairs_of([ROWS[0], ROWS[2], ROWS[3]], tokenizer).chosen]
    whole = Lengths(max_length=10**4, max_new_tokens=64)
    assert answered_tokens(prompts, answers_of(["chosen"] * 3), tokenizer, whole) == trained
    asked, _, _ = prompt_tokens(prompts, tokenizer, 10**4)
    assert asked == [row[: len(ids)] for row, ids in zip(trained, asked, strict=True)]
    assert ["adder" in tokenizer.decode(ids) for ids in asked] == [True, False, False]
    for finished, end in ((True, "<|im_end|>"), (False, "")):  # one that was cut off does not end its turn
        texts = ("an answer", "said sum, \ufffd", "")
        found = answered_tokens(prompts, answers_of(texts, finished), tokenizer, whole)
        starts = [tokenizer.decode(ids).partition("<|im_start|>assistant\n")[2] for ids in found]
        assert starts == [text + end for text in texts]


def long_pair(row_id, prompt, chosen, rejected=3):
    """A pair of so many words."""
    sides = {"chosen": tiny.sentence(2, chosen), "rejected": tiny.sentence(3, rejected)}
    return {
        "row_id": row_id,
        "prompt": [{"role": "user", "content": f"{row_id} {tiny.sentence(1, prompt)} end of {row_id}"}],
        **{side: [{"role": "assistant", "content": text}] for side, text in sides.items()},
        "kind": None,
    }


@pytest.fixture
def drawn(tmp_path, tokenizer):
    """Draws from held-out rows of each kind."""

    def draw_from(pairs, lengths=SHORT, **more):
        rows = {"text": tiny.text_rows(4), "conversations": tiny.conversation_rows(4), "pairs": pairs, **more}
        inputs = {
            slot: Input(name=slot, kind=Kind.ROWS, fingerprint=slot, path=tiny.write_rows(tmp_path / slot, held, held))
            for slot, held in rows.items()
        }
        return draw(inputs, tokenizer, num_rows=99, num_prompts=99, num_questions=99, lengths=lengths, seed=0)

    return draw_from


def test_held_out_prompts_are_asked_in_the_place_of_those_of_the_pairs(drawn):
    of_pairs, asked = drawn(ROWS), tiny.prompt_rows(5)
    rows = drawn(ROWS, prompts=asked)
    assert {prompt.messages[0]["content"] for prompt in rows.prompts} == {row["prompt"][0]["content"] for row in asked}
    assert rows.pairs == of_pairs.pairs and rows.prompts != of_pairs.prompts
    assert len(rows.prompt_ids) == 5


def test_pairs_with_long_prompts_are_measured_with_their_whole_answers(drawn, tokenizer):
    """Their prompts fill max_length: 18 of 20 were dropped without a word."""
    pairs = [long_pair(f"r{index}", 200 if index > 1 else 5, 4) for index in range(20)]
    rows = drawn(pairs)
    assert len(rows.pairs.chosen) == 20
    assert rows.lost["pairs/prompts_cut"] == rows.lost["asked/prompts_cut"] == 18
    assert rows.lost["pairs/rows_dropped"] == rows.lost["pairs/rows_cut"] == 0
    for row, scored in zip(pairs, sorted(rows.pairs.chosen, key=lambda each: int(each.row_id[1:])), strict=True):
        assert len(scored.input_ids) <= 128
        parts = [[t for t, counts in zip(scored.input_ids, scored.mask, strict=True) if counts == of] for of in (0, 1)]
        before, answered = map(tokenizer.decode, parts)
        assert answered == row["chosen"][0]["content"] + "<|im_end|>"
        assert before.endswith(f"end of {row['row_id']}<|im_end|>\n<|im_start|>assistant\n")


def test_prompts_keep_their_end_and_leave_the_capacity_of_an_answer(drawn, tokenizer):
    rows = drawn([long_pair(f"r{index}", 200, 4) for index in range(4)])
    assert [len(ids) for ids in rows.prompt_ids] == [96] * 4
    for word in ("yes", "no"):
        tokens = answered_tokens(rows.prompts, answers_of([word] * 4), tokenizer, SHORT)
        for prompt, ids in zip(rows.prompt_ids, tokens, strict=True):
            assert ids[:96] == prompt
            assert tokenizer.decode(ids[96:]) == f"{word}<|im_end|>"
    with pytest.raises(ConfigError, match=r"max_new_tokens=64 of evaluate leaves no capacity for a prompt in max"):
        Lengths(max_length=64, max_new_tokens=64)


def test_an_answer_that_becomes_longer_as_text_takes_capacity_from_the_prompt(tokenizer):
    prompts = distinct_prompts([long_pair("r", 200, 1)], 1)
    text = "\ufffd" * 40  # each a token as generated, three as text
    [ids] = answered_tokens(prompts, answers_of([text]), tokenizer, Lengths(max_length=160, max_new_tokens=40))
    assert len(ids) == 160
    assert tokenizer.decode(ids).endswith("assistant\n" + text + "<|im_end|>")


def limited(max_length=128, max_new_tokens=32, **shares):
    return Lengths(max_length=max_length, max_new_tokens=max_new_tokens, **shares)


def test_answers_and_documents_that_are_too_long_are_cut_at_their_end_and_counted(drawn):
    rows = drawn([long_pair(f"r{index}", 200, 200 if index % 2 else 4) for index in range(4)])
    assert rows.lost["pairs/rows_cut"] == 2
    cut = [scored for scored in rows.pairs.chosen if scored.row_id in ("r1", "r3")]
    assert [(len(each.input_ids), sum(each.mask)) for each in cut] == [(128, 64)] * 2
    whole_prompts = [long_pair(f"r{index}", 5, 200 if index % 2 else 4) for index in range(4)]
    drawn(whole_prompts, limited(max_cut=0.5))
    with pytest.raises(DataError, match=r"2 of 4 held-out rows of 'pairs' \(pairs\) are cut in their answers with"):
        drawn(whole_prompts, limited(max_cut=0.4))
    rows = drawn([long_pair("r", 5, 4)], limited(max_length=8, max_new_tokens=2, max_cut=1))
    assert rows.lost["text/rows_cut"] == 4
    assert {len(row.input_ids) for row in rows.text} == {8}


def test_too_many_prompts_without_their_beginning_are_refused(drawn):
    """All of them could be cut without a word."""
    pairs = [long_pair(f"r{index}", 200 if index % 2 else 5, 4) for index in range(4)]
    drawn(pairs, limited(max_cut=0.5))
    cut = r"2 of 4 held-out rows of 'pairs' \(pairs\) are cut in their prompts with max_length=128.*raise max_length or"
    with pytest.raises(DataError, match=cut):
        drawn(pairs, limited(max_cut=0.4))
    rows = drawn(pairs, limited(max_length=2000, max_cut=0))
    assert rows.lost["pairs/prompts_cut"] == rows.lost["asked/prompts_cut"] == 0
    no_capacity = limited(max_length=2000, max_new_tokens=2000 - max(map(len, rows.prompt_ids)) + 1, max_cut=0.2)
    asked = r"2 of 8 prompts and questions have more than the [0-9]+ tokens .* or lower max_new_tokens"
    with pytest.raises(DataError, match=asked):
        drawn(pairs, no_capacity)


def test_too_many_dropped_rows_are_refused_with_the_remedy(drawn):
    """Two answers that differ after the cut alone are equal within it."""
    same = tiny.sentence(2, 300)
    pairs = [long_pair(f"r{index}", 5, 4) for index in range(18)]
    for index in range(2):
        answers = {side: [{"role": "assistant", "content": f"{same} {side}"}] for side in ("chosen", "rejected")}
        pairs.append({**long_pair(f"s{index}", 5, 4), **answers})
    rows = drawn(pairs, limited(max_dropped=0.1))
    assert rows.lost["pairs/rows_dropped"] == 2
    assert len(rows.pairs.chosen) == 18
    remedy = r"2 of 20 .* are dropped \(equal_after_the_cut\) .* raise max_length or max_dropped of evaluate"
    with pytest.raises(DataError, match=remedy):
        drawn(pairs, limited(max_dropped=0.05))

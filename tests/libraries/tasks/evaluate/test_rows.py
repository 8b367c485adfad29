"""Prompts keep the tools that they are asked with."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.chat_template import HERMES
from tasks.evaluate.answers import Answer
from tasks.evaluate.rows import (
    Lengths,
    Pairs,
    Rows,
    _tokens,
    answered_tokens,
    distinct_prompts,
    draw,
    pair_tokens,
    prompt_tokens,
)
from tasks.method import Input
from tests import tiny

SUM = [{"role": "user", "content": "sum"}]


def pair(row_id: str, tool: str | None = None) -> dict[str, object]:
    tools = None if tool is None else json.dumps([{"type": "function", "function": {"name": tool}}])
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    return {"row_id": row_id, "prompt": SUM, **answers, "kind": None, "tools": tools}


ROWS = [pair("a", "adder"), pair("b", "adder"), pair("c", "counter"), pair("d")]


WHOLE = Lengths(max_length=10**4, max_new_tokens=64)


def pairs_of(rows: list[dict[str, object]], tokenizer: PreTrainedTokenizerBase) -> Pairs:
    return pair_tokens(_tokens(Kind.PREFERENCES, rows, tokenizer, 10**4))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory: Path = tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=HERMES)
    return AutoTokenizer.from_pretrained(directory)


def test_prompts_with_other_tools_are_others(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = distinct_prompts(ROWS, 9)
    assert len(prompts) == len({prompt.name for prompt in prompts}) == 3
    assert len(distinct_prompts(ROWS, 2)) == 2
    groups = [row.group for row in pairs_of(ROWS, tokenizer).chosen]
    assert groups == [prompts[0].name, prompts[0].name, prompts[1].name, prompts[2].name]


def test_prompts_and_answers_are_read_with_their_tools_as_in_training(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = distinct_prompts(ROWS, 9)
    trained = pairs_of([ROWS[0], ROWS[2], ROWS[3]], tokenizer).chosen
    asked, _ = prompt_tokens(prompts, tokenizer, 10**4)
    answers = [Answer(text="chosen", finished=True, num_tokens=1)] * 3
    assert answered_tokens(prompts, answers, tokenizer, WHOLE) == [row.input_ids for row in trained]
    assert asked == [row.input_ids[: len(ids)] for row, ids in zip(trained, asked, strict=True)]
    assert ["adder" in tokenizer.decode(ids) for ids in asked] == [True, False, False]


def long_pair(row_id: str, prompt: int, chosen: int, rejected: int = 3) -> dict[str, object]:
    """A pair of so many words."""
    sides = {"chosen": tiny.sentence(2, chosen), "rejected": tiny.sentence(3, rejected)}
    return {
        "row_id": row_id,
        "prompt": [{"role": "user", "content": f"{row_id} {tiny.sentence(1, prompt)} end of {row_id}"}],
        **{side: [{"role": "assistant", "content": text}] for side, text in sides.items()},
        "kind": None,
    }


def drawn(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[dict[str, object]],
    lengths: Lengths,
    **more: list[dict[str, object]],
) -> Rows:
    rows = {"text": tiny.text_rows(4), "conversations": tiny.conversation_rows(4), "pairs": pairs, **more}
    inputs = {
        slot: Input(name=slot, kind=Kind.ROWS, fingerprint=slot, path=tiny.write_rows(directory / slot, held, held))
        for slot, held in rows.items()
    }
    return draw(inputs, tokenizer, num_rows=99, num_prompts=99, num_questions=99, lengths=lengths, seed=0)


def test_held_out_prompts_are_asked_in_the_place_of_those_of_the_pairs(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    lengths = Lengths(max_length=128, max_new_tokens=32)
    of_pairs = drawn(tmp_path, tokenizer, ROWS, lengths)
    asked = tiny.prompt_rows(5)
    rows = drawn(tmp_path, tokenizer, ROWS, lengths, prompts=asked)
    assert {prompt.messages[0]["content"] for prompt in rows.prompts} == {row["prompt"][0]["content"] for row in asked}  # type: ignore[index]
    assert rows.pairs == of_pairs.pairs and rows.prompts != of_pairs.prompts
    assert len(rows.prompt_ids) == 5


def test_pairs_with_long_prompts_are_measured_with_their_whole_answers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Their prompts fill max_length: 18 of 20 were dropped without a word."""
    pairs = [long_pair(f"r{index}", 200 if index > 1 else 5, 4) for index in range(20)]
    lengths = Lengths(max_length=128, max_new_tokens=32)
    rows = drawn(tmp_path, tokenizer, pairs, lengths)
    assert len(rows.pairs.chosen) == 20
    assert rows.lost["pairs/prompts_cut"] == rows.lost["asked/prompts_cut"] == 18
    assert rows.lost["pairs/rows_dropped"] == rows.lost["pairs/rows_cut"] == 0
    for row, scored in zip(pairs, sorted(rows.pairs.chosen, key=lambda each: int(each.row_id[1:])), strict=True):
        assert len(scored.input_ids) <= 128
        answered = tokenizer.decode([t for t, counts in zip(scored.input_ids, scored.mask, strict=True) if counts])
        assert answered == row["chosen"][0]["content"] + "<|im_end|>"  # type: ignore[index]
        before = tokenizer.decode([t for t, counts in zip(scored.input_ids, scored.mask, strict=True) if not counts])
        assert before.endswith(f"end of {row['row_id']}<|im_end|>\n<|im_start|>assistant\n")


def test_prompts_keep_their_end_and_leave_the_capacity_of_an_answer(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    lengths = Lengths(max_length=128, max_new_tokens=32)
    rows = drawn(tmp_path, tokenizer, [long_pair(f"r{index}", 200, 4) for index in range(4)], lengths)
    assert [len(ids) for ids in rows.prompt_ids] == [96] * 4
    for word in ("yes", "no"):
        answers = [Answer(text=word, finished=True, num_tokens=1)] * 4
        tokens = answered_tokens(rows.prompts, answers, tokenizer, lengths)
        for prompt, ids in zip(rows.prompt_ids, tokens, strict=True):
            assert ids[:96] == prompt
            assert tokenizer.decode(ids[96:]) == f"{word}<|im_end|>"


def test_an_answer_that_was_cut_off_does_not_end_its_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = distinct_prompts(ROWS, 3)
    texts = ("an answer", "said sum, \ufffd", "")
    for finished, end in ((True, "<|im_end|>"), (False, "")):
        answers = [Answer(text=text, finished=finished, num_tokens=1) for text in texts]
        found = [tokenizer.decode(ids) for ids in answered_tokens(prompts, answers, tokenizer, WHOLE)]
        starts = [text.partition("<|im_start|>assistant\n")[2] for text in found]
        assert starts == [text + end for text in texts]


def test_an_answer_that_becomes_longer_as_text_takes_capacity_from_the_prompt(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    prompts = distinct_prompts([long_pair("r", 200, 1)], 1)
    answer = Answer(text="\ufffd" * 40, finished=True, num_tokens=1)  # a token as generated, three as text
    [ids] = answered_tokens(prompts, [answer], tokenizer, Lengths(max_length=160, max_new_tokens=40))
    assert len(ids) == 160
    assert tokenizer.decode(ids).endswith("assistant\n" + answer.text + "<|im_end|>")


def test_answers_that_are_too_long_are_cut_at_their_end_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    pairs = [long_pair(f"r{index}", 200, 200 if index % 2 else 4) for index in range(4)]
    lengths = Lengths(max_length=128, max_new_tokens=32)
    rows = drawn(tmp_path, tokenizer, pairs, lengths)
    assert rows.lost["pairs/rows_cut"] == 2
    cut = [scored for scored in rows.pairs.chosen if scored.row_id in ("r1", "r3")]
    assert [(len(each.input_ids), sum(each.mask)) for each in cut] == [(128, 64)] * 2
    whole_prompts = [long_pair(f"r{index}", 5, 200 if index % 2 else 4) for index in range(4)]
    drawn(tmp_path, tokenizer, whole_prompts, Lengths(max_length=128, max_new_tokens=32, max_cut=0.5))
    with pytest.raises(DataError, match=r"2 of 4 held-out rows of 'pairs' \(pairs\) are cut in their answers with"):
        drawn(tmp_path, tokenizer, whole_prompts, Lengths(max_length=128, max_new_tokens=32, max_cut=0.4))


def test_too_many_prompts_without_their_beginning_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """All of them could be cut without a word."""
    pairs = [long_pair(f"r{index}", 200 if index % 2 else 5, 4) for index in range(4)]
    drawn(tmp_path, tokenizer, pairs, Lengths(max_length=128, max_new_tokens=32, max_cut=0.5))
    cut = r"2 of 4 held-out rows of 'pairs' \(pairs\) are cut in their prompts with max_length=128.*raise max_length or"
    with pytest.raises(DataError, match=cut):
        drawn(tmp_path, tokenizer, pairs, Lengths(max_length=128, max_new_tokens=32, max_cut=0.4))
    rows = drawn(tmp_path, tokenizer, pairs, Lengths(max_length=2000, max_new_tokens=32, max_cut=0))
    assert rows.lost["pairs/prompts_cut"] == rows.lost["asked/prompts_cut"] == 0
    longest = max(map(len, rows.prompt_ids))
    no_capacity = Lengths(max_length=2000, max_new_tokens=2000 - longest + 1, max_cut=0.2)
    asked = r"2 of 8 prompts and questions have more than the [0-9]+ tokens .* or lower max_new_tokens"
    with pytest.raises(DataError, match=asked):
        drawn(tmp_path, tokenizer, pairs, no_capacity)


def test_too_many_dropped_rows_are_refused_with_the_remedy(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Two answers that differ after the cut alone are equal within it."""
    same = tiny.sentence(2, 300)
    pairs = [long_pair(f"r{index}", 5, 4) for index in range(18)]
    for index in range(2):
        answers = {side: [{"role": "assistant", "content": f"{same} {side}"}] for side in ("chosen", "rejected")}
        pairs.append({**long_pair(f"s{index}", 5, 4), **answers})
    rows = drawn(tmp_path, tokenizer, pairs, Lengths(max_length=128, max_new_tokens=32, max_dropped=0.1))
    assert rows.lost["pairs/rows_dropped"] == 2
    assert len(rows.pairs.chosen) == 18
    remedy = r"2 of 20 .* are dropped \(equal_after_the_cut\) .* raise max_length or max_dropped of evaluate"
    with pytest.raises(DataError, match=remedy):
        drawn(tmp_path, tokenizer, pairs, Lengths(max_length=128, max_new_tokens=32, max_dropped=0.05))


def test_long_documents_are_counted_and_refused_only_where_nothing_is_left(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    lengths = Lengths(max_length=8, max_new_tokens=2, max_cut=1)
    rows = drawn(tmp_path, tokenizer, [long_pair("r", 5, 4)], lengths)
    assert rows.lost["text/rows_cut"] == 4
    assert {len(row.input_ids) for row in rows.text} == {8}


def test_no_capacity_for_a_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens=64 of evaluate leaves no capacity for a prompt in max"):
        Lengths(max_length=64, max_new_tokens=64)

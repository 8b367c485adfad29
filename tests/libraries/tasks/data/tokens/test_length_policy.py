"""What becomes of rows that are too long: each way changes the tokens, and each is counted and named."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from lineage.errors import ConfigError, DataError
from tasks.data.kinds import IGNORED, RowOutcome
from tasks.data.tokens.tokenization import TooLong
from tasks.data.tokens.tokenize_rows import keep
from tasks.dpo import DPO
from tasks.reward_model import RewardModel
from tasks.sft import SFT
from tests import tiny
from tests.libraries.tasks.data.tokens.tokens import token_rows, tokenization, tokenized

LONG = {
    "row_id": "long",
    "messages": [
        {"role": "user", "content": tiny.sentence(0, 30)},
        {"role": "assistant", "content": tiny.sentence(1, 6)},
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": tiny.sentence(2, 6)},
    ],
}
PAIR = {
    "row_id": "pair",
    "prompt": [{"role": "user", "content": tiny.sentence(0, 30)}],
    "chosen": [{"role": "assistant", "content": tiny.sentence(1, 6)}],
    "rejected": [{"role": "assistant", "content": tiny.sentence(2, 12)}],
}


def test_the_prompt_is_cut_from_its_beginning_and_no_answer_loses_a_token(tokenizer: PreTrainedTokenizerBase) -> None:
    (whole,) = token_rows([LONG], tokenizer)
    length = whole.outcome.length - 10
    (row,) = token_rows([LONG], tokenizer, length, too_long="cut_prompt")
    assert row.columns == {name: ids[10:] for name, ids in whole.columns.items()}
    assert (row.outcome.prompt_cut, row.outcome.cut, row.outcome.trained) == (True, False, whole.outcome.trained)


@pytest.mark.parametrize("given", [LONG, PAIR], ids=["conversation", "pair"])
def test_what_begins_every_text_stays_when_the_prompt_is_cut(
    tokenizer: PreTrainedTokenizerBase, given: dict[str, object]
) -> None:
    (whole,) = token_rows([given], tokenizer)
    column = "input_ids" if "messages" in given else "prompt_ids"
    tokenizer.bos_token = "<|im_start|>"
    try:
        (row,) = token_rows([given], tokenizer, whole.outcome.length - 10, too_long="cut_prompt")
        (short,) = token_rows([given], tokenizer, max_prompt_length=8)
    finally:
        tokenizer.bos_token = None
    ids = whole.columns[column]
    assert row.columns[column] == [ids[0], *ids[11:]]
    prompt = whole.outcome.length - len(whole.columns["rejected_ids"]) if given is PAIR else whole.columns["labels"]
    num_prompt = prompt if isinstance(prompt, int) else next(i for i, label in enumerate(prompt) if label != IGNORED)
    assert short.columns[column] == [ids[0], *ids[num_prompt - 7 :]]


def test_a_row_whose_answers_alone_are_too_long_is_dropped_when_prompts_are_cut(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for kind in ([LONG], [PAIR]):
        (row,) = token_rows(kind, tokenizer, 12, too_long="cut_prompt")
        assert (row.outcome.dropped, row.outcome.prompt_cut) == ("answer_too_long", False)


def test_each_way_is_counted_and_named(directory: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [*tiny.conversation_rows(3), LONG]
    length = token_rows(rows, tokenizer)[-1].outcome.length
    ways: tuple[TooLong | None, ...] = (None, "cut_answer", "cut_prompt", "drop")
    found = {way: tokenized(rows, directory, tmp_path, length - 9, too_long=way) for way in ways}
    assert found[None].columns == found["cut_answer"].columns != found["cut_prompt"].columns
    assert found["cut_answer"].stats.cut.row_ids == ["long"]
    assert found["cut_prompt"].stats.prompts_cut.row_ids == ["long"]
    assert found["cut_prompt"].metrics["prompts_cut"] == 1
    assert found["drop"].stats.dropped["too_long"].row_ids == ["long"]
    assert [len(each) for each in found.values()] == [4, 4, 4, 3]
    longest = found["drop"].stats.quantiles["max"]
    assert longest == length and {each.stats.quantiles["max"] for each in found.values()} == {longest}  # before the cut


def test_refused_rows_are_named_with_their_lengths_and_leave_nothing_in_the_cache(
    directory: Path, tmp_path: Path
) -> None:
    rows = [{**LONG, "row_id": f"r{index}"} for index in range(23)]
    with pytest.raises(DataError) as error:
        tokenized(
            [*tiny.conversation_rows(2), *rows], directory, tmp_path / "rows", 60, too_long="refuse",
            cache_dir=tmp_path / "cache",
        )  # fmt: skip
    assert str(error.value).startswith("23 of 25 rows are longer than max_length=60: r0 (")
    assert ", r19 (" in str(error.value) and " and 3 more; raise max_length" in str(error.value)
    assert not list((tmp_path / "cache" / "tokens").glob("*/account.json"))
    with pytest.raises(DataError):
        tokenized(
            [*tiny.conversation_rows(2), *rows], directory, tmp_path / "rows", 60, too_long="refuse",
            cache_dir=tmp_path / "cache",
        )  # fmt: skip


@pytest.mark.parametrize("method", [SFT, DPO, RewardModel])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_the_plan(
    method: type[SFT | DPO | RewardModel],
) -> None:
    with pytest.raises(ConfigError, match="max_prompt_length=64 leaves no room for an answer in max_length=64"):
        method(max_length=64, max_prompt_length=64)
    options = method(max_length=64, max_prompt_length=63, too_long="drop").tokenization()
    assert (options.max_prompt_length, options.too_long) == (63, "drop")
    assert not {"too_long", "max_prompt_length", "packing"} & method().recipe().keys()  # old outputs stay current


@given(
    length=st.integers(1, 40), prompt=st.integers(1, 40), max_length=st.integers(1, 40),
    longest=st.none() | st.integers(1, 39), way=st.sampled_from(["cut_answer", "cut_prompt", "drop"]),
    head=st.integers(0, 1),
)  # fmt: skip
def test_what_remains_fits_and_is_the_end_of_the_prompt_and_the_beginning_of_the_answer(
    length: int, prompt: int, max_length: int, longest: int | None, way: TooLong, head: int
) -> None:
    prompt = min(prompt, length)
    longest = longest if longest is None or longest < max_length else None
    options = tokenization(tiny.conversation_rows(1), max_length, way, longest)
    outcome = RowOutcome(row_id="a", length=length)
    ids = keep(options, outcome, prompt, head).of(list(range(length)))
    if outcome.dropped:
        return
    assert len(ids) <= max_length
    assert ids[:head] == list(range(length))[: min(head, max_length)]
    removed = length - len(ids) if not outcome.cut else ids[head] - head if len(ids) > head else 0
    assert ids[head:] == list(range(removed + head, removed + len(ids)))
    assert outcome.prompt_cut == (removed > 0) or len(ids) <= head
    kept = [place for place in ids if place < prompt]
    assert kept or not prompt  # an answer always has a prompt
    if longest:
        assert len(kept) <= max(longest, head)

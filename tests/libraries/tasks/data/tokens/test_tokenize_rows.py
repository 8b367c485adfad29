"""Which tokens are trained, and that no row is lost without being named."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lineage.errors import ConfigError, DataError
from tasks.data.kinds import IGNORED, TokenRow
from tasks.data.tokens.cache import show
from tasks.data.tokens.tokenize_rows import require_chat_template
from tests import tiny
from tests.libraries.tasks.data.tokens.tokens import rows_input, token_rows, tokenized

CONVERSATION = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "the list"},
    {"role": "assistant", "content": "returns items"},
    {"role": "user", "content": "sum"},
    {"role": "assistant", "content": "adds\nvalue"},
]


def trained_text(tokenizer: PreTrainedTokenizerBase, row: TokenRow) -> str:
    return tokenizer.decode([label for label in row.columns["labels"] if label != IGNORED])


def test_labels_are_every_assistant_turn_with_its_end_and_nothing_else(
    directory: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [{"row_id": "a", "messages": CONVERSATION}]
    (row,) = token_rows(rows, tokenizer)
    assert trained_text(tokenizer, row) == "returns items<|im_end|>adds\nvalue<|im_end|>"
    assert tokenized(rows, directory, tmp_path, 512).stats.samples == [
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nthe list<|im_end|>\n<|im_start|>assistant\n"
        "⟦returns items<|im_end|>⟧\n<|im_start|>user\nsum<|im_end|>\n<|im_start|>assistant\n⟦adds\nvalue<|im_end|>⟧"
    ]
    for label, token in zip(row.columns["labels"], row.columns["input_ids"], strict=True):
        assert label in (IGNORED, token)


def test_a_model_without_a_chat_template_is_refused_naming_the_field(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(ConfigError, match=r"'corpus' has no chat template.*chat_template=chatml"):
        require_chat_template(tokenizer, rows_input(Path()))
    with pytest.raises(ConfigError, match=r"has no chat template.*chat_template=chatml"):
        token_rows(tiny.conversation_rows(1), tokenizer)


def test_long_conversations_are_cut_and_those_without_an_answer_left_are_dropped(
    directory: Path, tmp_path: Path
) -> None:
    rows = [*tiny.conversation_rows(3), {"row_id": "long", "messages": _conversation(4, 200)}]
    rows += [{"row_id": "no answer left", "messages": _conversation(200, 4)}]
    result = tokenized(rows, directory, tmp_path, 90)
    assert result.stats.cut.row_ids == ["long", "no answer left"]
    assert result.stats.dropped["nothing_to_train"].row_ids == ["no answer left"]
    assert len(result) + 1 == result.stats.num_rows == 5
    assert max(len(ids) for ids in result.columns["input_ids"]) == 90


def test_pairs_that_are_equal_after_the_cut_are_dropped(directory: Path, tmp_path: Path) -> None:
    answer = tiny.sentence(1, 60)
    tail = {"row_id": "tail", "prompt": _user("sum"), "chosen": _answer(answer + " map"), "rejected": _answer(answer)}
    long_prompt = {"row_id": "prompt", "prompt": _user(answer), "chosen": _answer("sum"), "rejected": _answer("map")}
    result = tokenized([*tiny.preference_rows(4), tail, long_prompt], directory, tmp_path, 80)
    assert result.stats.cut.row_ids == ["tail", "prompt"]
    assert {reason: named.row_ids for reason, named in result.stats.dropped.items()} == {
        "equal_after_the_cut": ["tail"],
        "nothing_to_train": ["prompt"],
    }
    assert len(result) == 4
    assert result.metrics["rows_dropped"] == 2


def test_pairs_split_where_the_answer_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    pair = {"row_id": "p", "prompt": _user("sum"), "chosen": _answer("adds"), "rejected": _answer("map")}
    (row,) = token_rows([pair], tokenizer)
    assert [tokenizer.decode(row.columns[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")] == [
        "<|im_start|>user\nsum<|im_end|>\n<|im_start|>assistant\n", "adds<|im_end|>", "map<|im_end|>",
    ]  # fmt: skip
    assert (row.outcome.trained, row.outcome.tokens) == (
        len(row.columns["chosen_ids"]) + len(row.columns["rejected_ids"]),
        len(row.columns["chosen_ids"]) + len(row.columns["rejected_ids"]) + 2 * len(row.columns["prompt_ids"]),
    )


def test_a_prompt_with_answers_of_its_own_ends_where_the_last_answer_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = [*_user("sum"), *_answer("adds"), *_user("list")]
    pair = {"row_id": "p", "prompt": prompt, "chosen": _answer("items"), "rejected": _answer("map")}
    (row,) = token_rows([pair], tokenizer)
    assert tokenizer.decode(row.columns["prompt_ids"]).endswith("list<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(row.columns["chosen_ids"]) == "items<|im_end|>"


def test_nothing_to_train_is_refused_before_training(directory: Path, tmp_path: Path) -> None:
    result = tokenized(tiny.conversation_rows(3), directory, tmp_path, 4)
    with pytest.raises(DataError, match="no row of 'corpus' has a trained token within max_length=4: all 3 rows"):
        show(result, rows_input(tmp_path), 4)


def test_texts_that_fill_no_chunk_ask_for_a_shorter_one(directory: Path, tmp_path: Path) -> None:
    result = tokenized(tiny.text_rows(3), directory, tmp_path, 4000)
    length = sum(row.outcome.length for row in token_rows(tiny.text_rows(3), AutoTokenizer.from_pretrained(directory)))
    with pytest.raises(DataError) as error:
        show(result, rows_input(tmp_path), 4000)
    assert str(error.value) == (
        f"all texts of 'corpus' together are {length} tokens, less than one chunk of max_length=4000; lower max_length,"
        " or give more text"
    )


def test_what_gets_loss_is_logged(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*tiny.conversation_rows(4), {"row_id": "no answer left", "messages": _conversation(200, 4)}]
    with caplog.at_level("INFO"):
        show(tokenized(rows, directory, tmp_path, 90), rows_input(tmp_path), 90)
    assert "rows=5 rows_cut=1 rows_dropped=1 trained_tokens_percent=" in caplog.text
    assert "length_p50=" in caplog.text and "length_max=" in caplog.text
    assert "rows_dropped=1 reason=nothing_to_train row_ids=no answer left" in caplog.text
    assert caplog.text.count("sample (trained tokens in ⟦ ⟧): <|im_start|>user") == 3


def test_at_most_twenty_rows_are_named_in_the_log(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"row_id": f"r{index}", "messages": _conversation(2, 200)} for index in range(23)]
    with caplog.at_level("INFO"):
        show(tokenized(rows, directory, tmp_path, 90), rows_input(tmp_path), 90)
    assert "rows_cut=23 max_length=90 row_ids=r0," in caplog.text
    assert ",r19 and 3 more" in caplog.text


def _user(content: str) -> list[tiny.Message]:
    return [{"role": "user", "content": content}]


def _answer(content: str) -> list[tiny.Message]:
    return [{"role": "assistant", "content": content}]


def _conversation(question_words: int, answer_words: int) -> list[tiny.Message]:
    return [*_user(tiny.sentence(0, question_words)), *_answer(tiny.sentence(1, answer_words))]

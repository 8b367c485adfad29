"""Which tokens are trained, and that no row is lost without being named."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.data.tokens.completion_mask import IGNORED
from tasks.data.tokens.tokenize_rows import (
    require_chat_template,
    tokenize_conversations,
    tokenize_preferences,
    tokenize_text,
)
from tasks.data.tokens.tokenized_rows import TokenizedRows, show
from tasks.method import Input
from tests import tiny

CONVERSATION = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "the list"},
    {"role": "assistant", "content": "returns items"},
    {"role": "user", "content": "sum"},
    {"role": "assistant", "content": "adds\nvalue"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def rows_input() -> Input:
    return Input(name="corpus", kind=Kind.TEXT, fingerprint="f" * 64, path=Path())


def trained_text(tokenizer: PreTrainedTokenizerBase, rows: TokenizedRows, row: int) -> str:
    return tokenizer.decode([label for label in rows.columns["labels"][row] if label != IGNORED])


def test_labels_are_every_assistant_turn_with_its_end_and_nothing_else(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = tokenize_conversations([{"row_id": "a", "messages": CONVERSATION}], tokenizer, 512)
    assert trained_text(tokenizer, rows, 0) == "returns items<|im_end|>adds\nvalue<|im_end|>"
    assert rows.samples == [
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nthe list<|im_end|>\n<|im_start|>assistant\n"
        "⟦returns items<|im_end|>⟧\n<|im_start|>user\nsum<|im_end|>\n<|im_start|>assistant\n⟦adds\nvalue<|im_end|>⟧"
    ]
    for label, token in zip(rows.columns["labels"][0], rows.columns["input_ids"][0], strict=True):
        assert label in (IGNORED, token)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    rewriting = "{% for m in messages %}{{ m['content'] if loop.last else m['content'][:2] }}|{% endfor %}"
    original, tokenizer.chat_template = tokenizer.chat_template, rewriting
    try:
        with pytest.raises(ConfigError, match="not prefix-stable: on row a"):
            tokenize_conversations([{"row_id": "a", "messages": CONVERSATION}], tokenizer, 512)
    finally:
        tokenizer.chat_template = original


def test_a_row_that_the_template_refuses_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    original, tokenizer.chat_template = tokenizer.chat_template, "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(DataError, match=r"row a: .*roles must alternate"):
            tokenize_conversations([{"row_id": "a", "messages": CONVERSATION}], tokenizer, 512)
    finally:
        tokenizer.chat_template = original


def test_a_model_without_a_chat_template_is_refused_naming_the_field(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(ConfigError, match=r"'corpus' has no chat template.*chat_template=chatml"):
        require_chat_template(tokenizer, rows_input())


def test_long_conversations_are_cut_and_those_without_an_answer_left_are_dropped(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = [*tiny.conversation_rows(3), {"row_id": "long", "messages": _conversation(4, 200)}]
    rows += [{"row_id": "no answer left", "messages": _conversation(200, 4)}]
    result = tokenize_conversations(rows, tokenizer, 90)
    assert result.cut == ["long", "no answer left"]
    assert result.dropped == ["no answer left"]
    assert len(result) + len(result.dropped) == result.num_rows == 5
    assert max(len(ids) for ids in result.columns["input_ids"]) == 90


def test_pairs_that_are_equal_after_the_cut_are_dropped(tokenizer: PreTrainedTokenizerBase) -> None:
    answer = tiny.sentence(1, 60)
    tail = {"row_id": "tail", "prompt": _user("sum"), "chosen": _answer(answer + " map"), "rejected": _answer(answer)}
    long_prompt = {"row_id": "prompt", "prompt": _user(answer), "chosen": _answer("sum"), "rejected": _answer("map")}
    result = tokenize_preferences([*tiny.preference_rows(4), tail, long_prompt], tokenizer, 80)
    assert result.dropped == ["tail", "prompt"] == result.cut
    assert len(result) + len(result.dropped) == result.num_rows == 6
    assert result.metrics["rows_dropped"] == 2


def test_pairs_split_where_the_answer_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    pair = {"row_id": "p", "prompt": _user("sum"), "chosen": _answer("adds"), "rejected": _answer("map")}
    columns = tokenize_preferences([pair], tokenizer, 80).columns
    assert tokenizer.decode(columns["prompt_ids"][0]) == "<|im_start|>user\nsum<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(columns["chosen_ids"][0]) == "adds<|im_end|>"
    assert tokenizer.decode(columns["rejected_ids"][0]) == "map<|im_end|>"


def test_documents_are_joined_and_cut_in_chunks_and_the_rest_is_reported(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"row_id": str(i), "text": text} for i, text in enumerate(["sum adds", "map applies", "list", "new"])]
    stream = "sum adds<|endoftext|>map applies<|endoftext|>list<|endoftext|>new<|endoftext|>"
    ids = tokenizer(stream, add_special_tokens=False)["input_ids"]
    length = ids.index(tokenizer.convert_tokens_to_ids("<|endoftext|>")) + 2  # one token of the second document
    result = tokenize_text(rows[:2], tokenizer, length)
    assert result.columns["input_ids"] == [ids[:length]]
    assert (result.cut, result.dropped) == (["1"], [])
    result = tokenize_text(rows, tokenizer, len(ids) - 4)
    assert result.columns["labels"] == [ids[: len(ids) - 4]]
    assert result.cut + result.dropped == ["2", "3"] or result.dropped == ["2", "3"]
    assert result.metrics["trained_tokens_percent"] == 100


def test_nothing_to_train_is_refused_before_training(tokenizer: PreTrainedTokenizerBase) -> None:
    result = tokenize_conversations(tiny.conversation_rows(3), tokenizer, 4)
    with pytest.raises(DataError, match="no row of 'corpus' has a trained token within max_length=4: all 3 rows"):
        show(result, rows_input(), 4)


def test_what_gets_loss_is_logged(tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*tiny.conversation_rows(4), {"row_id": "no answer left", "messages": _conversation(200, 4)}]
    with caplog.at_level("INFO"):
        show(tokenize_conversations(rows, tokenizer, 90), rows_input(), 90)
    assert "rows=5 rows_cut=1 rows_dropped=1 trained_tokens_percent=" in caplog.text
    assert "row_ids=no answer left" in caplog.text
    assert caplog.text.count("sample (trained tokens in ⟦ ⟧): <|im_start|>user") == 3


def _user(content: str) -> list[tiny.Message]:
    return [{"role": "user", "content": content}]


def _answer(content: str) -> list[tiny.Message]:
    return [{"role": "assistant", "content": content}]


def _conversation(question_words: int, answer_words: int) -> list[tiny.Message]:
    return [*_user(tiny.sentence(0, question_words)), *_answer(tiny.sentence(1, answer_words))]

"""Which tokens are trained, and that no row is lost without being named."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lineage.errors import ConfigError, DataError
from tasks.data.kinds import IGNORED
from tasks.data.tokens.tokenize_rows import TokenRow, require_chat_template, show
from tasks.dpo import DPO
from tasks.method import Adapter
from tasks.sft import SFT
from tasks.train.kernels.padding_free import Example, rows_of
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


@pytest.mark.parametrize(
    ("untrained", "trained"),
    [(None, "returns items<|im_end|>adds\nvalue<|im_end|>"), ("[0]", "adds\nvalue<|im_end|>"),
     ("[1]", "returns items<|im_end|>"), ("[0, 1]", "")],
)  # fmt: skip
def test_a_turn_without_loss_is_context(
    tokenizer: PreTrainedTokenizerBase, untrained: str | None, trained: str
) -> None:
    (row,) = token_rows([{"row_id": "a", "messages": CONVERSATION, "untrained": untrained}], tokenizer)
    (whole,) = token_rows([{"row_id": "a", "messages": CONVERSATION}], tokenizer)
    assert row.columns["input_ids"] == whole.columns["input_ids"]
    assert trained_text(tokenizer, row) == trained
    assert row.outcome.dropped == (None if trained else "nothing_to_train")


# Writes the thinking of the last turn alone, so that each turn is a text of its own.
LAST_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_text_without_a_trained_turn_is_no_example(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = LAST_THINKING
    thinks = [
        *_user("sum"),
        *_answer("<think>items</think>adds"),
        *_user("the list"),
        *_answer("<think>value</think>map"),
    ]
    (both,) = token_rows([{"row_id": "a", "messages": thinks}], tokenizer)
    assert both.outcome.num_examples == 2 and not both.outcome.cut
    for untrained, example in (("[0]", both.more[0]), ("[1]", both.columns)):
        (one,) = token_rows([{"row_id": "a", "messages": thinks, "untrained": untrained}], tokenizer)
        assert one.columns == example and not one.more
        assert one.outcome.num_examples == 1 and not one.outcome.cut and not one.outcome.dropped


def test_of_an_answer_of_several_turns_only_what_the_assistant_says_is_trained(
    tokenizer: PreTrainedTokenizerBase, directory: Path, tmp_path: Path
) -> None:
    several = [*_answer("adds"), *_user("items"), *_answer("map value")]
    pair = {"row_id": "p", "prompt": _user("sum"), "chosen": several, "rejected": _answer("map")}
    single = {"row_id": "u", "prompt": _user("sum"), "completion": several, "label": True}
    (of_pair,), (of_single,) = token_rows([pair], tokenizer), token_rows([single], tokenizer)
    for row, name in ((of_pair, "chosen"), (of_single, "completion")):
        ids, mask = row.columns[f"{name}_ids"], row.columns[f"{name}_trained"]
        parts = (tokenizer.decode([each for each, kept in zip(ids, mask, strict=True) if kept == of]) for of in (1, 0))
        assert list(parts) == ["adds<|im_end|>map value<|im_end|>", _BETWEEN]
    answers = sum(of_pair.columns["chosen_trained"]) + len(of_pair.columns["rejected_ids"])
    assert of_pair.outcome.trained == answers and of_pair.columns["rejected_trained"] == []
    (sample,) = tokenized([pair], directory, tmp_path, 512).stats.samples
    assert sample.endswith(f"⟦adds<|im_end|>⟧{_BETWEEN}⟦map value<|im_end|>⟧⟦map<|im_end|>⟧")
    (cut,) = token_rows([pair], tokenizer, len(of_pair.columns["prompt_ids"]) + 4)
    assert cut.columns["chosen_trained"] == of_pair.columns["chosen_trained"][:4] or cut.columns["chosen_trained"] == []
    assert len(cut.columns["chosen_ids"]) == 4


_BETWEEN = "\n<|im_start|>user\nitems<|im_end|>\n<|im_start|>assistant\n"


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


def _user(content: str) -> list[tiny.Message]:
    return [{"role": "user", "content": content}]


def _answer(content: str) -> list[tiny.Message]:
    return [{"role": "assistant", "content": content}]


def _conversation(question_words: int, answer_words: int) -> list[tiny.Message]:
    return [*_user(tiny.sentence(0, question_words)), *_answer(tiny.sentence(1, answer_words))]


END = "<|endoftext|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=10)
@given(words=st.lists(st.integers(0, 12), min_size=1, max_size=12), max_length=st.integers(1, 30))
def test_chunks_are_the_stream_and_every_document_is_counted_once(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, words: list[int], max_length: int
) -> None:
    rows = [{"row_id": str(i), "text": tiny.sentence(i, count)} for i, count in enumerate(words)]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    documents = [tokenizer(f"{row['text']}{END}", add_special_tokens=False)["input_ids"] for row in rows]
    stream = [token for ids in documents for token in ids]
    kept = len(stream) // max_length * max_length
    result = tokenized(rows, directory, tmp_path_factory.mktemp("rows"), max_length)
    assert result.columns["input_ids"] == [stream[at : at + max_length] for at in range(0, kept, max_length)]
    cut, dropped, place = [], [], 0
    for row, ids in zip(rows, documents, strict=True):
        if place >= kept:
            dropped.append(row["row_id"])
        elif place + len(ids) > kept:
            cut.append(row["row_id"])
        place += len(ids)
    stats = result.stats
    assert stats.cut.row_ids == cut
    assert [row_id for named in stats.dropped.values() for row_id in named.row_ids] == dropped
    assert (stats.num_rows, stats.num_tokens, stats.num_trained) == (len(rows), kept, kept)


LENGTH = 160


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def packs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    rows = tmp_path_factory.mktemp("rows")
    return tokenized(tiny.conversation_rows(20), policy, rows, LENGTH, packing="best_fit").examples.to_list()


def test_packs_hold_every_row_whole_and_once(policy: Path, packs: list[Example], tmp_path: Path) -> None:
    alone = tokenized(tiny.conversation_rows(20), policy, tmp_path, LENGTH).examples.to_list()
    assert sorted(row["input_ids"] for pack in packs for row in rows_of(pack)) == sorted(
        row["input_ids"] for row in alone
    )
    assert all(len(pack["input_ids"]) == sum(pack["seq_lengths"]) <= LENGTH for pack in packs)
    tokens = sum(len(row["input_ids"]) for row in alone)
    assert tokens / LENGTH <= len(packs) < len(alone)
    assert len(packs) <= 1.3 * tokens / LENGTH


def test_nothing_to_pack_is_no_error(policy: Path, tmp_path: Path) -> None:
    assert len(tokenized(tiny.conversation_rows(3), policy, tmp_path, 4, packing="best_fit")) == 0


def test_an_option_whose_numbers_changed_raises_a_version_in_the_recipes_that_set_it() -> None:
    """Fingerprints of stores hang on these numbers."""
    quantized = Adapter(quantization="nf4")
    found = {
        name: (recipe["version"], recipe.get("quantization_version"))
        for name, recipe in {
            "plain": SFT(adapter=Adapter()).recipe(),
            "quantized": SFT(adapter=quantized).recipe(),
            "both": SFT(adapter=quantized, packing="best_fit").recipe(),
            "dpo": DPO(adapter=quantized).recipe(),
        }.items()
    }
    assert found == {"plain": (2, None), "quantized": (2, 2), "both": (3, 2), "dpo": (2, 2)}

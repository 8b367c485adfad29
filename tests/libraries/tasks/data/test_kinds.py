"""Every kind of rows has tokens, a collator, a sample, statistics and a leak check: single answers and prompts too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from lineage.artifact import DATA, Kind
from lineage.errors import ConfigError, DataError
from tasks.context import Metrics, TrainContext
from tasks.data.kinds import PREFERENCES, PROMPTS, ROW_KINDS, UNPAIRED, RowKind, kind_of_columns, single_answers
from tasks.data.tokens.tokenization import Tokenization, TooLong
from tasks.data.tokens.tokenize_rows import show
from tasks.evaluate.scoring import Scored
from tasks.judgement.check_rows import check_rows, leaked
from tasks.method import Input, Inputs, Training
from tasks.reward_functions.metric import Metric
from tasks.train.loop.evaluation import held_out_rows
from tests import tiny
from tests.libraries.tasks.data.tokens.tokens import rows_input, token_rows, tokenized

ROWS = {
    Kind.TEXT: tiny.text_rows(12), Kind.CONVERSATIONS: tiny.conversation_rows(12),
    Kind.PREFERENCES: tiny.preference_rows(12), Kind.UNPAIRED: tiny.unpaired_rows(12),
    Kind.PROMPTS: tiny.prompt_rows(12),
}  # fmt: skip


def test_every_kind_of_data_has_a_record_and_is_known_by_its_columns() -> None:
    assert tuple(ROW_KINDS) == DATA
    for kind, rows in ROWS.items():
        assert kind_of_columns(list(rows[0])).kind == kind
        assert kind_of_columns(ROW_KINDS[kind].schema.names).kind == kind
    assert {kind.slot for kind in ROW_KINDS.values()} == {"rows", "pairs", "prompts"}


def test_the_columns_of_prepared_rows_are_those_of_every_store() -> None:
    assert {kind: record.schema.names for kind, record in ROW_KINDS.items()} == {
        Kind.TEXT: ["row_id", "text"],
        Kind.CONVERSATIONS: ["row_id", "messages", "tools"],
        Kind.PREFERENCES: ["row_id", "prompt", "chosen", "rejected", "kind", "tools"],
        Kind.UNPAIRED: ["row_id", "prompt", "completion", "label", "tools"],
        Kind.PROMPTS: ["row_id", "prompt", "columns", "tools"],
    }


@pytest.mark.parametrize("kind", ROW_KINDS.values(), ids=lambda kind: kind.kind)
def test_rows_become_the_columns_that_are_named_and_a_collator_takes_them(
    kind: RowKind, directory: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    result = tokenized(ROWS[kind.kind], directory, tmp_path, 32)
    assert result.examples.column_names == list(kind.tokens)
    assert len(result.stats.samples) == 3 and all(("⟦" in text) == kind.trained for text in result.stats.samples)
    batch = kind.collator(tokenizer.pad_token_id)(list(result.dataset([0, 1])))
    assert len(batch) == 2 if kind is PROMPTS else len(batch["input_ids"]) == (4 if kind is PREFERENCES else 2)


# Single answers.


def test_the_tokens_of_a_single_answer_are_those_of_the_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    for given, row in zip(tiny.unpaired_rows(6), token_rows(tiny.unpaired_rows(6), tokenizer), strict=True):
        whole = [*given["prompt"], *given["completion"]]
        prompt = tokenizer.apply_chat_template(given["prompt"], add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(row.columns["prompt_ids"]) == prompt
        assert tokenizer.decode(row.columns["completion_ids"]) == f"{whole[-1]['content']}<|im_end|>"
        assert row.rest == {"label": given["label"]} and row.outcome.label == given["label"]
        assert row.outcome.trained == len(row.columns["completion_ids"])


def test_desirable_and_undesirable_answers_are_counted_and_one_alone_is_warned_of(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tiny.unpaired_rows(12)
    result = tokenized(rows, directory, tmp_path, 64)
    assert result.stats.labels == {"desirable": 8, "undesirable": 4}
    assert result.metrics["desirable_rows"] == 8 and result.metrics["undesirable_rows"] == 4
    assert 0 < result.metrics["trained_tokens_percent"] < 100
    assert result.stats.samples[0].endswith("⟧ (undesirable)")
    show(result, rows_input(tmp_path), 64)
    assert "every answer" not in caplog.text
    only = tokenized([row for row in rows if row["label"]], directory, tmp_path / "only", 64)
    show(only, rows_input(tmp_path), 64)
    assert "labels={'desirable': 8}: every answer is desirable" in caplog.text


def test_a_batch_of_single_answers_is_that_of_trl_with_mismatched_pairs(
    directory: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    result = tokenized(tiny.unpaired_rows(3), directory, tmp_path, 64)
    examples = [dict(row) for row in result.examples]
    rows = list(result.dataset([0, 1, 2]))
    batch = UNPAIRED.collator(tokenizer.pad_token_id)(rows)
    rotated = [examples[-1]["completion_ids"], *(row["completion_ids"] for row in examples[:-1])]
    given = [{**row, "KL_completion_ids": other} for row, other in zip(examples, rotated, strict=True)]
    assert [result.dataset([0, 1, 2])[index] for index in range(3)] == rows == given, "whatever the micro batch"
    of_trl = DataCollatorForUnpairedPreference(tokenizer.pad_token_id)(given)
    assert batch.keys() == of_trl.keys() and all((batch[name] == of_trl[name]).all() for name in batch)
    assert batch["label"].tolist() == [False, True, True]
    assert batch["completion_mask"].sum(1).tolist() == [len(row["completion_ids"]) for row in examples]
    assert batch["attention_mask"].sum(1).tolist() == [
        len(row["prompt_ids"]) + len(row["completion_ids"]) for row in examples
    ]


# Prompts.


def test_a_prompt_ends_where_the_assistant_begins_and_keeps_its_columns(tokenizer: PreTrainedTokenizerBase) -> None:
    for given, row in zip(tiny.prompt_rows(4), token_rows(tiny.prompt_rows(4), tokenizer), strict=True):
        text = tokenizer.apply_chat_template(given["prompt"], add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(row.columns["prompt_ids"]) == text
        assert json.loads(str(row.rest["prompt"])) == given["prompt"]
        assert row.rest["columns"] == given["columns"]


def test_tools_of_a_prompt_are_a_column_for_reward_functions(tokenizer: PreTrainedTokenizerBase) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    given = {**tiny.prompt_rows(1)[0], "columns": '{"answer": 1}', "tools": json.dumps(tools)}
    (row,) = token_rows([given], tokenizer)
    assert json.loads(str(row.rest["columns"])) == {"answer": 1, "tools": tools}


@pytest.mark.parametrize(("max_length", "max_prompt_length"), [(10, None), (64, 10)])
def test_a_long_prompt_loses_its_beginning(
    tokenizer: PreTrainedTokenizerBase, max_length: int, max_prompt_length: int | None
) -> None:
    given = [{"row_id": "long", "prompt": [{"role": "user", "content": tiny.sentence(3, 40)}], "columns": None}]
    (whole,) = token_rows(given, tokenizer)
    assert len(whole.columns["prompt_ids"]) > 64
    (row,) = token_rows(given, tokenizer, max_length, max_prompt_length=max_prompt_length)
    assert row.columns["prompt_ids"] == whole.columns["prompt_ids"][-10:]
    assert (row.outcome.prompt_cut, row.outcome.tokens, row.outcome.trained) == (True, 10, 0)
    (dropped,) = token_rows(given, tokenizer, max_length, "drop", max_prompt_length)
    assert (dropped.outcome.dropped, dropped.outcome.prompt_cut) == ("too_long", False)
    tokenizer.bos_token = "<|im_start|>"
    try:
        (begun,) = token_rows(given, tokenizer, max_length, max_prompt_length=max_prompt_length)
    finally:
        tokenizer.bos_token = None
    assert begun.columns["prompt_ids"] == [whole.columns["prompt_ids"][0], *whole.columns["prompt_ids"][-9:]]


def test_prompts_count_their_tokens_what_is_cut_and_what_is_dropped(directory: Path, tmp_path: Path) -> None:
    whole = tokenized(tiny.prompt_rows(8), directory, tmp_path, 64)
    assert whole.metrics == {
        "rows": 8, "rows_cut": 0, "rows_dropped": 0,
        "prompt_tokens": sum(map(len, whole.columns["prompt_ids"])),
    }  # fmt: skip
    shortest = min(map(len, whole.columns["prompt_ids"]))
    cut = tokenized(tiny.prompt_rows(8), directory, tmp_path, shortest)
    dropped = tokenized(tiny.prompt_rows(8), directory, tmp_path, shortest, too_long="drop")
    assert 0 < cut.metrics["prompts_cut"] == dropped.metrics["rows_dropped"] < 8
    with pytest.raises(DataError, match="no prompt of 'corpus' fits max_length=3"):
        show(tokenized(tiny.prompt_rows(8), directory, tmp_path, 3, too_long="drop"), rows_input(tmp_path), 3)
    with pytest.raises(DataError, match="8 of 8 rows are longer than max_length=3"):
        tokenized(tiny.prompt_rows(8), directory, tmp_path, 3, too_long="refuse")
    with pytest.raises(ConfigError, match="too_long=cut_answer: prompts have no answer yet"):
        Tokenization(kind=Kind.PROMPTS, max_length=8, too_long="cut_answer")


# The checks before training.


@dataclass(frozen=True, kw_only=True)
class OfKind(Training):
    """Trains on rows of a kind."""

    consumes: ClassVar[Mapping[str, Kind]] = {}
    produces: ClassVar[Kind] = Kind.CHECKPOINT

    kind: Kind
    too_long: TooLong | None = None
    learning_rate: float = 1e-3
    num_steps: int = 1
    global_batch_size: int = 1
    max_length: int = 64

    def tokenization(self) -> Tokenization:
        return Tokenization(kind=self.kind, max_length=self.max_length, too_long=self.too_long)

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        raise NotImplementedError


def of_kind(kind: Kind) -> OfKind:
    record = ROW_KINDS[kind]
    method = type("OfThis", (OfKind,), {"consumes": {"policy": Kind.CHECKPOINT, record.slot: kind}})
    found: OfKind = method(kind=kind)
    return found


def given(kind: Kind, directory: Path, root: Path) -> Inputs:
    path = tiny.write_rows(root / kind, ROWS[kind][:9], ROWS[kind][9:])
    policy = Input(name="base", kind=Kind.CHECKPOINT, fingerprint="p" * 64, path=directory)
    return {"policy": policy, ROW_KINDS[kind].slot: Input(name=kind, kind=kind, fingerprint="r" * 64, path=path)}


def masks(tokenizer: PreTrainedTokenizerBase, batch: Mapping[str, pa.Array], name: str = "") -> list[str]:
    """The text of each row of a batch that gets loss."""
    ids, kept = batch[f"{name}input_ids"], batch[f"{name}completion_mask"].bool()
    return [tokenizer.decode(row[mask]) for row, mask in zip(ids, kept, strict=True)]


def test_what_others_say_within_an_answer_gets_no_loss_in_a_batch(
    directory: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    one, other, user = ([{"role": role, "content": text}] for role, text in zip(
        ("assistant", "assistant", "user"), ("adds", "map value", "items"), strict=True))  # fmt: skip
    several = [*one, *user, *other]
    pairs = [
        {"row_id": "a", "prompt": user, "chosen": one, "rejected": several},
        {"row_id": "b", "prompt": user, "chosen": several, "rejected": other},
    ]
    rows = list(tokenized(pairs, directory, tmp_path, 512).dataset([0, 1]))
    both, first, last = "adds<|im_end|>map value<|im_end|>", "adds<|im_end|>", "map value<|im_end|>"
    batch = PREFERENCES.collator(tokenizer.pad_token_id)(rows)
    assert masks(tokenizer, batch) == [first, both, both, last]
    scored = [
        Scored.answer(row["prompt_ids"], row[f"{side}_ids"], trained=row[f"{side}_trained"])
        for side in ("chosen", "rejected")
        for row in rows
    ]
    assert [each.num_tokens for each in scored] == batch["completion_mask"].sum(1).tolist()
    singles = [
        {"row_id": "a", "prompt": user, "completion": several, "label": True},
        {"row_id": "b", "prompt": user, "completion": other, "label": False},
    ]
    rows = list(tokenized(singles, directory, tmp_path / "single", 512).dataset([0, 1]))
    batch = single_answers(tokenizer.pad_token_id)(rows)
    assert masks(tokenizer, batch) == [both, last]
    assert masks(tokenizer, batch, "KL_") == [last, both], "a mismatched answer has its own mask"
    short = single_answers(tokenizer.pad_token_id, max_length=len(rows[0]["prompt_ids"]) + 4)(rows)
    assert short["completion_mask"].sum(1).max() <= 4


@pytest.fixture
def context(tmp_path: Path) -> TrainContext:
    return TrainContext(output_dir=tmp_path / "out", work_dir=tmp_path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", [Kind.UNPAIRED, Kind.PROMPTS])
def test_the_label_gate_looks_at_single_answers_and_prompts(
    kind: Kind, directory: Path, context: TrainContext, tmp_path: Path
) -> None:
    method, inputs = of_kind(kind), given(kind, directory, tmp_path)
    found = check_rows(method, inputs, context, stage="toy", chat_template=None, previous_percent=None)
    assert found["rows"] == 9
    assert len(held_out_rows(method, inputs, context)) == 3
    if kind == Kind.PROMPTS:
        assert "trained_tokens_percent" not in found and found["prompt_tokens"] > 0
    else:
        assert (found["desirable_rows"], found["undesirable_rows"]) == (6, 3)
        with pytest.raises(DataError, match=r"accept_label_drop=\[toy\]"):
            check_rows(method, inputs, context, stage="toy", chat_template=None, previous_percent=100.0)


def prepared(directory: Path, kind: Kind, train: list[dict[str, object]], held_out: list[dict[str, object]]) -> Path:
    directory.mkdir()
    for name, rows in (("train", train), ("held_out", held_out)):
        pq.write_table(pa.Table.from_pylist(rows, ROW_KINDS[kind].schema), directory / f"{name}.parquet")
    return directory


@pytest.mark.parametrize("kind", [Kind.UNPAIRED, Kind.PROMPTS])
@pytest.mark.parametrize("measured", [Kind.TEXT, Kind.CONVERSATIONS, Kind.PREFERENCES, Kind.UNPAIRED, Kind.PROMPTS])
def test_what_another_stage_holds_out_is_found_among_single_answers_and_prompts(
    kind: Kind, measured: Kind, directory: Path, context: TrainContext, tmp_path: Path
) -> None:
    asked = "why does the list return a new sorted copy"
    turn = {"role": "user", "content": asked}
    other = [{"role": "assistant", "content": "because sorting in place would change it"}]
    repeated = {
        Kind.TEXT: {"text": asked}, Kind.CONVERSATIONS: {"messages": [turn, *other]},
        Kind.PREFERENCES: {"prompt": [turn], "chosen": other, "rejected": other, "kind": None},
        Kind.UNPAIRED: {"prompt": [turn], "completion": other, "label": True},
        Kind.PROMPTS: {"prompt": [turn], "columns": None},
    }  # fmt: skip
    trained = {**repeated[kind], "row_id": "trained"}
    rows = prepared(tmp_path / "train", kind, [*ROWS[kind], trained], ROWS[kind][:1])
    held_out = {**repeated[measured], "row_id": "measured"}
    sets = {"other": prepared(tmp_path / "other", measured, ROWS[measured][:1], [held_out])}
    found = leaked(Input(name="mine", kind=kind, fingerprint="m" * 64, path=rows), sets, context)
    assert found
    (line,) = pq.read_table(found).to_pylist()
    assert (line["train_row_id"], line["held_out_row_id"]) == ("trained", "measured")
    assert line["kind"] in ("prompt", "exact")
    clean = prepared(tmp_path / "clean", kind, ROWS[kind], ROWS[kind][:1])
    assert leaked(Input(name="mine", kind=kind, fingerprint="c" * 64, path=clean), sets, context) is None


@pytest.mark.parametrize("text_of", ["{{question}} Answer:", "question", "Q: {{ question }}"])
def test_what_a_local_benchmark_asks_is_found_among_training_rows(
    text_of: str, directory: Path, context: TrainContext, tmp_path: Path
) -> None:
    asked = "why does the list return a new sorted copy"
    row = {"question": asked, "choices": ["because", "so"], "answer": 0}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({**row, 'question': 'what is a list'})}\n{json.dumps(row)}\n")
    (tmp_path / "task.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: rows.jsonl}}\ndoc_to_text: '{text_of}'\n"
    )
    metric, kind = Metric(function=f"lm_eval:{tmp_path / 'task.yaml'}"), Kind.CONVERSATIONS
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "it says so"}]
    rows = prepared(tmp_path / "train", kind, [*ROWS[kind], {"messages": turns, "row_id": "t"}], ROWS[kind][:1])
    given = Input(name="mine", kind=kind, fingerprint="m" * 64, path=rows)
    found = leaked(given, {}, context, [metric])
    assert found
    (line,) = pq.read_table(found).to_pylist()
    assert (line["train_row_id"], line["held_out_row_id"], line["held_out_set"]) == ("t", "1-0", "lm_eval/task")
    assert leaked(given, {}, context) is None


def test_a_trainer_gets_prompts_with_the_columns_of_all_of_them(directory: Path, tmp_path: Path) -> None:
    rows = tiny.prompt_rows(2)
    result = tokenized(rows, directory, tmp_path, 64)
    examples = result.dataset([0, 1])
    assert (
        PROMPTS.collator(0)([examples[0], examples[1]])
        == list(examples)
        == [
            {"answer": answer, "prompt": row["prompt"], "prompt_ids": ids}
            for answer, row, ids in zip([0, None], rows, result.columns["prompt_ids"], strict=True)
        ]
    )

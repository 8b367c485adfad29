"""The kinds of prepared rows: a record for each, with everything that differs between them.

A method names the record that it trains on (``reads = PREFERENCES``). Data stages, tokenization, the label check,
the leak check and evaluation use these records. Below: messages, tools and texts in the columns of prepared rows.
"""

import atexit
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from lineage.artifact import Kind
from lineage.errors import PipelineError

if TYPE_CHECKING:
    from concurrent.futures import Future, ProcessPoolExecutor

    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, object]
Columns = Mapping[str, object]  # of one example in a file of tokens
Collator = Callable[[list[dict[str, object]]], object]
IGNORED = -100  # label of a token that is not trained
MISMATCHED = "KL_"  # TRL's prefix for columns with the prompts of a batch paired with answers of other rows
ROW_ID = "row_id"
TRAINED = "trained"  # CHOSEN_trained: a 1 for each token of an answer with loss, 0 for the others; empty: all have it
_COMPLETION_TRAINED = f"completion_{TRAINED}"
PLACES = "image_places"  # of tokens: which images of the rows a row has, where rows have any; TRL reads "images"
UNTRAINED = "untrained"  # of conversations: JSON list of those of the assistant's turns that get no loss, from 0
DOMAIN = "domain"  # a row's label, by which perplexities are reported
TRAIN, HELD_OUT = "train.parquet", "held_out.parquet"  # the files of the splits
RESTING = "resting.parquet"  # rows of earlier models that are not replayed this time
LABEL_NAMES = {True: "desirable", False: "undesirable"}  # of single answers
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
# Reserved names of prompt columns: ours, and the arguments that TRL passes to reward functions.
RESERVED_COLUMNS = frozenset({
    "prompt_ids", "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "environments",
})  # fmt: skip


@dataclass(kw_only=True)
class RowOutcome:
    """The outcome of tokenizing a row.

    Args:
        length: tokens before cuts; for a pair, of the prompt with the longer answer.
        tokens, trained: tokens that a trainer reads, and those with loss.
        cut, prompt_cut: whether its end, or the beginning of its prompt, was cut.
        dropped: why it is not trained on, such as ``nothing_to_train``; None: it is.
        label: for a single answer: whether it is desirable; None: rows of its kind have no label.
        stops: tokens that end the assistant's turns.
        num_examples: number of examples; several if its turns cannot be rendered in one text.
        merged: starts of the assistant over which the tokens of the whole text would merge, and do not.
        spelled: the control tokens that its texts spell.
        unknown: tokens that stand for text of which the tokenizer has none.
    """

    row_id: str
    length: int
    tokens: int = 0
    trained: int = 0
    cut: bool = False
    prompt_cut: bool = False
    dropped: str | None = None
    label: bool | None = None
    stops: set[int] = field(default_factory=set)
    num_examples: int = 1
    merged: int = 0
    spelled: Sequence[str] = ()
    unknown: int = 0

    @property
    def control(self) -> int:
        """How often its texts spell a control token."""
        return len(self.spelled)


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A tokenized row.

    Args:
        columns: its tokens.
        rest: further columns of its kind, such as a label.
        more: tokens of further examples: of a conversation whose chat template renders earlier turns differently
            from the last one.
    """

    outcome: RowOutcome
    columns: dict[str, list[int]]
    rest: Mapping[str, object] = field(default_factory=dict)
    more: Sequence[dict[str, list[int]]] = ()


class Column(StrEnum):
    """Type of a column."""

    TEXT = "text"
    MESSAGES = "messages"  # a list of ``Message``
    FLAG = "flag"
    IDS = "ids"  # a list of tokens


@dataclass(frozen=True, kw_only=True)
class RowKind:
    """One kind of prepared rows.

    Args:
        kind: kind of the artifact of a data stage.
        slot: slot of a training that reads such rows.
        asked: column of the prompt; in conversations it includes the answers, and a text is its own prompt. Rows with
            the same prompt are in the same split, and the leak check compares prompts.
        answers: columns of answers. ``asked`` and ``answers`` are the content of a row, used by the leak check, the
            search for near-duplicates, and lengths.
        others: further columns.
        rare: columns that a file has only where a row of it has a value.
        tokens: columns of a token file.
        chat: whether rows are rendered by a chat template.
        joined: whether rows are concatenated and cut into chunks of one length.
        trained: whether tokens of the rows get loss. The label check compares their share with that of the last run,
            and refuses rows without any; for prompts it only counts tokens, cut rows and dropped rows.
        tokenize: the method of ``tasks.data.tokens.tokenize_rows.RowTokenizer`` that tokenizes its rows.
        examples: converts the examples of a token file to those for the trainer.
        collator: pads examples to a batch, with a pad token.
        sample: an example as text, for the log, with the trained part in ⟦ ⟧.
    """

    kind: Kind
    slot: str
    asked: str
    answers: tuple[str, ...] = ()
    others: Mapping[str, Column] = field(default_factory=dict, hash=False)
    rare: Mapping[str, Column] = field(default_factory=dict, hash=False)
    tokens: Mapping[str, Column] = field(hash=False)
    chat: bool = True
    joined: bool = False
    trained: bool = True
    tokenize: Literal["texts", "conversations", "preferences", "unpaired", "prompts"]
    examples: Callable[["Dataset"], "Dataset"] = lambda examples: examples
    collator: Callable[[int], Collator]
    sample: Callable[["PreTrainedTokenizerBase", Columns], str]

    @property
    def contents(self) -> tuple[str, ...]:
        """The content columns of a row."""
        return (self.asked, *self.answers)

    @property
    def columns(self) -> Mapping[str, Column]:
        """Columns of prepared rows, without ``row_id``."""
        column = Column.MESSAGES if self.chat else Column.TEXT
        return {**dict.fromkeys(self.contents, column), **self.others}

    @property
    def schema(self) -> "pa.Schema":
        """Arrow schema of prepared rows."""
        return self.schema_with(())

    def schema_with(self, rare: Collection[str]) -> "pa.Schema":
        """Arrow schema of prepared rows with these of the rare columns."""
        more = {name: column for name, column in self.rare.items() if name in rare}
        return arrow_schema({ROW_ID: Column.TEXT, **self.columns, **more})


def arrow_schema(columns: Mapping[str, Column]) -> "pa.Schema":
    """The Arrow schema of columns."""
    import pyarrow as pa

    types = {
        Column.TEXT: pa.string(),
        Column.MESSAGES: pa.list_(pa.struct([(name, pa.string()) for name in MESSAGE_FIELDS])),
        Column.FLAG: pa.bool_(),
        Column.IDS: pa.list_(pa.int32()),
    }
    return pa.schema([(name, types[column]) for name, column in columns.items()])


def kind_of_columns(names: Sequence[str]) -> RowKind:
    """The kind of prepared rows with these columns: of the kinds whose content is there, the one with most columns."""
    return max(
        (each for each in ROW_KINDS.values() if set(each.contents) <= set(names)), key=lambda each: len(each.contents)
    )


def _language_modeling(pad_token_id: int) -> Collator:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator: Collator = DataCollatorForLanguageModeling(pad_token_id)
    return collator


def _pairs(pad_token_id: int) -> Collator:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    return _with_gaps(DataCollatorForPreference(pad_token_id), ("chosen", "rejected"))


def single_answers(pad_token_id: int, max_length: int | None = None) -> Collator:
    """Collates single answers; one that is longer than ``max_length`` with its prompt loses its end."""
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    return _with_gaps(DataCollatorForUnpairedPreference(pad_token_id, max_length=max_length), ("completion",))


def _with_gaps(collate: Collator, answers: Sequence[str]) -> Collator:
    """Collates answers, and takes what others than the assistant say within them out of the mask of the loss.

    Args:
        answers: names of the answers, whose rows follow one another in the batch.
    """

    def collated(examples: list[dict[str, object]]) -> object:
        batch = collate(examples)
        assert isinstance(batch, Mapping)
        for prefix in ("", MISMATCHED):
            masks = [each.get(f"{prefix}{name}_{TRAINED}") for name in answers for each in examples]
            prompts = [each["prompt_ids"] for _ in answers for each in examples]
            for row, (mask, prompt) in enumerate(zip(masks, prompts, strict=True)):
                if mask:
                    part = batch[f"{prefix}completion_mask"][row, len(prompt) :][: len(mask)]  # type: ignore[arg-type]
                    part *= part.new_tensor(mask[: len(part)])  # type: ignore[index]
        return batch

    return collated


def _with_mismatched(examples: "Dataset") -> "Dataset":
    """Adds the answer of the previous example in training order to each example, cyclically.

    KTO estimates its KL term on these mismatched pairs (Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1). They do
    not depend on the micro batch or the workers.
    """
    from datasets import Dataset

    def paired(batch: Mapping[str, list[int]]) -> dict[str, list[object]]:
        before = examples[[(index - 1) % len(examples) for index in batch["index"]]]
        names = ["completion_ids", *([_COMPLETION_TRAINED] if any(before.get(_COMPLETION_TRAINED, ())) else [])]
        mismatched = {f"{MISMATCHED}{name}": before[name] for name in names}
        return {**examples[batch["index"]], **mismatched}

    return Dataset.from_dict({"index": range(len(examples))}).with_transform(paired)


def _with_columns(examples: "Dataset") -> "Dataset":
    """Decodes prompts to messages, with their tokens and the columns for reward functions.

    Every example has every column; missing values are None.
    """
    names = list(dict.fromkeys(name for text in examples["columns"] for name in json.loads(text or "{}")))

    def decoded(batch: Mapping[str, list[str | None]]) -> dict[str, list[object]]:
        rows = [json.loads(text or "{}") for text in batch["columns"]]
        columns = {name: [row.get(name) for row in rows] for name in names}
        return {
            **columns,
            "prompt": [json.loads(str(text)) for text in batch["prompt"]],
            "prompt_ids": [*batch["prompt_ids"]],
            **({PLACES: [*batch[PLACES]]} if PLACES in batch else {}),
        }

    return examples.with_transform(decoded)


def parts_of(example: Mapping[str, Sequence[int]]) -> tuple[Sequence[int], list[Sequence[int]]]:
    """The tokens of an example: of its text or prompt, and of each answer, the chosen one first."""
    answers = [example[name] for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in example]
    return example["input_ids" if "input_ids" in example else "prompt_ids"], answers


def tokens_of(example: Mapping[str, Sequence[int]]) -> list[int]:
    """The tokens of an example as one row: of a pair, those of the prompt with the chosen answer."""
    asked, answers = parts_of(example)
    return [*asked, *(answers[0] if answers else ())]


def _labelled_text(tokenizer: "PreTrainedTokenizerBase", columns: Columns) -> str:
    ids, labels = columns["input_ids"], columns["labels"]
    assert isinstance(ids, list) and isinstance(labels, list)
    return _marked_text(tokenizer, ids, [label != IGNORED for label in labels])


def _marked_text(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], trained: Sequence[bool]) -> str:
    """Tokens as text, with those that are trained in ⟦ ⟧."""
    text, start = "", 0
    while start < len(ids):
        end = start
        while end < len(ids) and trained[end] == trained[start]:
            end += 1
        piece = str(tokenizer.decode(ids[start:end]))
        text += f"⟦{piece}⟧" if trained[start] else piece
        start = end
    return text


def _answers_text(tokenizer: "PreTrainedTokenizerBase", columns: Columns) -> str:
    answers = (_answer_text(tokenizer, columns, name) for name in ("chosen", "rejected"))
    return str(tokenizer.decode(columns["prompt_ids"])) + "".join(answers)


def _answer_text(tokenizer: "PreTrainedTokenizerBase", columns: Columns, name: str) -> str:
    ids, mask = columns[f"{name}_ids"], columns.get(f"{name}_{TRAINED}")
    assert isinstance(ids, list)
    return _marked_text(tokenizer, ids, list(map(bool, mask)) if isinstance(mask, list) and mask else [True] * len(ids))


def _judged_text(tokenizer: "PreTrainedTokenizerBase", columns: Columns) -> str:
    prompt, answer = str(tokenizer.decode(columns["prompt_ids"])), _answer_text(tokenizer, columns, "completion")
    return f"{prompt}{answer} ({LABEL_NAMES[bool(columns['label'])]})"


def _prompt_text(tokenizer: "PreTrainedTokenizerBase", columns: Columns) -> str:
    more = columns["columns"]
    return str(tokenizer.decode(columns["prompt_ids"])) + (f" (columns: {more})" if more else "")


_LABELLED = {"input_ids": Column.IDS, "labels": Column.IDS}
_TOOLS = {"tools": Column.TEXT}  # JSON text

TEXT = RowKind(
    kind=Kind.TEXT, slot="rows", asked="text", rare={DOMAIN: Column.TEXT}, tokens=_LABELLED, chat=False, joined=True,
    tokenize="texts", collator=_language_modeling, sample=_labelled_text,
)  # fmt: skip

CONVERSATIONS = RowKind(
    kind=Kind.CONVERSATIONS, slot="rows", asked="messages", others=_TOOLS,
    rare={UNTRAINED: Column.TEXT, DOMAIN: Column.TEXT}, tokens=_LABELLED,
    tokenize="conversations", collator=_language_modeling, sample=_labelled_text,
)  # fmt: skip

PREFERENCES = RowKind(
    kind=Kind.PREFERENCES, slot="pairs", asked="prompt", answers=("chosen", "rejected"),
    others={"kind": Column.TEXT, **_TOOLS},
    tokens=dict.fromkeys(
        ("prompt_ids", "chosen_ids", "rejected_ids", f"chosen_{TRAINED}", f"rejected_{TRAINED}"), Column.IDS
    ),
    tokenize="preferences", collator=_pairs, sample=_answers_text,
)  # fmt: skip

UNPAIRED = RowKind(
    kind=Kind.UNPAIRED, slot="rows", asked="prompt", answers=("completion",), others={"label": Column.FLAG, **_TOOLS},
    tokens={
        **dict.fromkeys(("prompt_ids", "completion_ids", _COMPLETION_TRAINED), Column.IDS), "label": Column.FLAG,
    },
    tokenize="unpaired", examples=_with_mismatched, collator=single_answers,
    sample=_judged_text,
)  # fmt: skip

PROMPTS = RowKind(
    kind=Kind.PROMPTS, slot="prompts", asked="prompt", others={"columns": Column.TEXT, **_TOOLS}, trained=False,
    tokens={"prompt_ids": Column.IDS, "prompt": Column.TEXT, "columns": Column.TEXT},  # the last two as JSON text
    tokenize="prompts", examples=_with_columns,
    collator=lambda pad_token_id: lambda examples: examples,  # the trainer pads prompts when it generates
    sample=_prompt_text,
)  # fmt: skip

ROW_KINDS: Mapping[Kind, RowKind] = {
    each.kind: each for each in (TEXT, CONVERSATIONS, PREFERENCES, UNPAIRED, PROMPTS)
}  # fmt: skip


Message = dict[str, object]
"""``role`` (system, user, assistant, tool) and ``content``; optionally ``name``, ``tool_call_id``, and
``tool_calls``, a list as OpenAI's chat has it, stored as JSON text since the arguments of each tool differ."""


def texts_of(rows: "pa.RecordBatch") -> "pa.Array":
    """The text of each prepared row: the content of its messages, a line each."""
    import pyarrow.compute as pc

    columns = [rows.column(name) for name in kind_of_columns(rows.schema.names).contents]
    texts = [_contents(column) for column in columns]
    return texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, "\n", null_handling="skip")


def _contents(column: "pa.Array") -> "pa.Array":
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_list(column.type):
        return column
    messages = column.flatten()
    lines = messages.field("content")
    calls = messages.field("tool_calls")
    if calls.null_count < len(calls):
        lines = pc.binary_join_element_wise(lines, calls, "\n", null_handling="skip")
    offsets = pc.subtract(column.offsets, column.offsets[0])  # a slice starts within its parent array
    return pc.binary_join(pa.ListArray.from_arrays(offsets, lines), "\n")


def messages_of(stored: object) -> list[Message]:
    """Messages in the form for chat templates, from a column of messages."""
    assert isinstance(stored, list)
    return [_message(message) for message in stored]


def _message(stored: Mapping[str, str | None]) -> Message:
    message: Message = {name: value for name, value in stored.items() if value is not None}
    if "tool_calls" in message:
        message["tool_calls"] = json.loads(str(message["tool_calls"]))
    return message


def untrained_of(row: Mapping[str, object]) -> frozenset[int]:
    """The positions, among the assistant's turns, of those that get no loss."""
    stored = row.get(UNTRAINED)
    return frozenset(json.loads(str(stored))) if stored else frozenset()


def tools_of(row: Mapping[str, object]) -> list[dict[str, object]] | None:
    """The tools of a row in the form for chat templates: JSON schemas of functions."""
    stored = row.get("tools")
    return json.loads(str(stored)) if stored is not None else None


def columns_of(row: Mapping[str, object]) -> dict[str, object]:
    """The columns of a prompt row that reward functions get, with its ``tools``."""
    columns: dict[str, object] = json.loads(str(row.get("columns") or "{}"))
    tools = tools_of(row)
    return {**columns, "tools": tools} if tools else columns


# Batches of rows, and the processes that work on them in order.

Item = TypeVar("Item")
Result = TypeVar("Result")

INLINE_SECONDS = 2.0  # about the time that a process takes to start
Pool = Callable[[Callable[[Item], Result], Iterator[Item]], Iterator[Result]]  # maps in order, elsewhere
ELSEWHERE: ContextVar["Pool[object, object] | None"] = ContextVar("ELSEWHERE", default=None)  # None: in processes here
_AHEAD = 3  # items per worker that are read ahead, so that no worker waits for the reader
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"} | dict.fromkeys(
    ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "ARROW_NUM_THREADS"), "1"
)


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Maps ``function`` over items, in order: for ``INLINE_SECONDS`` in this process, then ``ELSEWHERE`` or in a pool.

    Args:
        function: sent to each process once, so that it may cache state between items.
        workers: number of single-threaded processes here, at most the number of CPUs; 1: only this process.

    Raises:
        PipelineError: a process died. Exceptions of ``function`` and ``items`` are raised unchanged.
    """
    import multiprocessing
    import pickle
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    workers = min(workers, os.cpu_count() or 1)
    remaining, start = iter(items), time.monotonic()
    elsewhere = cast("Pool[Item, Result] | None", ELSEWHERE.get())
    while (workers == 1 and not elsewhere) or time.monotonic() - start < INLINE_SECONDS:
        try:
            item = next(remaining)
        except StopIteration:
            return
        yield function(item)
    if elsewhere:
        yield from elsewhere(function, remaining)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy locks that threads hold
        initializer=_begin,
        initargs=(pickle.dumps(function),),
    )
    try:
        yield from _in_order(pool, remaining, workers * _AHEAD)
    except BrokenProcessPool as error:
        raise PipelineError(
            "a process that works on rows died without a message; out of memory? Free some, or set fewer "
            "cpus_per_worker: each CPU is one process"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: "ProcessPoolExecutor", items: Iterable[Item], window: int) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    work = cast("Callable[[Item], Result]", _work)
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) == window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _begin(function: bytes) -> None:
    """Initializes a worker: limits threads before the function's imports, and exits with the parent."""
    import pickle

    global _work_on
    os.environ.update(ONE_THREAD)
    atexit.register(os._exit, 0)  # before the interpreter's clean-up, of which DuckDB's bindings write warnings
    threading.Thread(target=_die_with_parent, daemon=True, name="die-with-parent").start()
    _work_on = pickle.loads(function)


def _die_with_parent() -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_work_on: Callable[..., object]


def _work(item: object) -> object:
    return _work_on(item)


MAX_BYTES = 2**22  # processing a text takes more than ten times its memory


def row_batches(file: Path, max_rows: int, columns: Sequence[str] | None = None) -> Iterator["pa.RecordBatch"]:
    """Batches of a Parquet file in order, each of at most ``max_rows`` rows and ``MAX_BYTES`` (or one row).

    Args:
        columns: columns to read, if the file has them; None: all.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as rows:
        names = [name for name in rows.schema_arrow.names if columns is None or name in columns]
        for number in range(rows.num_row_groups):
            group = rows.metadata.row_group(number)
            fitting = group.num_rows * MAX_BYTES // max(group.total_byte_size, 1)
            count = min(max(fitting, 1), max_rows)
            for batch in rows.iter_batches(count, row_groups=[number], columns=names):
                yield from _small(batch)


def _small(rows: "pa.RecordBatch") -> Iterator["pa.RecordBatch"]:
    """Splits a large batch into copies of parts; a slice would keep, and pickle, all rows."""
    import pyarrow as pa

    if rows.nbytes <= MAX_BYTES or len(rows) == 1:
        yield rows
        return
    half = len(rows) // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        yield from _small(pa.concat_batches([part]))

"""Options that determine the tokens of prepared rows; packs, short rows in one example; chunks of documents."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.data.images import Images
from tasks.data.kinds import PLACES, TEXT, RowOutcome, arrow_schema
from tasks.data.tokens.template import Thinking
from tasks.model.chat_template import check_name

if TYPE_CHECKING:
    import pyarrow as pa

TooLong = Literal["cut_answer", "cut_prompt", "drop", "refuse"]
Packing = Literal["best_fit"]
ControlText = Literal["text", "keep", "drop", "refuse"]


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """How a method's rows are tokenized.

    Args:
        kind: of the rows.
        max_length: tokens per row, prompt and answer; per chunk, for text.
        too_long: what is done with a longer row: cut its end, cut the beginning of its prompt, drop it, or fail.
            None: ``cut_answer``, or ``cut_prompt`` for prompts, which have no answer yet.
        max_prompt_length: a longer prompt keeps its last tokens; of a conversation, the prompt is what precedes the
            first answer.
        packing: rows share the ``max_length`` of one example; None: each is one.
        thinking: whether what the assistant thinks is trained; None: as the chat template has it, which must not lose
            it.
        chat_template: one of ``tasks.model.chat_template``; None: the tokenizer's own.
        control_tokens: what is done with rows whose texts spell a control token, such as ``<|im_end|>``: encode them
            as text, keep the tokens, drop the rows, or fail. None: ``text``, and ``keep`` for documents, which may be
            rendered already.
        images: rows may have images; None: they may not.
    """

    kind: Kind
    max_length: int
    too_long: TooLong | None = None
    max_prompt_length: int | None = None
    packing: Packing | None = None
    chat_template: str | None = None
    thinking: Thinking | None = None
    control_tokens: ControlText | None = None
    images: Images | None = None

    @property
    def keeps_control(self) -> bool:
        """Whether texts that spell control tokens become these tokens."""
        return (self.control_tokens or ("keep" if self.kind == Kind.TEXT else "text")) == "keep"

    def __post_init__(self) -> None:
        check_name(self.chat_template)
        if self.max_prompt_length is not None and self.max_prompt_length >= self.max_length:
            raise ConfigError(
                f"max_prompt_length={self.max_prompt_length} leaves no room for an answer in "
                f"max_length={self.max_length}; a lower one is accepted"
            )
        if self.kind == Kind.PROMPTS and self.too_long == "cut_answer":
            raise ConfigError(
                "too_long=cut_answer: prompts have no answer yet; cut_prompt (the default), drop and refuse are "
                "accepted; set one of them"
            )


# Tested: in a pack, a row has the loss and the gradients that it has alone (tests/integration/test_packs.py).
PACKABLE = frozenset({
    "arcee", "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neox",
    "granite", "granitemoe", "helium", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2",
    "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe",
    "qwen3_vl_text", "seed_oss", "smollm3", "starcoder2",
})  # fmt: skip
# Models that read images of which this holds for the model of text within them (tests/integration/test_vision.py).
SEEING = frozenset({
    "gemma3", "idefics3", "internvl", "llava", "llava_next", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm",
})  # fmt: skip
_WINDOW_IN_MASK = {"olmoe", "qwen2_moe"}  # their attention does not receive the window
_LAYERS = {"full_attention", "sliding_attention"}
_ROWS_PER_SEARCH = 10_000  # best fits are searched within so many rows


def pack(tokens: Path, max_length: int) -> int:
    """Replaces rows by packs of rows (best-fit decreasing: Ding et al. 2024, arXiv:2404.10830); returns their number.

    Each pack holds whole rows, one after the other; ``seq_lengths`` are their lengths.
    """
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()  # they only fill logs
    draft = tokens.with_suffix(".packs")
    packs = pack_dataset(
        Dataset.from_file(str(tokens)), max_length, strategy="bfd",
        map_kwargs={"batch_size": _ROWS_PER_SEARCH, "cache_file_name": str(draft)},
    )  # fmt: skip
    draft.replace(tokens)
    return len(packs)


def why_not_packable(config: Mapping[str, object]) -> str | None:
    """Why a model cannot keep the rows of a pack apart; None: it can.

    Args:
        config: of the model, as its ``config.json`` has it.
    """
    found, layers = config.get("model_type"), config.get("layer_types")
    if found in SEEING:  # files of Qwen2-VL have the fields of text beside those of vision
        text = config.get("text_config")
        return why_not_packable(text if isinstance(text, Mapping) else {**config, "model_type": f"{found}_text"})
    others = sorted({str(each) for each in layers} - _LAYERS) if isinstance(layers, list) else []
    if others:
        why = f"its layers of {', '.join(others)} pass on what they saw of one row of a pack to the next"
    elif config.get("use_bidirectional_attention"):
        why = "its attention is not causal"
    elif found in _WINDOW_IN_MASK and config.get("sliding_window") and config.get("use_sliding_window", True):
        why = "its sliding window is part of a mask, which packs go without"
    elif found not in PACKABLE:
        why = f"no test shows that it keeps the rows of a pack apart; known to: {', '.join(sorted(PACKABLE))}"
    else:
        return None
    return f"on a model of type {found}, {why}"


def rows_of(pack: Mapping[str, list[int]]) -> Iterator[dict[str, list[int]]]:
    """The rows of a pack, whose lengths are its ``seq_lengths``."""
    place = 0
    for length in pack["seq_lengths"]:
        yield {name: pack[name][place : place + length] for name in ("input_ids", "labels")}
        place += length


def images_of_pack(pack: Mapping[str, list[int]]) -> list[int]:
    """The places of the images of a pack, which its rows mark at the first token of each: one more than its place."""
    return [mark - 1 for mark in pack[PLACES] if mark]


# Documents: chunks of the stream of all tokens.


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """The examples of some consecutive rows, and the outcomes that are known so far."""

    outcomes: Sequence[RowOutcome]
    columns: "pa.RecordBatch"


FILLS_NO_CHUNK = "fills_no_chunk"  # the reason why a document is dropped


def chunked(parts: Iterable[TokenPart], max_length: int) -> Iterator[TokenPart]:
    """Chunks of all tokens, except the rest at the end, which does not fill a chunk.

    The document in which the rest starts counts as cut, documents entirely inside it as dropped. The outcome of a
    document is returned with the part that determines it.
    """
    import pyarrow as pa

    rest = pa.array([], pa.int32())
    ended = deque[tuple[RowOutcome, int]]()  # documents, and where they end in the stream
    total = 0  # tokens of the stream so far
    for part in parts:
        for outcome in part.outcomes:
            total += outcome.length
            ended.append((outcome, total))
        tokens = pa.concat_arrays([rest, part.columns.column("input_ids").flatten()])
        kept = len(tokens) // max_length * max_length
        rest, done = tokens[kept:], list[RowOutcome]()
        while ended and ended[0][1] <= total - len(rest):
            outcome, _ = ended.popleft()
            done.append(_trained(outcome, outcome.length))
        yield TokenPart(outcomes=done, columns=_chunks(tokens[:kept], max_length))
    # A document is trained up to the start of the rest.
    start = total - len(rest)
    left = [_trained(outcome, outcome.length - min(outcome.length, end - start)) for outcome, end in ended]
    yield TokenPart(outcomes=left, columns=_chunks(rest[:0], max_length))


def _trained(outcome: RowOutcome, tokens: int) -> RowOutcome:
    outcome.tokens = outcome.trained = tokens
    outcome.cut = 0 < tokens < outcome.length
    outcome.dropped = outcome.dropped or (None if tokens else FILLS_NO_CHUNK)
    return outcome


def _chunks(tokens: "pa.Array", max_length: int) -> "pa.RecordBatch":
    import pyarrow as pa

    places = pa.array(range(0, len(tokens) + 1, max_length), pa.int32())
    chunks = pa.ListArray.from_arrays(places, tokens)
    return pa.RecordBatch.from_arrays([chunks, chunks], schema=arrow_schema(TEXT.tokens))

"""Token caches: their key, and how they are written and read."""

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lineage.errors import DataError
from lineage.filesystem.cached import cached
from lineage.filesystem.digest import DigestCache, digest_file, digest_files, digest_of
from lineage.fingerprint import digest_json, short
from lineage.source.model_files import TOKENIZER_FILES
from tasks.data.kinds import LABEL_NAMES, ROW_KINDS, TEXT, TRAIN, RowKind, RowOutcome, arrow_schema
from tasks.data.ordered_pool import ordered_map, row_batches
from tasks.data.tokens.tokenization import Tokenization, pack
from tasks.data.tokens.tokenize_rows import MAX_NAMED, REFUSED, RowTokenizer, TokenPart, TokenStats
from tasks.model.chat_template import CHAT_TEMPLATE_FILE, install_chat_template, template_text
from tasks.model.tokenizers import tokenizer_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from tasks.recipe import Input

TOKENS_VERSION = 5  # raise it when the same rows, tokenizer and options now give other tokens
_LIBRARIES = ("fastokens", "jinja2", "tokenizers", "transformers")  # that render and encode
_VOCABULARIES = ("*.model", "*.tiktoken", "*vocab*", "*merges*", "tekken.json")  # beside the files of ours


def tokens_key(tokenization: Tokenization, rows_digest: str, tokenizer_dir: Path) -> str:
    """Digest of everything that determines the tokens; a stage that writes its chat template into a model keeps it."""
    path = tokenizer_dir / CHAT_TEMPLATE_FILE
    if not ROW_KINDS[tokenization.kind].chat:
        template = ""
    elif tokenization.chat_template:
        template = template_text(tokenization.chat_template)
    else:
        template = path.read_text() if path.exists() else ""  # else it is in a file of the tokenizer
    decides = {
        "rows": rows_digest,
        "tokenizer": _tokenizer_digest(tokenizer_dir),
        "model_type": _model_type(tokenizer_dir),
        "template": template,
        "options": {**asdict(tokenization), "chat_template": None},
        "version": TOKENS_VERSION,
        "libraries": {name: version(name) for name in (*_LIBRARIES, *(("trl",) if tokenization.packing else ()))},
    }
    return digest_json(decides)


def _tokenizer_digest(directory: Path) -> str:
    """Digest of a tokenizer's files, which a stage's output copies from its input."""
    others = (path.name for pattern in _VOCABULARIES for path in directory.glob(pattern))
    digests = {}
    for name in sorted({*TOKENIZER_FILES, *others} - {CHAT_TEMPLATE_FILE}):
        path = directory / name
        if path.is_dir():
            digests[name] = digest_of(digest_files(path))
        elif path.exists():
            digests[name] = digest_file(path)
    return digest_of(digests)


def _model_type(directory: Path) -> str | None:
    """The model type, by which transformers chooses the tokenizer's class where its own files do not name it."""
    path = directory / "config.json"
    return json.loads(path.read_text()).get("model_type") if path.exists() else None


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


logger = logging.getLogger(__name__)

_MOST_NAMED = 16  # rows of a step


@dataclass(frozen=True, kw_only=True)
class TokenizedRows:
    """The tokens of prepared rows, on disk, and the outcome of every row.

    Args:
        examples: the examples for a trainer, in the order of the prepared rows: rows, chunks or packs.
        outcomes: of every prepared row.
    """

    kind: RowKind
    stats: TokenStats
    examples: "Dataset"
    outcomes: "Dataset"

    @property
    def metrics(self) -> dict[str, float]:
        return self.stats.metrics

    @property
    def columns(self) -> dict[str, list[list[int]]]:
        """All tokens, loaded into memory."""
        found: dict[str, list[list[int]]] = self.examples[:]
        return found

    def dataset(self, order: Sequence[int]) -> "Dataset":
        """The examples in the order of training, in the form that the trainer for their kind reads."""
        return self.kind.examples(self.examples.select(order))

    def named(self, indices: Sequence[int]) -> str:
        """Ids and tokens of the rows of these examples, the longest first; empty: an example is not one row."""
        if self.kind.joined or self.stats.packed or self.stats.split.count:
            return ""
        table = self.outcomes.data.table
        rows = table.filter(table["dropped"].is_null()).take(indices).to_pylist()
        rows.sort(key=lambda row: -row["length"])
        more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
        return ", ".join(f"{row['row_id']} ({row['length']} tokens)" for row in rows[:_MOST_NAMED]) + more

    def __len__(self) -> int:
        return self.stats.num_examples

    def require_like(self, previous_percent: float | None, stage: str = "STAGE") -> None:
        """Requires a share of trained tokens like that of the last run: where it halves, a mask or template broke.

        Prompts have no such share: their answers are generated.

        Args:
            previous_percent: of the last run; None: there is none.
        Raises:
            DataError: it is less than half of what it was.
        """
        percent = self.stats.trained_percent
        if not self.stats.gets_loss:
            return
        if previous_percent is not None and percent < previous_percent / 2:
            raise DataError(
                f"{percent:.3g} % of the tokens get loss, and the last run trained {previous_percent:.3g} %; at least "
                "half of the last run's share is accepted; look at the samples in the log, and correct the rows, the "
                f"chat template or max_length; or accept it: accept_label_drop=[{stage}]"
            )


def show(result: TokenizedRows, rows: "Input", max_length: int) -> None:
    """Logs what is trained and what is not, before the first step.

    Raises:
        DataError: nothing would be trained.
    """
    stats = result.stats
    if not len(result):
        raise _nothing_to_train(stats, rows.name, max_length)
    shares = " ".join(f"{name}={value:g}" for name, value in stats.metrics.items())
    lengths = " ".join(f"length_{name}={value}" for name, value in stats.quantiles.items())
    logger.info("rows_of=%s max_length=%d %s %s", rows.name, max_length, shares, lengths)
    if stats.cut.count:
        logger.warning("rows_cut=%d max_length=%d row_ids=%s", stats.cut.count, max_length, stats.cut)
    if stats.prompts_cut.count:
        logger.warning("prompts_cut=%d row_ids=%s", stats.prompts_cut.count, stats.prompts_cut)
    if stats.merged.count:
        logger.warning(
            "rows_with_boundaries=%d row_ids=%s: tokens would merge over the start of an answer, and are kept apart, "
            "as generation has them", stats.merged.count, stats.merged,
        )  # fmt: skip
    if stats.control.count:
        logger.warning(
            "rows_with_control_tokens=%d spelled=%s row_ids=%s: %s; set control_tokens to text, keep, drop or refuse",
            stats.control.count, ",".join(stats.spelled), stats.control, stats.control_done,
        )  # fmt: skip
    for reason, named in stats.dropped.items():
        logger.warning("rows_dropped=%d reason=%s row_ids=%s", named.count, reason, named)
    if stats.labels and len(stats.labels) < len(LABEL_NAMES):
        logger.warning("rows_of=%s labels=%s: every answer is %s", rows.name, stats.labels, *stats.labels)
    for sample in stats.samples:
        logger.info("sample (trained tokens in ⟦ ⟧): %s", sample)


def _nothing_to_train(stats: TokenStats, name: str, max_length: int) -> DataError:
    if FILLS_NO_CHUNK in stats.dropped:
        return DataError(
            f"all texts of {name!r} together are {stats.length} tokens, less than one chunk of "
            f"max_length={max_length}; lower max_length, or give more text"
        )
    if not stats.gets_loss:
        return DataError(
            f"no prompt of {name!r} fits max_length={max_length}: all {stats.num_rows} were left out; raise "
            "max_length or max_prompt_length, or set too_long=cut_prompt"
        )
    return DataError(
        f"no row of {name!r} has a trained token within max_length={max_length}: all {stats.num_rows} rows "
        "were left out; raise max_length, or check that the rows have answers that fit it"
    )


TOKENS, OUTCOMES = "tokens.arrow", "rows.arrow"  # streams of Arrow, as `datasets.Dataset.from_file` reads them
_ROWS_PER_PART = 256
_OUTCOME = {
    "row_id": "string", "length": "int32", "tokens": "int32", "trained": "int32", "cut": "bool_",
    "prompt_cut": "bool_", "dropped": "string", "label": "bool_", "merged": "int32", "control": "int32",
}  # fmt: skip


def _tokenized(tokenizer: RowTokenizer, rows: "pa.RecordBatch") -> TokenPart:
    """The tokens of a part of a file."""
    import pyarrow as pa

    found = list(tokenizer(rows.to_pylist()))
    examples = [
        {**columns, **row.rest} for row in found if not row.outcome.dropped for columns in (row.columns, *row.more)
    ]
    tokens = ROW_KINDS[tokenizer.tokenization.kind].tokens
    schema = arrow_schema({name: tokens[name] for name in (*found[0].columns, *found[0].rest)})
    columns = [pa.array([row[name] for row in examples], schema.field(name).type) for name in schema.names]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    return TokenPart(outcomes=[row.outcome for row in found], columns=batch)


def write_tokens(rows: Path, tokenizer: RowTokenizer, workers: int, directory: Path) -> TokenStats:
    """Writes the tokens of a Parquet file of rows, and the outcome of each row.

    Raises:
        DataError: a row is too long with ``too_long=refuse``, or cannot be rendered.
    """
    import pyarrow as pa

    kind, keeps = ROW_KINDS[tokenizer.tokenization.kind], tokenizer.tokenization.keeps_control
    stats, too_long = TokenStats(gets_loss=kind.trained, keeps_control=keeps), list[RowOutcome]()
    columns = arrow_schema(kind.tokens)
    outcomes = pa.schema([(name, getattr(pa, of)()) for name, of in _OUTCOME.items()])
    with (
        pa.ipc.new_stream(str(directory / TOKENS), columns) as token_file,
        pa.ipc.new_stream(str(directory / OUTCOMES), outcomes) as outcome_file,
    ):
        for part in _parts(rows, tokenizer, workers):
            token_file.write_batch(part.columns)
            outcome_file.write_batch(
                pa.RecordBatch.from_pylist(
                    [{name: getattr(outcome, name) for name in _OUTCOME} for outcome in part.outcomes], outcomes
                )
            )
            stats.num_examples += len(part.columns)
            for outcome in part.outcomes:
                stats.add(outcome)
                if outcome.dropped == REFUSED and len(too_long) < MAX_NAMED:
                    too_long.append(outcome)
    if too_long:
        raise _refusal(stats, too_long, tokenizer.tokenization.max_length)
    return stats


def _parts(rows: Path, tokenizer: RowTokenizer, workers: int) -> Iterator[TokenPart]:
    kind = ROW_KINDS[tokenizer.tokenization.kind]
    batches = row_batches(rows, _ROWS_PER_PART, kind.schema_with(kind.rare).names)
    parts = ordered_map(partial(_tokenized, tokenizer), batches, workers)
    return chunked(parts, tokenizer.tokenization.max_length) if kind.joined else parts


def _refusal(stats: TokenStats, too_long: Sequence[RowOutcome], max_length: int) -> DataError:
    count = stats.dropped[REFUSED].count
    more = f" and {count - len(too_long)} more" if count > len(too_long) else ""
    named = ", ".join(f"{outcome.row_id} ({outcome.length} tokens)" for outcome in too_long)
    return DataError(
        f"{count} of {stats.num_rows} rows are longer than max_length={max_length}: {named}{more}; raise max_length, "
        "shorten the rows, or set too_long to cut_answer, cut_prompt or drop"
    )


_STATS = "account.json"
_NUM_SAMPLES = 3


def load_or_make(
    tokenization: Tokenization,
    rows: "Input",
    tokenizer_dir: Path,
    cache_dir: Path | None,
    workers: int,
    *,
    side: str = TRAIN,
) -> TokenizedRows:
    """The tokens of one split of prepared rows, from the cache if it has them.

    Args:
        tokenizer_dir: a model's directory, or one with only its tokenizer.
        cache_dir: may be shared by processes and machines; None: the tokens are in an unnamed file until they are no
            longer used.
        workers: processes, for many rows.
    Raises:
        DataError: a row cannot be rendered, or is too long with ``too_long=refuse``.
        ConfigError: the chat template cannot be used.
    """
    file = rows.path / side
    if cache_dir is None:
        with TemporaryDirectory() as scratch:
            _make(tokenization, file, tokenizer_dir, workers, Path(scratch))
            return _read(Path(scratch), tokenization)  # the file stays while it is mapped
    cache = cache_dir / "tokens"
    digest = DigestCache(cache / "digests.json").digest(file)
    entry = cache / short(tokens_key(tokenization, digest, tokenizer_dir))
    with cached(entry, lambda draft: _make(tokenization, file, tokenizer_dir, workers, draft)) as is_new:
        logger.info("rows_of=%s tokens=%s state=%s", rows.name, entry, "made" if is_new else "reused")
        return _read(entry, tokenization)


def _make(tokenization: Tokenization, rows: Path, tokenizer_dir: Path, workers: int, directory: Path) -> None:
    """Writes the tokens, the outcomes of rows and, last, the stats into a directory."""
    from datasets import Dataset

    tokenizer = tokenizer_of(tokenizer_dir)
    kind = ROW_KINDS[tokenization.kind]
    if tokenization.chat_template and kind.chat:
        install_chat_template(tokenizer, tokenization.chat_template)
    stats = write_tokens(rows, RowTokenizer.of(tokenization, tokenizer), workers, directory)
    examples = Dataset.from_file(str(directory / TOKENS))
    stats.samples = [kind.sample(tokenizer, row) for row in examples.select(range(min(_NUM_SAMPLES, len(examples))))]
    if tokenization.packing and stats.num_examples:
        stats.packed, stats.num_examples = True, pack(directory / TOKENS, tokenization.max_length)
    (directory / _STATS).write_text(stats.to_json())


def _read(entry: Path, tokenization: Tokenization) -> TokenizedRows:
    from datasets import Dataset

    stats = TokenStats.from_json((entry / _STATS).read_text())
    examples, outcomes = (Dataset.from_file(str(entry / name)) for name in (TOKENS, OUTCOMES))
    return TokenizedRows(kind=ROW_KINDS[tokenization.kind], stats=stats, examples=examples, outcomes=outcomes)

"""Converts rows to training examples: tokens, labels, the policy for long rows, and statistics of the outcomes."""

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, DataError
from lineage.filesystem.cached import cached
from lineage.filesystem.digest import DigestCache, digest_file, digest_files, digest_of
from lineage.fingerprint import digest_json, short
from lineage.source.model_files import TOKENIZER_FILES
from tasks.data.images import require_no_images
from tasks.data.kinds import (
    IGNORED,
    LABEL_NAMES,
    PLACES,
    ROW_KINDS,
    TRAIN,
    TRAINED,
    Column,
    Row,
    RowKind,
    RowOutcome,
    TokenRow,
    arrow_schema,
    columns_of,
    messages_of,
    ordered_map,
    row_batches,
    tools_of,
    untrained_of,
)
from tasks.data.tokens.encoding import (
    Encoded,
    Encoder,
    ImageSpan,
    Rendered,
    Span,
    common_prefix,
    encode_rendered,
    encoder_of,
)
from tasks.data.tokens.rendering import ControlTokens, Renderer, StopTokens, Turns
from tasks.data.tokens.token_stats import CONTROL_TOKENS, MAX_NAMED, TokenStats
from tasks.data.tokens.tokenization import FILLS_NO_CHUNK, Tokenization, TokenPart, chunked, pack
from tasks.model.chat_template import CHAT_TEMPLATE_FILE, install_chat_template, template_text
from tasks.model.tokenizers import adds_bos, tokenizer_of
from tasks.model.vision import Vision, require_reads_images

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from tasks.recipe import Input


REFUSED = "refused"  # a row with this reason is an error
ANSWER_TOO_LONG = "answer_too_long"  # nothing of the prompt would be left
IMAGE_CUT = "image_cut"  # a cut would go through an image, or leave one out


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The kept tokens of a row.

    Args:
        head: first tokens that are never cut: the model's BOS, where it has one.
        removed: tokens that are cut after those, from the beginning of the prompt.
        max_length: of the kept tokens.
    """

    head: int
    removed: int
    max_length: int

    def of(self, ids: Sequence[int]) -> list[int]:
        if not self.removed and len(ids) <= self.max_length:
            return list(ids)
        return [*ids[: self.head], *ids[self.head + self.removed : self.removed + self.max_length]]

    def has(self, start: int, end: int) -> bool:
        """Whether all tokens from ``start`` to ``end`` are kept."""
        return end <= self.head or (start >= self.head + self.removed and end <= self.removed + self.max_length)


def keep(tokenization: Tokenization, outcome: RowOutcome, prompt: int, head: int) -> Kept:
    """Cuts a row of ``outcome.length`` tokens, ``prompt`` of them before the first answer; updates its outcome."""
    longest = tokenization.max_prompt_length
    removed = max(0, prompt - longest) if longest else 0
    over = outcome.length - removed - tokenization.max_length
    if over > 0 and not outcome.dropped:
        match tokenization.too_long:
            case None | "cut_answer":
                outcome.cut = True
            case "cut_prompt":
                removed += over
                if removed >= prompt - head:  # nothing of the prompt would be left
                    outcome.dropped = ANSWER_TOO_LONG
            case "drop":
                outcome.dropped = "too_long"
            case "refuse":
                outcome.dropped = REFUSED
    outcome.prompt_cut = removed > 0 and not outcome.dropped
    return Kept(head=head, removed=removed, max_length=tokenization.max_length)


def keep_end(tokenization: Tokenization, outcome: RowOutcome, head: int) -> Kept:
    """Cuts a prompt of ``outcome.length`` tokens, which generation continues; updates its outcome."""
    longest = tokenization.max_prompt_length or tokenization.max_length
    removed = max(0, outcome.length - longest)
    if removed and not outcome.dropped and tokenization.too_long in ("drop", "refuse"):
        outcome.dropped = "too_long" if tokenization.too_long == "drop" else REFUSED
    outcome.prompt_cut = removed > 0 and not outcome.dropped
    return Kept(head=head, removed=removed, max_length=longest)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The tokens of a prompt with its answer.

    Args:
        start: where the answer begins.
        gaps: start and end of what others than the assistant say within the answer, such as the result of a call.
        images: start and end of the tokens of each image, and its place.
    """

    ids: list[int]
    start: int
    gaps: Sequence[tuple[int, int]]
    images: Sequence[ImageSpan]

    def trained(self, kept: Kept, start: int) -> list[int]:
        """1 for each kept token from ``start`` on that is trained, 0 for the others; empty: all are."""
        if not self.gaps:
            return []
        mask = [1] * len(self.ids)
        for begin, end in self.gaps:
            mask[begin:end] = [0] * (end - begin)
        answer = kept.of(mask)[start:]
        return answer if 0 in answer else []


NOTHING_TO_TRAIN = "nothing_to_train"
_NO_TEMPLATE = (
    "{model} has no chat template, and conversations cannot be rendered without one; set chat_template=chatml on the "
    "sft stage (the template then travels with its output)"
)


@dataclass(frozen=True, kw_only=True)
class RowTokenizer:
    """Tokenizes rows, each independently. Can be pickled.

    Args:
        renderer: None: the tokenizer has no chat template, or texts need none.
        control: the control tokens of documents.
        bos: the token that begins every text of the model; None: it has none.
        adds_bos: whether the tokenizer itself puts it before a text.
        end_of_document: the token after a text; None: the tokenizer has none.
        unknown: the token of text that the tokenizer has none for; None: it has one for all.
        vision: how the images of rows become tokens; None: they have none.
    """

    tokenization: Tokenization
    encoder: Encoder
    renderer: Renderer | None
    control: ControlTokens
    bos: int | None
    adds_bos: bool
    end_of_document: int | None
    unknown: int | None
    vision: Vision | None = None

    @staticmethod
    def of(
        tokenization: Tokenization, tokenizer: "PreTrainedTokenizerBase", vision: Vision | None = None
    ) -> "RowTokenizer":
        has_template = tokenizer.chat_template and ROW_KINDS[tokenization.kind].chat
        end, marks = end_of_document(tokenizer), {"keeps_control": tokenization.keeps_control, "images": bool(vision)}
        return RowTokenizer(
            tokenization=tokenization,
            encoder=encoder_of(tokenizer),
            renderer=Renderer.of(tokenizer, tokenization.thinking, **marks) if has_template else None,
            vision=vision,
            control=ControlTokens(texts=frozenset(StopTokens.of(tokenizer).special)),
            bos=tokenizer.bos_token_id,
            adds_bos=adds_bos(tokenizer),
            end_of_document=None if end is None else tokenizer.convert_tokens_to_ids(end),
            unknown=unknown_of(tokenizer),
        )

    def __call__(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """The tokens of rows of that kind."""
        tokenize: Callable[[Sequence[Row]], Iterator[TokenRow]]
        tokenize = getattr(self, ROW_KINDS[self.tokenization.kind].tokenize)
        return tokenize(rows)

    def texts(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``input_ids``: a text with the tokens that begin and end it; nothing is cut."""
        before = [self.bos] if self.adds_bos and self.bos is not None else []
        after = [] if self.end_of_document is None else [self.end_of_document]
        texts = [self._document(str(row["text"])) for row in rows]
        for row, text, encoded in zip(rows, texts, encode_rendered(self.encoder, texts), strict=True):
            ids = [*before, *encoded.ids, *after]
            outcome = RowOutcome(row_id=str(row["row_id"]), length=len(ids))
            self._count(outcome, text, encoded)
            if outcome.dropped:
                outcome.length = 0  # it takes no place in the chunks
            yield TokenRow(outcome=outcome, columns={"input_ids": ids})

    def _document(self, text: str) -> Rendered:
        spelled = self.control.spelled(text)
        if not spelled or self.tokenization.keeps_control:
            return Rendered(text=text, spelled=spelled)
        return Rendered(text=text, spelled=spelled, literal=self.control.places(text))

    def _count(self, outcome: RowOutcome, text: Rendered, whole: Encoded) -> None:
        """Counts unknown and spelled control tokens of a text, and starts of answers over which tokens would merge.

        Raises:
            DataError: it spells control tokens, with ``control_tokens=refuse``.
        """
        outcome.merged = max(outcome.merged, whole.num_merged)
        outcome.spelled = max(outcome.spelled, text.spelled, key=len)
        outcome.unknown = max(outcome.unknown, whole.ids.count(self.unknown) if self.unknown is not None else 0)
        if not text.spelled:
            return
        if self.tokenization.control_tokens == "refuse":
            raise DataError(
                f"row {outcome.row_id}: its texts spell {', '.join(sorted(set(text.spelled)))}; rows whose control "
                "tokens are all written by the chat template are accepted; correct or remove the row, or set "
                "control_tokens to text, keep or drop"
            )
        if self.tokenization.control_tokens == "drop":
            outcome.dropped = CONTROL_TOKENS

    def conversations(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``input_ids`` and ``labels``: only assistant turns are trained."""
        rendered = [self._render(row, ["messages"]) for row in rows]
        encoded = encode_rendered(self.encoder, [turns for each in rendered for turns in each])
        for row, each in zip(rows, rendered, strict=True):
            untrained, numbers = untrained_of(row), itertools.count()
            made = []
            for turns in each:
                trained = [next(numbers) not in untrained for _ in turns.spans]
                made.append((any(trained), *self._conversation(str(row["row_id"]), turns, next(encoded), trained)))
            # A text of which nothing is to be trained is no example, unless that is so of the whole row.
            meant = [(outcome, columns) for is_meant, outcome, columns in made if is_meant] or [made[0][1:]]
            kept = [columns for outcome, columns in meant if not outcome.dropped] or [meant[0][1]]
            yield TokenRow(outcome=joined([outcome for outcome, _ in meant]), columns=kept[0], more=kept[1:])

    def _conversation(
        self, row_id: str, turns: Turns, whole: Encoded, trained: Sequence[bool]
    ) -> tuple[RowOutcome, dict[str, list[int]]]:
        outcome = RowOutcome(row_id=row_id, length=len(whole.ids))
        self._count(outcome, turns, whole)
        labels = [IGNORED] * len(whole.ids)
        places = [self._tokens_of(turns, span, whole, outcome) for span in turns.spans]
        for (start, end), is_trained in zip(places, trained, strict=True):
            if is_trained:
                labels[start:end] = whole.ids[start:end]
        kept = keep(self.tokenization, outcome, places[0][0], self._head(whole.ids))
        columns = {"input_ids": kept.of(whole.ids), "labels": kept.of(labels)}
        columns |= self._places(_images_of(turns, whole), kept, outcome)
        predicted = columns["labels"][1:]
        outcome.tokens, outcome.trained = len(columns["labels"]), len(predicted) - predicted.count(IGNORED)
        if not outcome.trained:
            outcome.dropped = outcome.dropped or NOTHING_TO_TRAIN
        return outcome, columns

    def _places(self, images: Sequence[ImageSpan], kept: Kept, outcome: RowOutcome) -> dict[str, list[int]]:
        """The column of a row's images; a row that would lose a part of one is dropped."""
        if not self.vision:
            return {}
        if not all(kept.has(start, end) for start, end, _ in images):
            outcome.dropped = outcome.dropped or IMAGE_CUT
        if not self.tokenization.packing:
            return {PLACES: [place for _, _, place in images]}
        marks = [0] * outcome.length  # a pack joins columns of one length
        for start, _, place in images:
            marks[start] = place + 1
        return {PLACES: kept.of(marks)}

    def _tokens_of(self, turns: Turns, span: Span, whole: Encoded, outcome: RowOutcome) -> tuple[int, int]:
        """Where a turn begins and ends in the tokens; records the token that ends it.

        Raises:
            ConfigError: the tokenizer splits that token.
        """
        assert self.renderer
        start, end = (whole.tokens_before(place) for place in span)
        stops = self.renderer.stops.ids
        if end < len(whole.ids) and whole.ids[end] in stops and (end == start or whole.ids[end - 1] not in stops):
            end += 1  # the token includes the blanks after it, and so ends later
        if end == start or whole.ids[end - 1] not in stops:
            raise ConfigError(
                f"row {outcome.row_id}: the assistant's turn ends in {turns.text[span[0] : span[1]][-20:]!r}, and the "
                "tokenizer makes no token of its own of that, so the model would never learn to stop; a tokenizer that "
                "has the special tokens of its chat template is accepted; add them, or set chat_template=chatml on the "
                "sft stage"
            )
        outcome.stops.add(whole.ids[end - 1])
        return start, end

    def preferences(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``prompt_ids``, ``chosen_ids`` and ``rejected_ids``: prompt and answer fit ``max_length``."""
        rendered = [self._render_answer(row, "prompt", side) for row in rows for side in ("chosen", "rejected")]
        encoded = encode_rendered(self.encoder, rendered)
        sides = zip(rendered, encoded, strict=True)
        for row in rows:
            outcome = RowOutcome(row_id=str(row["row_id"]), length=0)
            chosen, rejected = (self._answer(*next(sides), outcome) for _ in ("chosen", "rejected"))
            yield self._pair(outcome, chosen, rejected)

    def _answer(self, turns: Turns, whole: Encoded, outcome: RowOutcome) -> "Answered":
        """The tokens of a prompt with its answer."""
        self._count(outcome, turns, whole)
        places = [self._tokens_of(turns, span, whole, outcome) for span in turns.spans]
        gaps = [(end, start) for (_, end), (start, _) in pairwise(places)]
        images = _images_of(turns, whole)
        return Answered(ids=whole.ids[: places[-1][1]], start=places[0][0], gaps=gaps, images=images)

    def _pair(self, outcome: RowOutcome, chosen: "Answered", rejected: "Answered") -> TokenRow:
        """A pair from the tokens of each side; the prompt is what both share."""
        outcome.length = max(len(chosen.ids), len(rejected.ids))
        start = min(chosen.start, rejected.start, common_prefix(chosen.ids, rejected.ids))
        kept = keep(self.tokenization, outcome, start, self._head(chosen.ids))
        left, right = kept.of(chosen.ids), kept.of(rejected.ids)
        start -= kept.removed
        prompt, good, bad = left[:start], left[start:], right[start:]
        sides = {"chosen": chosen, "rejected": rejected}
        masks = {f"{name}_{TRAINED}": side.trained(kept, start) for name, side in sides.items()}
        outcome.tokens = 2 * len(prompt) + len(good) + len(bad)
        outcome.trained = len(good) + len(bad) - sum(mask.count(0) for mask in masks.values())
        if not (good and bad):
            outcome.dropped = outcome.dropped or NOTHING_TO_TRAIN
        elif good == bad:
            outcome.dropped = outcome.dropped or "equal_after_the_cut"
        columns = {"prompt_ids": prompt, "chosen_ids": good, "rejected_ids": bad, **masks}
        columns |= self._places(chosen.images, kept, outcome)
        return TokenRow(outcome=outcome, columns=columns)

    def unpaired(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``prompt_ids``, ``completion_ids`` and ``label``: prompt and answer fit ``max_length``."""
        rendered = [self._render_answer(row, "prompt", "completion") for row in rows]
        encoded = encode_rendered(self.encoder, rendered)
        for row, turns, whole in zip(rows, rendered, encoded, strict=True):
            outcome = RowOutcome(row_id=str(row["row_id"]), length=0, label=bool(row["label"]))
            answered = self._answer(turns, whole, outcome)
            outcome.length = len(answered.ids)
            kept = keep(self.tokenization, outcome, answered.start, self._head(answered.ids))
            ids, start = kept.of(answered.ids), answered.start - kept.removed
            prompt, answer, mask = ids[:start], ids[start:], answered.trained(kept, start)
            outcome.tokens, outcome.trained = len(ids), len(answer) - mask.count(0)
            if not answer:
                outcome.dropped = outcome.dropped or NOTHING_TO_TRAIN
            columns = {"prompt_ids": prompt, "completion_ids": answer, f"completion_{TRAINED}": mask}
            columns |= self._places(answered.images, kept, outcome)
            yield TokenRow(outcome=outcome, columns=columns, rest={"label": outcome.label})

    def prompts(self, rows: Sequence[Row]) -> Iterator[TokenRow]:
        """``prompt_ids`` up to where the assistant begins to speak, its ``prompt`` and ``columns`` as JSON text.

        A prompt of more than ``max_prompt_length`` tokens, or else ``max_length``, keeps its last ones.
        """
        renderer, texts = self._required_renderer(), list[Rendered]()
        for row in rows:
            messages, row_id = messages_of(row["prompt"]), str(row["row_id"])
            rendered = renderer.prompt(messages, tools_of(row), row_id)
            texts.append(self.vision.expanded(rendered, messages, row_id) if self.vision else rendered)
        for row, text, whole in zip(rows, texts, encode_rendered(self.encoder, texts), strict=True):
            outcome = RowOutcome(row_id=str(row["row_id"]), length=len(whole.ids))
            self._count(outcome, text, whole)
            kept = keep_end(self.tokenization, outcome, self._head(whole.ids))
            ids = kept.of(whole.ids)
            places = self._places(_images_of(text, whole), kept, outcome)
            outcome.tokens = len(ids)
            prompt = json.dumps(messages_of(row["prompt"]), ensure_ascii=False)
            columns = columns_of(row)
            rest = {"prompt": prompt, "columns": json.dumps(columns, ensure_ascii=False) if columns else None}
            yield TokenRow(outcome=outcome, columns={"prompt_ids": ids, **places}, rest=rest)

    def _required_renderer(self) -> Renderer:
        if self.renderer is None:
            raise ConfigError(_NO_TEMPLATE.format(model="the model"))
        return self.renderer

    def _render_answer(self, row: Row, *columns: str) -> Turns:
        """A prompt and its answer, in one text.

        Raises:
            DataError: the answer is of several turns, and no text has them all.
        """
        turns = self._render(row, columns)
        if len(turns) > 1:
            raise DataError(
                f"row {row['row_id']}: its {columns[-1]} has several turns of the assistant, and the model's chat "
                "template renders the earlier ones otherwise than the last one; answers of one turn, or of turns and "
                "calls that the template renders in one way, are accepted; split the row"
            )
        return turns[0]

    def _render(self, row: Row, columns: Sequence[str]) -> list[Turns]:
        """The messages of columns, one after the other; the assistant is trained in the last column."""
        renderer = self._required_renderer()
        *before, messages = (messages_of(row[column]) for column in columns)
        prompt = [message for part in before for message in part]
        if not any(message["role"] == "assistant" for message in messages):
            raise DataError(
                f"row {row['row_id']}: the assistant says nothing in its {columns[-1]}; at least one message of the "
                "assistant is accepted; add the answer, or remove the row"
            )
        found = renderer.turns([*prompt, *messages], tools_of(row), str(row["row_id"]), first=len(prompt))
        vision = self.vision
        if not vision:
            return found
        return [vision.expanded(each, [*prompt, *messages], str(row["row_id"])) for each in found]

    def _head(self, ids: Sequence[int]) -> int:
        """How many first tokens are never cut."""
        return int(self.bos is not None and ids[0] == self.bos)


def _images_of(turns: Rendered, whole: Encoded) -> list[ImageSpan]:
    """Where the tokens of a text's images are, and the place of each."""
    return [(whole.tokens_before(start), whole.tokens_before(end), place) for start, end, place in turns.images]


def joined(outcomes: Sequence[RowOutcome]) -> RowOutcome:
    """The outcome of a row from those of its examples: dropped if all are dropped, cut if one is cut."""
    first, *others = outcomes
    if not others:
        return first
    kept = [outcome for outcome in outcomes if not outcome.dropped]
    refused = next((outcome for outcome in outcomes if outcome.dropped == REFUSED), None)
    return RowOutcome(
        row_id=first.row_id,
        length=max(outcome.length for outcome in outcomes),
        tokens=sum(outcome.tokens for outcome in kept),
        trained=sum(outcome.trained for outcome in kept),
        cut=any(outcome.cut or outcome.dropped for outcome in outcomes),
        prompt_cut=any(outcome.prompt_cut for outcome in kept),
        dropped=REFUSED if refused else None if kept else first.dropped,
        stops=set().union(*(outcome.stops for outcome in outcomes)),
        num_examples=len(kept),
        merged=max(outcome.merged for outcome in outcomes),
        spelled=first.spelled,
        unknown=max(outcome.unknown for outcome in outcomes),
    )


def unknown_of(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The token of text that a tokenizer has none for; one that also begins, ends or pads is none (GPT-2's)."""
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return None if tokenizer.unk_token_id in others else tokenizer.unk_token_id


def end_of_document(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """``<|endoftext|>`` where the vocabulary has it (a chat model's eos ends a turn, not a document), else eos."""
    if "<|endoftext|>" in tokenizer.get_vocab():
        return "<|endoftext|>"
    return None if tokenizer.eos_token is None else str(tokenizer.eos_token)


def require_chat_template(tokenizer: "PreTrainedTokenizerBase", policy: "Input") -> None:
    """Refuses a model that cannot render a conversation."""
    if tokenizer.chat_template is None:
        raise ConfigError(_NO_TEMPLATE.format(model=f"the model of {policy.name!r}"))


TOKENS_VERSION = 7  # raise it when the same rows, tokenizer and options now give other tokens
_LIBRARIES = ("fastokens", "jinja2", "tokenizers", "transformers")  # that render and encode
_VOCABULARIES = ("*.model", "*.tiktoken", "*vocab*", "*merges*", "tekken.json")  # beside the files of ours


def tokens_key(
    tokenization: Tokenization, rows_digest: str, tokenizer_dir: Path, images: Mapping[str, object] | None = None
) -> str:
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
        "tokenizer": tokenizer_digest(tokenizer_dir),
        "model_type": _model_type(tokenizer_dir),
        "template": template,
        "options": {name: value for name, value in asdict(tokenization).items() if name != "images"}
        | {"chat_template": None},
        **({"images": images} if images else {}),
        "version": TOKENS_VERSION,
        "libraries": {name: version(name) for name in (*_LIBRARIES, *(("trl",) if tokenization.packing else ()))},
    }
    return digest_json(decides)


def tokenizer_digest(directory: Path) -> str:
    """Digest of a tokenizer's files but its chat template's, which a stage's output copies from its input."""
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
    """Logs what is trained and what is not, before the first step (DataError: nothing would be trained)."""
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
    if stats.unknown.count:
        logger.warning(
            "rows_with_unknown_tokens=%d row_ids=%s: the tokenizer has no token for a part of their text; the model "
            "reads and learns its unknown token there. Leave these rows out, or use a base whose tokenizer has them",
            stats.unknown.count, stats.unknown,
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
    counts = ", ".join(f"{reason} {named.count}" for reason, named in stats.dropped.items())
    return DataError(
        f"no row of {name!r} has a trained token within max_length={max_length}: all {stats.num_rows} rows "
        f"were left out ({counts}); raise max_length, or check that the rows have answers that fit it"
    )


TOKENS, OUTCOMES = "tokens.arrow", "rows.arrow"  # streams of Arrow, as `datasets.Dataset.from_file` reads them
_ROWS_PER_PART = 256
_OUTCOME = {
    "row_id": "string", "length": "int32", "tokens": "int32", "trained": "int32", "cut": "bool_",
    "prompt_cut": "bool_", "dropped": "string", "label": "bool_", "merged": "int32", "control": "int32",
    "unknown": "int32",
}  # fmt: skip


def _tokenized(tokenizer: RowTokenizer, rows: "pa.RecordBatch") -> TokenPart:
    """The tokens of a part of a file."""
    import pyarrow as pa

    found = list(tokenizer(rows.to_pylist()))
    examples = [
        {**columns, **row.rest} for row in found if not row.outcome.dropped for columns in (row.columns, *row.more)
    ]
    names = {*found[0].columns, *found[0].rest}
    schema = arrow_schema({name: column for name, column in _columns(tokenizer).items() if name in names})
    columns = [pa.array([row[name] for row in examples], schema.field(name).type) for name in schema.names]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    return TokenPart(outcomes=[row.outcome for row in found], columns=batch)


def _columns(tokenizer: RowTokenizer) -> Mapping[str, Column]:
    """The columns of a file of tokens."""
    images = {PLACES: Column.IDS} if tokenizer.vision else {}
    return {**ROW_KINDS[tokenizer.tokenization.kind].tokens, **images}


def write_tokens(rows: Path, tokenizer: RowTokenizer, workers: int, directory: Path) -> TokenStats:
    """Writes the tokens of a Parquet file of rows, and the outcome of each row.

    Raises:
        DataError: a row is too long with ``too_long=refuse``, or cannot be rendered.
    """
    import pyarrow as pa

    kind, keeps = ROW_KINDS[tokenizer.tokenization.kind], tokenizer.tokenization.keeps_control
    stats, too_long = TokenStats(gets_loss=kind.trained, keeps_control=keeps), list[RowOutcome]()
    columns = arrow_schema(_columns(tokenizer))
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


_STATS, _SAMPLES = "account.json", "samples.json"
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
    if not tokenization.images:
        remedy = ", or set model.kind=vlm, for a model and a method that read images (docs/vlm.md)"
        require_no_images(rows.path, rows.name, "this training, where images is null,", remedy)
    vision = Vision.of(tokenizer_dir, rows.path, tokenization.images)
    if vision:
        require_reads_images(tokenizer_dir, f"the model of {rows.name!r}")
    file = rows.path / side
    if cache_dir is None:
        with TemporaryDirectory() as scratch:
            _make(tokenization, file, tokenizer_dir, workers, Path(scratch), vision)
            return _read(Path(scratch), tokenization)  # the file stays while it is mapped
    cache = cache_dir / "tokens"
    digests = DigestCache(cache / "digests.json")
    images = vision.key(digests) if vision else None
    entry = cache / short(tokens_key(tokenization, digests.digest(file), tokenizer_dir, images))
    with cached(entry, lambda draft: _make(tokenization, file, tokenizer_dir, workers, draft, vision)) as is_new:
        logger.info("rows_of=%s tokens=%s state=%s", rows.name, entry, "made" if is_new else "reused")
        return _read(entry, tokenization)


def _make(
    tokenization: Tokenization, rows: Path, tokenizer_dir: Path, workers: int, directory: Path, vision: Vision | None
) -> None:
    """Writes the tokens, the outcomes of rows and, last, the stats into a directory."""
    from datasets import Dataset

    tokenizer = tokenizer_of(tokenizer_dir)
    kind = ROW_KINDS[tokenization.kind]
    if tokenization.chat_template and kind.chat:
        install_chat_template(tokenizer, tokenization.chat_template)
    stats = write_tokens(rows, RowTokenizer.of(tokenization, tokenizer, vision), workers, directory)
    examples = Dataset.from_file(str(directory / TOKENS))
    samples = [kind.sample(tokenizer, row) for row in examples.select(range(min(_NUM_SAMPLES, len(examples))))]
    (directory / _SAMPLES).write_text(json.dumps(samples, ensure_ascii=False))
    if tokenization.packing and stats.num_examples:
        stats.packed, stats.num_examples = True, pack(directory / TOKENS, tokenization.max_length)
    (directory / _STATS).write_text(stats.to_json())


def _read(entry: Path, tokenization: Tokenization) -> TokenizedRows:
    from datasets import Dataset

    stats = TokenStats.from_json((entry / _STATS).read_text())
    if (entry / _SAMPLES).exists():  # earlier versions have them with the statistics
        stats.samples = json.loads((entry / _SAMPLES).read_text())
    examples, outcomes = (Dataset.from_file(str(entry / name)) for name in (TOKENS, OUTCOMES))
    return TokenizedRows(kind=ROW_KINDS[tokenization.kind], stats=stats, examples=examples, outcomes=outcomes)

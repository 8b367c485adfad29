"""Sequence-level distillation: a teacher answers prompts. Kim & Rush 2016, arXiv:1606.07947, section 3.2."""

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.context import Metrics, TrainContext
from tasks.data.images import require_no_images
from tasks.data.kinds import CONVERSATIONS, HELD_OUT, PROMPTS, ROW_ID, TRAIN, UNTRAINED, Row, untrained_of
from tasks.data.tokens.tokenization import Tokenization
from tasks.recipe import Inputs, Method
from tasks.train.generation.generating import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tasks.evaluate.answers import Answer

logger = logging.getLogger(__name__)

_BATCHES_AT_ONCE = 64  # between two lines of the log


@dataclass(frozen=True, kw_only=True)
class TeacherAnswers(Method):
    """Conversations of prompts and a teacher's answers, on which SFT then trains a student.

    The student may have another tokenizer than the teacher. Rows keep the side and the id of their prompt; further
    answers to it add ``-a1``, ``-a2`` ... Answers that are empty are dropped; all that is dropped is counted.
    The schema of the files has the digest of the teacher's weights.

    Slots:
        prompts, or rows: rows of prompts; or conversations, whose last answer the teacher's replaces.

    Args:
        max_length: tokens of prompt and answer; a prompt keeps the last of them that ``max_new_tokens`` leaves.
        sampling: of the answers; the noise of each follows from the seed and its row. None: the most probable tokens.
        num_beams: number of beams of a beam search, as in the paper.
        unfinished: what is done with an answer without an end within ``max_new_tokens``.
    """

    consumes: ClassVar[Mapping[str, Kind]] = {
        "teacher": Kind.CHECKPOINT,
        "prompts": Kind.PROMPTS,
        "rows": Kind.CONVERSATIONS,
    }
    optional: ClassVar[frozenset[str]] = frozenset({"prompts", "rows"})
    produces: ClassVar[Kind] = Kind.CONVERSATIONS
    measures: ClassVar[tuple[str, ...]] = (
        "train_rows", "held_out_rows", "prompts_cut", "answers", "unfinished", "empty", "dropped", "weights/teacher",
    )  # fmt: skip
    uses_gpu: ClassVar[bool] = True
    cluster_workers: ClassVar[Literal["all", "one", "none"]] = "all"
    chat_slot: ClassVar[str | None] = "teacher"

    max_new_tokens: Annotated[int, Gt(0)] = 256  # tokens of an answer
    max_length: Annotated[int, Gt(1)] = 2048
    num_answers: Annotated[int, Gt(0)] = 1  # to each prompt
    sampling: Sampling | None = None
    num_beams: Annotated[int, Gt(0)] = 1
    unfinished: Literal["drop", "keep"] = "drop"
    seed: Annotated[int, Ge(0)] = 0  # of the noise of sampling

    def __post_init__(self) -> None:
        if self.max_new_tokens >= self.max_length:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens} leaves nothing of max_length={self.max_length} for a prompt; "
                f"set max_length={2 * self.max_new_tokens}"
            )
        if self.num_answers > 1 and self.sampling is None:
            raise ConfigError(
                f"num_answers={self.num_answers}: without sampling, all answers to a prompt are the same; set "
                "sampling.temperature=1.0, or num_answers=1"
            )
        if self.num_beams > 1 and self.sampling is not None:
            raise ConfigError(
                f"num_beams={self.num_beams} with sampling: a beam search looks for the most probable answer; set "
                "sampling=null, or num_beams=1"
            )

    def check_slots(self, filled: frozenset[str]) -> None:
        """Refuses a stage without prompts, or with two sources of them.

        Args:
            filled: the slots that have an input.
        """
        found = sorted(self.optional & filled)
        if len(found) != 1:
            raise ConfigError(
                f"{' and '.join(found) or 'neither prompts nor rows'}: the teacher answers one of them; set "
                "inputs.prompts=<prompts>, or inputs.rows=<conversations>"
            )

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from tasks.data.tokens.tokenize_rows import require_chat_template
        from tasks.model.positions import require_positions
        from tasks.model.tokenizers import tokenizer_of
        from tasks.train.generation.one_policy import digests_of_weights, version_metrics
        from tasks.train.models.load import load_on_device

        self.check_slots(frozenset(inputs))
        teacher = inputs["teacher"]
        weights = digests_of_weights({"teacher": teacher})
        tokenizer = tokenizer_of(teacher.path)
        require_chat_template(tokenizer, teacher)
        model = load_on_device(teacher, ctx).eval()
        ctx.loaded("teacher")
        require_positions(model.config, self.max_length)
        prompts = inputs["prompts" if "prompts" in inputs else "rows"]
        require_no_images(prompts.path, prompts.name, type(self).__name__)
        counts = Counter[str](dropped=0)
        for side in (TRAIN, HELD_OUT):
            asked = [_asked(row) for row in pq.read_table(prompts.path / side).to_pylist()]
            answered = list(self._answered(asked, model, tokenizer, ctx, counts))
            counts[f"{side.partition('.')[0]}_rows"] = len(answered)
            schema = CONVERSATIONS.schema_with([UNTRAINED] if any(row.get(UNTRAINED) for row in answered) else [])
            table = pa.Table.from_pylist(answered, schema=schema.with_metadata(weights))
            if ctx.rank == 0:
                pq.write_table(table, ctx.output_dir / side)
        logger.info("rows_of=%s %s", prompts.name, " ".join(f"{name}={count}" for name, count in counts.items()))
        if not counts["train_rows"]:
            raise DataError(
                f"{teacher.name} gave no answer that can be trained on: of {counts['answers']} answers, "
                f"{counts['unfinished']} are unfinished and {counts['empty']} are empty; raise max_new_tokens (now "
                f"{self.max_new_tokens}), or take a teacher that was trained on conversations"
            )
        return {**{name: float(count) for name, count in counts.items()}, **version_metrics(weights)}

    def _answered(
        self, rows: Sequence[Row], model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", ctx: TrainContext,
        counts: Counter[str],
    ) -> Iterator[Row]:  # fmt: skip
        """The conversations of one side, in the order of its prompts."""
        from tasks.data.tokens.tokenize_rows import RowTokenizer

        limit = Tokenization(kind=PROMPTS.kind, max_length=self.max_length - self.max_new_tokens)
        size = _BATCHES_AT_ONCE * ctx.resources.rows_at_once
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            tokens = list(RowTokenizer.of(limit, tokenizer)(part))
            counts["prompts_cut"] += sum(each.outcome.prompt_cut for each in tokens)
            ids = [each.columns["prompt_ids"] for each in tokens]
            for number in range(self.num_answers):
                found = self._answers(part, ids, number, model, tokenizer, ctx)
                for row, answer in zip(part, found, strict=True):
                    counts.update(answers=1, unfinished=not answer.finished, empty=not answer.text.strip())
                    if answer.text.strip() and (answer.finished or self.unfinished == "keep"):
                        yield _conversation(row, answer.text, number)
                    else:
                        counts["dropped"] += 1
            logger.info("answered=%d of %d prompts", start + len(part), len(rows))

    def _answers(
        self, rows: Sequence[Row], prompts: Sequence[list[int]], number: int, model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase", ctx: TrainContext,
    ) -> "list[Answer]":  # fmt: skip
        from tasks.evaluate.answers import answers_of, greedy_answers, sampled_tokens
        from tasks.evaluate.scoring import Batches

        size = Batches.of(ctx)
        if self.sampling is None:
            return greedy_answers(model, tokenizer, prompts, self.max_new_tokens, size, self.num_beams)
        seeds = [random.Random(f"{self.seed} {row[ROW_ID]} {number}").getrandbits(63) for row in rows]
        tokens = sampled_tokens(model, tokenizer, prompts, self.max_new_tokens, size, self.sampling, seeds)
        return answers_of(model, tokenizer, tokens)


def _asked(row: Row) -> Row:
    """A row of prompts: for a conversation, the messages before its last answer."""
    if "prompt" in row:
        return row
    messages = row["messages"]
    assert isinstance(messages, list)
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    before = sum(message["role"] == "assistant" for message in messages[:last])
    untrained = sorted(place for place in untrained_of(row) if place < before)
    return {
        ROW_ID: row[ROW_ID], "prompt": messages[:last], "tools": row.get("tools"),
        UNTRAINED: json.dumps(untrained) if untrained else None,
    }  # fmt: skip


def _conversation(row: Row, answer: str, number: int) -> Row:
    prompt = row["prompt"]
    assert isinstance(prompt, list)
    return {
        ROW_ID: f"{row[ROW_ID]}-a{number}" if number else row[ROW_ID],
        "messages": [*prompt, {"role": "assistant", "content": answer}],
        "tools": row.get("tools"),
        UNTRAINED: row.get(UNTRAINED),
    }

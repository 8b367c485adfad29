"""Measures, on held-out rows, whether each stage helped: perplexity, preference accuracy, rewards of greedy answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks import held_out_rows as held_out
from tasks.completion_mask import Message
from tasks.context import Metrics, TrainContext
from tasks.evaluation_report import write_report
from tasks.method import Input, Inputs, Method
from tasks.scoring import Scored, greedy_answers, logps, rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What every policy is asked."""

    text: Sequence[Scored]
    answers: Sequence[Scored]
    pairs: held_out.Pairs
    prompts: Sequence[list[Message]]
    prompt_ids: Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one policy says.

    Args:
        chosen, rejected: log-probability of the two answers of each pair, in nats.
        answers: its greedy answer to each prompt.
    """

    text_perplexity: float
    answer_perplexity: float
    chosen: Sequence[float]
    rejected: Sequence[float]
    answers: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Evaluate(Method):
    """Compares policies on rows that none of them was trained on.

    Every slot that ``consumes`` does not name is a policy, and its name labels its numbers.
    """

    consumes: ClassVar[Mapping[str, Kind]] = {
        "text": Kind.TEXT,
        "conversations": Kind.CONVERSATIONS,
        "pairs": Kind.PREFERENCES,
        "reward_model": Kind.REWARD_MODEL,
        "reference": Kind.CHECKPOINT,
        "*": Kind.CHECKPOINT,
    }
    produces: ClassVar[Kind] = Kind.REPORT
    uses_gpu: ClassVar[bool] = True
    chat_slot: ClassVar[str | None] = "reference"

    num_rows: Annotated[int, Gt(0)] = 200  # held-out rows per measure, at most
    num_prompts: Annotated[int, Gt(0)] = 32  # answered greedily by each policy
    max_new_tokens: Annotated[int, Gt(0)] = 64
    max_length: Annotated[int, Gt(1)] = 256  # tokens of a row that are scored
    seed: Annotated[int, Ge(0)] = 0  # of the choice of rows

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.models import load_tokenizer
        from tasks.tokenize_rows import require_chat_template

        policies = {slot: policy for slot, policy in inputs.items() if slot not in self.consumes}
        if not policies:
            raise ConfigError("evaluate has no policy to measure; give it inputs of any other name, such as sft: sft")
        # One tokenizer and template for all: a base model may have none, and equal tokens make numbers comparable.
        tokenizer = load_tokenizer(inputs["reference"])
        require_chat_template(tokenizer, inputs["reference"])
        rows = self._rows(inputs, tokenizer)
        reference, measured = self._measure_all(policies, inputs["reference"], rows, tokenizer, ctx)
        metrics: dict[str, float] = {}
        for name, policy in measured.items():
            metrics |= {f"{name}/{key}": value for key, value in _policy_metrics(policy, reference).items()}
        answers = {name: policy.answers for name, policy in measured.items()}
        metrics |= self._reward_metrics(inputs["reward_model"], rows, answers, tokenizer, ctx)
        ctx.report(len(policies) + 1, metrics)
        write_report(ctx.output_dir, metrics, rows.prompts, answers)
        return metrics

    def _rows(self, inputs: Inputs, tokenizer: "PreTrainedTokenizerBase") -> Rows:
        text, conversations, pairs = (
            held_out.draw_rows(inputs[slot], self.num_rows, self.seed) for slot in ("text", "conversations", "pairs")
        )
        prompts = held_out.distinct_prompts(pairs, self.num_prompts)
        rows = Rows(
            text=held_out.text_tokens(text, tokenizer, self.max_length),
            answers=held_out.answer_tokens(conversations, tokenizer, self.max_length),
            pairs=held_out.pair_tokens(pairs, tokenizer, self.max_length),
            prompts=prompts,
            prompt_ids=held_out.prompt_tokens(prompts, tokenizer, self.max_length),
        )
        for slot, count in (
            ("text", len(rows.text)),
            ("conversations", len(rows.answers)),
            ("pairs", len(rows.pairs.kinds)),
        ):
            if not count:
                raise DataError(
                    f"no held-out row of {inputs[slot].name!r} has a token to score within "
                    f"max_length={self.max_length}; raise max_length of evaluate, or hold out more rows"
                )
        return rows

    def _measure_all(
        self, policies: Inputs, reference: Input, rows: Rows, tokenizer: "PreTrainedTokenizerBase", ctx: TrainContext
    ) -> tuple[Measured, dict[str, Measured]]:
        """The reference and every policy, each distinct model loaded once."""
        known: dict[str, Measured] = {}
        for step, (name, policy) in enumerate(policies.items(), start=1):
            if policy.fingerprint not in known:
                known[policy.fingerprint] = self._measure(policy, rows, tokenizer, ctx)
            done = known[policy.fingerprint]
            shown = {"text_perplexity": done.text_perplexity, "answer_perplexity": done.answer_perplexity}
            ctx.report(step, {f"{name}/{key}": value for key, value in shown.items()})
        if reference.fingerprint not in known:
            known[reference.fingerprint] = self._measure(reference, rows, tokenizer, ctx)
        return known[reference.fingerprint], {name: known[policy.fingerprint] for name, policy in policies.items()}

    def _measure(self, policy: Input, rows: Rows, tokenizer: "PreTrainedTokenizerBase", ctx: TrainContext) -> Measured:
        from tasks.models import load_policy

        model = load_policy(policy).model.to(_device(ctx))
        batch_size = ctx.resources.micro_batch_size
        return Measured(
            text_perplexity=_perplexity(logps(model, rows.text, batch_size), rows.text),
            answer_perplexity=_perplexity(logps(model, rows.answers, batch_size), rows.answers),
            chosen=logps(model, rows.pairs.chosen, batch_size),
            rejected=logps(model, rows.pairs.rejected, batch_size),
            answers=greedy_answers(model, tokenizer, rows.prompt_ids, self.max_new_tokens, batch_size),
        )

    def _reward_metrics(
        self,
        reward_model: Input,
        rows: Rows,
        answers: Mapping[str, Sequence[str]],
        tokenizer: "PreTrainedTokenizerBase",
        ctx: TrainContext,
    ) -> dict[str, float]:
        from tasks.models import load_reward_model

        model = load_reward_model(reward_model, self.seed).model.to(_device(ctx))
        batch_size = ctx.resources.micro_batch_size
        chosen, rejected = (
            rewards(model, [row.input_ids for row in side], batch_size)
            for side in (rows.pairs.chosen, rows.pairs.rejected)
        )
        wins = [_win(left, right) for left, right in zip(chosen, rejected, strict=True)]
        metrics = {"reward_model/accuracy": fmean(wins)}
        for kind in sorted({kind for kind in rows.pairs.kinds if kind}):
            of_kind = [win for win, found in zip(wins, rows.pairs.kinds, strict=True) if found == kind]
            metrics[f"reward_model/accuracy/{kind}"] = fmean(of_kind)
        for name, texts in answers.items():
            answered = held_out.answered_tokens(rows.prompts, texts, tokenizer, self.max_length)
            metrics[f"{name}/reward_score"] = fmean(rewards(model, answered, batch_size))
        return metrics


def _device(ctx: TrainContext) -> str:
    return "cuda" if ctx.resources.gpus_per_worker else "cpu"


def _policy_metrics(policy: Measured, reference: Measured) -> dict[str, float]:
    return {
        "text_perplexity": policy.text_perplexity,
        "answer_perplexity": policy.answer_perplexity,
        "preference_accuracy": fmean(
            _win(chosen - reference_chosen, rejected - reference_rejected)
            for chosen, rejected, reference_chosen, reference_rejected in zip(
                policy.chosen, policy.rejected, reference.chosen, reference.rejected, strict=True
            )
        ),
        "logp_accuracy": fmean(map(_win, policy.chosen, policy.rejected)),
    }


def _win(chosen: float, rejected: float) -> float:
    """1 where the chosen answer has the higher implicit reward (Rafailov et al. 2023, eq. 5), 0.5 for a tie."""
    return 0.5 if chosen == rejected else float(chosen > rejected)


def _perplexity(totals: Sequence[float], rows: Sequence[Scored]) -> float:
    return math.exp(-sum(totals) / sum(row.num_tokens for row in rows))

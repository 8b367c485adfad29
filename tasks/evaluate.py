"""Measures, on held-out rows, whether each stage helped: perplexity, preference accuracy, rewards of greedy answers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.context import Metrics, TrainContext
from tasks.held_out_rows import HeldOut, read_held_out
from tasks.method import Input, Inputs, Method
from tasks.score_table import write_report

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one policy says about the held-out rows.

    Args:
        chosen, rejected: log-probability of each pair's two answers, in nats.
    """

    text_perplexity: float
    answer_perplexity: float
    chosen: Sequence[float]
    rejected: Sequence[float]
    answers: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Evaluate(Method):
    """Compares policies with each other, on rows that none of them was trained on.

    Every slot that is not named in ``consumes`` is a policy; its name labels its numbers.
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

    num_rows: Annotated[int, Gt(0)] = 200  # held-out rows per measure, at most
    num_prompts: Annotated[int, Gt(0)] = 32  # answered greedily by each policy
    max_new_tokens: Annotated[int, Gt(0)] = 64
    max_length: Annotated[int, Gt(0)] = 256  # tokens of a row that are scored
    seed: Annotated[int, Ge(0)] = 0  # of which rows

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        policies = {slot: policy for slot, policy in inputs.items() if slot not in self.consumes}
        if not policies:
            raise ConfigError(
                "evaluate has no policy to measure; add inputs under names of your choice, such as sft: sft"
            )
        from tasks.models import load_tokenizer

        tokenizer = load_tokenizer(inputs["reference"])
        rows = read_held_out(self, inputs, tokenizer)
        measured = self._measure_all(policies, inputs["reference"], rows, tokenizer, ctx)
        reference = measured.pop("reference")
        metrics: dict[str, float] = {}
        for name, policy in measured.items():
            metrics |= {f"{name}/{key}": value for key, value in _policy_metrics(policy, reference).items()}
        answers = {name: policy.answers for name, policy in measured.items()}
        metrics |= self._reward_metrics(inputs["reward_model"], rows, answers, tokenizer, ctx)
        ctx.report(len(policies) + 1, metrics)
        write_report(ctx.output_dir, metrics, rows.prompts, answers)
        return metrics

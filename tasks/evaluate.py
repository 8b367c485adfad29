"""Measures, on held-out rows, whether each stage helped: perplexity, preference accuracy, exact match, rewards of
greedy answers."""

import filecmp
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks import held_out_rows as held_out
from tasks.context import Metrics, TrainContext
from tasks.evaluation_report import POLICY_METRICS, write_report
from tasks.measured import Measured, over_pairs, perplexities, policy_scores, win
from tasks.method import Input, Inputs, Method
from tasks.row_scores import RowScores, write_scores
from tasks.scoring import greedy_answers, logps, rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Evaluate(Method):
    """Compares policies on rows that none of them was trained on.

    Every slot that ``consumes`` does not name is a policy, and its name labels its numbers.
    """

    version: ClassVar[int] = 3  # 2: writes the scores of each row. 3: exact match; greedy answers are greedy
    consumes: ClassVar[Mapping[str, Kind]] = {
        "text": Kind.TEXT,
        "conversations": Kind.CONVERSATIONS,
        "pairs": Kind.PREFERENCES,
        "reward_model": Kind.REWARD_MODEL,
        "reference": Kind.CHECKPOINT,
        "*": Kind.CHECKPOINT,
    }
    produces: ClassVar[Kind] = Kind.REPORT
    metrics: ClassVar[tuple[str, ...]] = (*POLICY_METRICS, "accuracy")  # that a gate may judge
    uses_gpu: ClassVar[bool] = True
    chat_slot: ClassVar[str | None] = "reference"

    num_rows: Annotated[int, Gt(0)] = 200  # held-out rows per measure, at most
    num_prompts: Annotated[int, Gt(0)] = 32  # of the pairs, answered greedily by each policy
    num_questions: Annotated[int, Gt(0)] | None = None  # of the conversations, likewise; None: num_prompts
    max_new_tokens: Annotated[int, Gt(0)] = 64
    max_length: Annotated[int, Gt(1)] = 256  # tokens of a row that are scored
    seed: Annotated[int, Ge(0)] = 0  # of the choice of rows

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.data.tokens.tokenize_rows import require_chat_template
        from tasks.train.models import load_tokenizer

        policies = {slot: policy for slot, policy in inputs.items() if slot not in self.consumes}
        if not policies:
            raise ConfigError("evaluate has no policy to measure; give it inputs of any other name, such as sft: sft")
        # One tokenizer and template for all: a base model may have none, and equal tokens make numbers comparable.
        tokenizer = load_tokenizer(inputs["reference"])
        require_chat_template(tokenizer, inputs["reference"])
        _require_same_tokens(policies, inputs["reference"], tokenizer.get_vocab())
        rows = held_out.draw(
            inputs, tokenizer, num_rows=self.num_rows, num_prompts=self.num_prompts,
            num_questions=self.num_questions or self.num_prompts, max_length=self.max_length, seed=self.seed,
        )  # fmt: skip
        reference, measured = self._measure_all(policies, inputs["reference"], rows, tokenizer, ctx)
        answers = {name: [answer.text for answer in policy.greedy] for name, policy in measured.items()}
        reward_scores, by_kind = self._rewards(inputs["reward_model"], rows, answers, tokenizer, ctx)
        scores = [*policy_scores(rows, measured, reference), *reward_scores]
        metrics = {name: value for each in scores for name, value in each.metrics().items()} | by_kind
        ctx.report(len(policies) + 1, metrics)
        write_report(ctx.output_dir, metrics, [prompt.messages for prompt in rows.prompts], answers)
        write_scores(ctx.output_dir, scores, {name: policy.fingerprint for name, policy in policies.items()})
        return metrics

    def _measure_all(
        self,
        policies: Inputs,
        reference: Input,
        rows: held_out.Rows,
        tokenizer: "PreTrainedTokenizerBase",
        ctx: TrainContext,
    ) -> tuple[Measured, dict[str, Measured]]:
        """The reference and every policy, each distinct model loaded once."""
        known: dict[str, Measured] = {}
        for step, (name, policy) in enumerate(policies.items(), start=1):
            if policy.fingerprint not in known:
                known[policy.fingerprint] = self._measure(policy, rows, tokenizer, ctx)
            shown = perplexities(rows, {name: known[policy.fingerprint]})
            ctx.report(step, {key: value for each in shown for key, value in each.metrics().items()})
        if reference.fingerprint not in known:
            known[reference.fingerprint] = self._measure(reference, rows, tokenizer, ctx)
        return known[reference.fingerprint], {name: known[policy.fingerprint] for name, policy in policies.items()}

    def _measure(
        self, policy: Input, rows: held_out.Rows, tokenizer: "PreTrainedTokenizerBase", ctx: TrainContext
    ) -> Measured:
        from tasks.train.models import load_model

        model = load_model(policy).to(_device(ctx))
        batch_size = ctx.resources.micro_batch_size
        return Measured(
            text=logps(model, rows.text, batch_size),
            answers=logps(model, rows.answers, batch_size),
            chosen=logps(model, rows.pairs.chosen, batch_size),
            rejected=logps(model, rows.pairs.rejected, batch_size),
            greedy=greedy_answers(model, tokenizer, rows.prompt_ids, self.max_new_tokens, batch_size),
            answered=greedy_answers(model, tokenizer, rows.question_ids, self.max_new_tokens, batch_size),
        )

    def _rewards(
        self,
        reward_model: Input,
        rows: held_out.Rows,
        answers: Mapping[str, Sequence[str]],
        tokenizer: "PreTrainedTokenizerBase",
        ctx: TrainContext,
    ) -> tuple[list[RowScores], dict[str, float]]:
        """How the reward model ranks the pairs and scores the answers; and its accuracy by kind of pair."""
        from tasks.train.models import load_model

        model = load_model(reward_model).to(_device(ctx))
        batch_size = ctx.resources.micro_batch_size
        chosen, rejected = (
            rewards(model, [row.input_ids for row in side], batch_size)
            for side in (rows.pairs.chosen, rows.pairs.rejected)
        )
        wins = list(map(win, chosen, rejected))
        by_kind = {}
        for kind in sorted({kind for kind in rows.pairs.kinds if kind}):
            of_kind = [win for win, found in zip(wins, rows.pairs.kinds, strict=True) if found == kind]
            by_kind[f"reward_model/accuracy/{kind}"] = fmean(of_kind)
        scored = {
            name: rewards(model, held_out.answered_tokens(rows.prompts, texts, tokenizer, self.max_length), batch_size)
            for name, texts in answers.items()
        }
        prompts = [prompt.name for prompt in rows.prompts]
        return [
            over_pairs("accuracy", rows, {"reward_model": wins}),
            RowScores(
                metric="reward_score", row_ids=prompts, groups=prompts, weights=[1] * len(prompts), scores=scored
            ),
        ], by_kind


def _require_same_tokens(policies: Inputs, reference: Input, vocabulary: Mapping[str, int]) -> None:
    """That every policy reads the tokens as they are meant.

    Raises:
        ConfigError: one has another tokenizer.
    """
    from tasks.train.models import load_tokenizer

    for name, policy in policies.items():
        own, known = (given.path / "tokenizer.json" for given in (policy, reference))
        if own.exists() and known.exists() and filecmp.cmp(own, known, shallow=False):
            continue
        # A model further on may know more tokens; the same token is never another one.
        if any(vocabulary.get(token, index) != index for token, index in load_tokenizer(policy).get_vocab().items()):
            raise ConfigError(
                f"{name} ({policy.name}) and {reference.name} have different tokenizers, so what is measured cannot be "
                f"compared; leave {name} out, or begin both from the same base: cpt-sft-dpo-retrain goes on from the "
                "champion"
            )


def _device(ctx: TrainContext) -> str:
    return "cuda" if ctx.resources.gpus_per_worker else "cpu"

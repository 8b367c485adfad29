"""Measures policies on held-out rows: perplexity, preferences, single answers, exact match, rewards of answers."""

import filecmp
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast

from annotated_types import Ge, Gt, Le

from lineage.artifact import MODELS, Kind
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.digest import digest_of
from lineage.fingerprint import digest_json
from lineage.store import Entry
from tasks.context import Metrics, TrainContext
from tasks.data.images import WITH_IMAGES
from tasks.data.tokens.template import Thinking
from tasks.evaluate import rows as held_out
from tasks.evaluate.answers import Answer, answers_of, greedy_answers, sampled_tokens
from tasks.evaluate.benchmarks import Benchmark, Measurement, joined, load_benchmarks, measure, write_settings
from tasks.evaluate.measured import (
    AnswerForm,
    Measured,
    asked_of,
    by_label,
    columns_of,
    function_scores,
    judged_of,
    metric_scores,
    over_rows,
    perplexities,
    policy_scores,
    reward_scores,
    win,
)
from tasks.evaluate.report import LOST, POLICY_METRICS, write_report
from tasks.evaluate.row_scores import KL, REWARD, RowScores, is_perplexity, write_scores
from tasks.evaluate.scoring import Batches, Cache, Loading, Scored, logps, rewards
from tasks.evaluate.stubs import Stubs, stubs_of
from tasks.model.vision import Vision, require_reads_images
from tasks.recipe import Input, Inputs, Method
from tasks.reward_functions import Rewards, Scorer, check_columns, check_rewards, scorers
from tasks.reward_functions.function import identity_of
from tasks.reward_functions.metric import WIN_RATE, Metric, check_metrics, code_of_metrics, metrics_of, rewards_of
from tasks.reward_functions.scorer import Columns, Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TEMPERATURE = 0.8  # of the samples of pass@k
_VOCABULARY = 32_000  # where there is no tokenizer yet


@dataclass(frozen=True, kw_only=True)
class Evaluate(Method):
    """Compares policies on rows that none of them was trained on.

    Every slot that ``consumes`` does not name is a policy; metrics carry the slot's name. Slots of rows and the reward
    model are optional; metrics that need an empty slot are not measured. A row that is too long loses the beginning of
    its prompt, so that its answer is measured whole where possible; cut and dropped rows are counted.

    Args:
        num_rows: held-out rows per measure, at most.
        num_prompts: of the slot ``prompts`` where it is filled, else of the pairs, else of the single answers; each
            policy answers them greedily.
        num_questions: of the conversations, answered likewise, for exact match; None: ``num_prompts``.
        max_length: tokens of a row; None: the longest ``max_length`` of the stages that trained the models.
        max_dropped: largest share of the rows of a kind that may be dropped.
        max_cut: largest share of the conversations, and of the pairs, whose answers may be cut; likewise of those whose
            prompts may be cut, and of the prompts and questions.
        answer_form: expected form of answers to the questions: reported as ``one_sentence_share``, with their mean
            length as ``answer_tokens``; None: neither is.
        seed: of the choice of rows.
        thinking: of the assistant; None: that of the stages that trained the models.
        control_tokens: that texts spell: encode them as text, or keep them; None: keep them where a stage that trained
            one of the models does.
        rewards: name -> reward function: scores the answers to the slot ``prompts``, as ``reward/NAME``.
        kl_samples: of each policy for each prompt, for ``kl``: nats per answer between the policy and the reference.
        metrics: further metrics of each policy: a name, or a name with options. They score answers to the slot
            ``prompts`` where it is filled, else to the questions; ``lm_eval:TASK`` has rows of its own.
    """

    # 2: writes the scores of each row. 3: prompts are cut at their beginning, rewards read at the last token, greedy
    # answers are greedy, exact match, win rate.
    version: ClassVar[int] = 3
    consumes: ClassVar[Mapping[str, Kind]] = {
        "text": Kind.TEXT,
        "conversations": Kind.CONVERSATIONS,
        "pairs": Kind.PREFERENCES,
        "unpaired": Kind.UNPAIRED,
        "prompts": Kind.PROMPTS,
        "reward_model": Kind.REWARD_MODEL,
        "reference": Kind.CHECKPOINT,
        "*": Kind.CHECKPOINT,
    }
    optional: ClassVar[frozenset[str]] = frozenset(
        {"text", "conversations", "pairs", "unpaired", "prompts", "reward_model"}
    )
    produces: ClassVar[Kind] = Kind.REPORT
    measures: ClassVar[tuple[str, ...] | None] = ("max_length", "asked/prompts_cut", "metrics_failed")
    uses_gpu: ClassVar[bool] = True
    cluster_workers: ClassVar[Literal["all", "one", "none"]] = "all"
    chat_slot: ClassVar[str | None] = "reference"

    num_rows: Annotated[int, Gt(0)] = 200
    num_prompts: Annotated[int, Gt(0)] = 32
    num_questions: Annotated[int, Gt(0)] | None = None
    max_new_tokens: Annotated[int, Gt(0)] = 64  # tokens of an answer
    max_length: Annotated[int, Gt(1)] | None = None
    max_dropped: Annotated[float, Ge(0), Le(1)] = 0.05
    max_cut: Annotated[float, Ge(0), Le(1)] = 0.5
    answer_form: AnswerForm | None = None
    seed: Annotated[int, Ge(0)] = 0
    thinking: Thinking | None = None
    control_tokens: Literal["text", "keep"] | None = None
    rewards: Rewards | None = None
    kl_samples: Annotated[int, Gt(0)] | None = None
    metrics: tuple[str | Metric, ...] | None = None

    def __post_init__(self) -> None:
        check_rewards(self.rewards or {})
        object.__setattr__(self, "metrics", metrics_of(self.metrics) or None)
        check_metrics(self.own_metrics, [*POLICY_METRICS, KL, "accuracy"])
        if self.max_length is not None:
            self.lengths(self.max_length)

    @property
    def own_metrics(self) -> tuple[Metric, ...]:
        """The further metrics."""
        return metrics_of(self.metrics)

    def recipe(self) -> dict[str, object]:
        """As of every method; of metrics what they are, and not where their files lie."""
        recipe = super().recipe()
        if self.metrics:
            recipe["metrics"] = {each.label: each.identity() for each in self.own_metrics}
        return recipe

    def code_digest(self, *, now: bool = False) -> str:
        """As of every method, with the Python functions among its metrics."""
        digest, functions = super().code_digest(now=now), code_of_metrics(self.own_metrics)
        return digest_of({"method": digest, **functions}) if functions else digest

    def check_slots(self, filled: frozenset[str]) -> None:
        """Requires rows to measure on, and the rows that options need.

        Args:
            filled: the slots that have an input.
        """
        own, asking = self.own_metrics, ("prompts", "conversations", "pairs", "unpaired")
        answered = [each.label for each in own if not each.is_benchmark]
        judged = [each.label for each in own if each.judge == "reward_model"]
        measurable = ("text", *asking[1:], *(["prompts"] if self.rewards or answered else []))
        for slots, why, is_needed in (
            (measurable, "there are no rows to measure on", len(answered) == len(own)),
            (asking, f"metrics.{answered[:1]} scores answers", answered),
            (("reward_model",), f"metrics.{judged[:1]} is judged by a reward model", judged),
            (asking, "a reward model scores answers", "reward_model" in filled),
            (("conversations",), f"answer_form={self.answer_form} is of answers to conversations", self.answer_form),
            (("prompts",), f"rewards.{next(iter(self.rewards or {}), '')} scores answers to prompts", self.rewards),
            (("prompts", "pairs", "unpaired"), f"kl_samples={self.kl_samples} are of prompts", self.kl_samples),
        ):
            if is_needed and not filled.intersection(slots):
                raise ConfigError(f"evaluate: {why}, and no input {' or '.join(slots)} is set; set one")

    def policy_metrics(self, slots: Collection[str]) -> tuple[str, ...]:
        """The metrics of a policy, which a gate's rules may name.

        Args:
            slots: those with an input.
        """
        slots = {*slots, *(["answer_form"] if self.answer_form else [])}
        found = [name for name, needs in POLICY_METRICS.items() if slots.intersection(needs)]
        found += [f"{name}/*" for name in found if is_perplexity(name)]  # by label
        own = [f"{each.label}/*" if each.is_benchmark else each.label for each in self.own_metrics]
        return (*found, *(f"{REWARD}{name}" for name in self.rewards or {}), *([KL] if self.kl_samples else []), *own)

    def num_reports(self, slots: Collection[str]) -> int | None:
        """One after each policy, and one at the end."""
        return len([slot for slot in slots if slot not in self.consumes]) + 1

    def measured_metrics(self, slots: Collection[str], *, of_steps: bool = False) -> tuple[str, ...] | None:
        """As of every method; after each policy it reports that policy's perplexities, and all metrics at the end."""
        if self.measures is None:
            return None
        of_policies = self.policy_metrics(slots)
        of_policies = (*of_policies, *(f"{each.label}/stderr" for each in self.own_metrics if not each.is_benchmark))
        named = [f"{slot}/{name}" for slot in slots if slot not in self.consumes for name in of_policies]
        if {"reward_model", "pairs"} <= {*slots}:
            named += ["reward_model/accuracy", "reward_model/accuracy/*"]
        named += [f"{slot}/{what}" for slot in ("text", "conversations", "pairs", "unpaired") for what in LOST]
        of_models = [f"weights/{slot}" for slot in slots if self.consumes.get(slot, Kind.CHECKPOINT) in MODELS]
        return (*self.measures, *named, *of_models)

    def needs_template(self, filled: Collection[str]) -> str | None:
        of_chats = {"conversations", "pairs", "unpaired", "prompts"}
        return None if of_chats.isdisjoint(filled) else self.chat_slot

    def lengths(self, max_length: int) -> held_out.Lengths:
        """The limits for rows (ConfigError: ``max_new_tokens`` leaves no capacity for a prompt)."""
        return held_out.Lengths(
            max_length=max_length, max_new_tokens=self.max_new_tokens, max_dropped=self.max_dropped,
            max_cut=self.max_cut,
        )  # fmt: skip

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.data.tokens.tokenize_rows import require_chat_template
        from tasks.model.tokenizers import tokenizer_of
        from tasks.train.generation.one_policy import digests_of_weights, version_metrics

        policies = {slot: policy for slot, policy in inputs.items() if slot not in self.consumes}
        if not policies:
            raise ConfigError(
                "evaluate has no policy to measure; inputs of any other name are policies; add one, such as sft: sft"
            )
        self.check_slots(frozenset(inputs))
        weights = digests_of_weights({slot: each for slot, each in inputs.items() if each.kind in MODELS})
        # One tokenizer for all policies: only numbers on equal tokens compare. Text alone needs no template.
        tokenizer = tokenizer_of(inputs["reference"].path)
        if self.needs_template(inputs):
            require_chat_template(tokenizer, inputs["reference"])
        models = {**policies, **{slot: inputs[slot] for slot in ("reward_model",) if slot in inputs}}
        require_same_tokens(models, inputs["reference"], tokenizer)
        lengths, thinking, control_tokens = self._as_trained(trained := [*models.values(), inputs["reference"]])
        rows = self.rows_of(inputs, tokenizer, trained, lengths, thinking, control_tokens)
        self._require_text(rows)
        caching = self._cache(tokenizer, inputs["reference"].path, ctx)
        functions, own = scorers(self.rewards or {}, tokenizer), self._own_scorers(rows, tokenizer)
        check_columns(functions, columns_of(rows))
        functions = self._scored_once(functions, self.rewards or {}, caching)
        own = self._scored_once(own, rewards_of(self.own_metrics), caching)
        benchmarks = self.benchmarks()
        reference, measured, ratios, of_benchmarks = self._measure_all(
            policies, inputs["reference"], rows, tokenizer, ctx, benchmarks, weights, caching
        )
        of_rewards, by_kind, rewarded = list[RowScores](), dict[str, float](), dict[str, Sequence[float]]()
        if "reward_model" in inputs:
            read = partial(
                held_out.answered_tokens, tokenizer=tokenizer, lengths=lengths, thinking=thinking,
                control_tokens=control_tokens, vision=rows.visions.get(rows.judged[2]),
            )  # fmt: skip
            of_rewards, by_kind, rewarded = self._rewards(
                inputs["reward_model"], rows, read, measured, reference, ctx, weights["reward_model"], caching
            )
        if ctx.rank:  # the first worker calls the reward functions and writes the report
            return {}
        scores = policy_scores(rows, measured, reference, self.answer_form)
        scores += function_scores(rows, measured, functions) + of_rewards + self._of_samples(rows, ratios)
        of_own, failed = self._own_scores(rows, measured, reference, own, rewarded)
        metrics = {name: value for each in scores for name, value in each.metrics().items()} | by_kind
        metrics |= {**_with_errors([*of_own, *of_benchmarks.scores]), **of_benchmarks.values}
        failed |= of_benchmarks.failed
        metrics |= {"metrics_failed": float(len(failed))} if self.metrics else {}
        metrics |= {**rows.lost, "max_length": float(lengths.max_length), **version_metrics(weights)}
        ctx.report(len(policies) + 1, metrics)
        named = [each.metric for each in (*by_label(scores), *of_own, *of_benchmarks.scores)]
        named += [key.partition("/")[2] for key in of_benchmarks.values if not key.endswith("/stderr")]
        _write_answers(ctx.output_dir, metrics, rows, measured, named, failed)
        fingerprints = {name: policy.fingerprint for name, policy in policies.items()}
        write_scores(ctx.output_dir, [*scores, *of_own, *of_benchmarks.scores], fingerprints, weights)
        stubs = self.stubs(rows, tokenizer, {each.name: each for each in own}, functions, frozenset(inputs), benchmarks)
        stubs.write(ctx.output_dir)
        if benchmarks:
            dtype = ctx.resources.frozen_dtype(None)
            write_settings(ctx.output_dir, benchmarks, Batches.of(ctx), dtype, of_benchmarks.small_is_good)
        return metrics

    def rows_of(
        self, inputs: Inputs, tokenizer: "PreTrainedTokenizerBase", models: Sequence[Input], lengths: held_out.Lengths,
        thinking: Thinking | None, control_tokens: Literal["text", "keep"] | None,
    ) -> held_out.Rows:  # fmt: skip
        return held_out.draw(
            inputs, tokenizer, num_rows=self.num_rows, num_prompts=self.num_prompts,
            num_questions=self.num_questions or self.num_prompts, lengths=lengths, seed=self.seed,
            thinking=thinking, control_tokens=control_tokens, visions=_visions(inputs, models),
        )  # fmt: skip

    def _as_trained(
        self, trained: Sequence[Input]
    ) -> tuple[held_out.Lengths, Thinking | None, Literal["text", "keep"] | None]:
        """Lengths of rows, thinking and control tokens: as set, or as the models were trained."""
        from tasks.model.positions import require_positions
        from tasks.train.models.load import load_config

        lengths = self.lengths(self.max_length or trained_length(trained))
        for model in trained:
            require_positions(load_config(model.path), lengths.max_length)
        kept = "keep" in (recipe.get("control_tokens") for recipe in _recipes(trained).values())
        control_tokens: Literal["text", "keep"] | None = self.control_tokens or ("keep" if kept else None)
        return lengths, self.thinking or trained_thinking(trained), control_tokens

    def _require_text(self, rows: held_out.Rows) -> None:
        """Refuses samples of answers to images: they are drawn from tokens alone."""
        asked = rows.question_images if rows.questions and not rows.has_own_prompts else rows.prompt_images
        sampled = {
            "kl_samples": self.kl_samples and any(rows.prompt_images),
            "metrics.pass_at_k": self._sampling()[0] and any(asked),
        }
        for option in (name for name, is_asked in sampled.items() if is_asked):
            raise ConfigError(
                f"{option} of evaluate: it samples answers, which is not done of rows with images; rows of text are "
                f"accepted; remove {option}"
            )

    def _of_samples(self, rows: held_out.Rows, ratios: Mapping[str, Sequence[float]]) -> list[RowScores]:
        """``kl``, where it is asked for."""
        names = [prompt.name for prompt in rows.prompts for _ in range(self.kl_samples or 0)]
        ids = [f"{name}/{index}" for index, name in enumerate(names)]
        found = RowScores(metric=KL, row_ids=ids, groups=names, weights=[1.0] * len(names), scores=ratios)
        return [found] if self.kl_samples else []

    def benchmarks(self, *, local: bool = False) -> list[Benchmark]:
        """The benchmarks among its metrics; ``local``: those alone whose rows are local files."""
        return load_benchmarks([each for each in self.own_metrics if each.local_task or not local])

    def _own_scorers(self, rows: held_out.Rows, tokenizer: "PreTrainedTokenizerBase") -> list[Scorer]:
        """The reward functions behind the further metrics, whose columns are there.

        Raises:
            DataError: a column is missing, or a value of it cannot be read.
        """
        found, columns = scorers(rewards_of(self.own_metrics), tokenizer, "metrics"), asked_of(rows).columns
        judged = {each.label for each in self.own_metrics if each.function == WIN_RATE}
        check_columns([each for each in found if each.name not in judged], columns)
        check_columns([each for each in found if each.name in judged], {**columns, "references": []})
        return found

    def _scored_once(self, functions: Sequence[Scorer], rewards: Rewards, caching: Cache) -> list[Scorer]:
        """The same, of which those that run programs or Python of the user keep what they gave to answers."""

        def once(scorer: Scorer) -> Scorer:
            reward = rewards[scorer.name]
            if reward.code() is None and (reward.function or scorer.name) != "code":
                return scorer
            kept = caching.alone(function=identity_of({scorer.name: reward}), code=self.code_digest())

            def score(prompts: Sequence[Sequence[Message]], completions: Sequence[str], columns: Columns) -> object:
                compute = lambda: scorer(prompts, completions, columns)  # noqa: E731
                try:
                    rows = digest_json({"prompts": prompts, "completions": completions, "columns": columns})
                except (TypeError, ValueError):  # a column is no JSON
                    return compute()
                return kept.found("", "function", rows, compute)

            return replace(scorer, score=score)

        return [once(each) for each in functions]

    def _own_scores(
        self, rows: held_out.Rows, measured: Mapping[str, Measured], reference: Measured, functions: Sequence[Scorer],
        rewarded: Mapping[str, Sequence[float]],
    ) -> tuple[list[RowScores], dict[str, str]]:  # fmt: skip
        asked, by_rewards = asked_of(rows), judged_of(rows)
        metrics, known = self.own_metrics, {each.name: each for each in functions}
        found, failed = list[RowScores](), dict[str, str]()
        for each in (each for each in metrics if not each.is_benchmark):
            of = by_rewards if each.judge == "reward_model" else asked
            scores, reasons = metric_scores(of, measured, reference, [each], known, rewarded)
            found, failed = found + scores, failed | reasons
        return found, failed

    def stubs(
        self, rows: held_out.Rows, tokenizer: "PreTrainedTokenizerBase | None", own: Mapping[str, Scorer],
        functions: Sequence[Scorer], slots: frozenset[str], benchmarks: Sequence[Benchmark],
    ) -> Stubs:  # fmt: skip
        """Known-right and known-wrong stubs through the metrics of this evaluation.

        Args:
            tokenizer: None: words are counted as tokens.
        """

        def num_tokens(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False)["input_ids"]) if tokenizer else len(text.split())

        return stubs_of(
            rows, metrics=self.own_metrics, functions=own, rewards=self.rewards or {}, reward_functions=functions,
            form=self.answer_form, has_reward_model="reward_model" in slots, has_kl=self.kl_samples is not None,
            vocabulary=len(tokenizer) if tokenizer else _VOCABULARY, max_new_tokens=self.max_new_tokens,
            num_tokens=num_tokens, benchmarks=benchmarks,
        )  # fmt: skip

    def _measure_all(
        self,
        policies: Inputs,
        reference: Input,
        rows: held_out.Rows,
        tokenizer: "PreTrainedTokenizerBase",
        ctx: TrainContext,
        benchmarks: Sequence[Benchmark],
        weights: Mapping[str, str],
        caching: Cache,
    ) -> tuple[Measured, dict[str, Measured], dict[str, list[float]], Measurement]:
        """Measures every policy, and last the reference; each distinct model is loaded once, and may change later.

        Returns:
            The reference's and the policies' measures; and for ``kl``, of each policy's samples their log-probability
            less that under the reference, whose mean is the KL; and the scores of benchmarks.
        """
        from tasks.train.models.load import load_on_device

        slots: dict[str, list[str]] = {}
        for name, policy in policies.items():
            slots.setdefault(policy.fingerprint, []).append(name)
        slots[reference.fingerprint] = [*slots.pop(reference.fingerprint, []), "reference"]
        known, sampled = dict[str, Measured](), dict[str, tuple[list[Scored], list[float]]]()
        ratios, step, batch_size = dict[str, list[float]](), 0, Batches.of(ctx)
        of_benchmarks = list[Measurement]()
        asked = len(asked_of(rows).ids) * self._sampling()[0] + rows.count
        for fingerprint, names in slots.items():
            model = Loading(partial(load_on_device, policies.get(names[0], reference), ctx))
            caching = replace(caching, batches=batch_size.counted(ctx.part, names[0], asked))
            loaded = _digest(model, weights[names[0]], caching)
            known[fingerprint] = self._measure(model, rows, tokenizer, caching, loaded)
            by_benchmark = [self._benchmark(each, model, tokenizer, caching, loaded) for each in benchmarks]
            ctx.loaded(*names)
            for name in (each for each in names if each in policies):
                of_benchmarks += [each.named(name) for each in by_benchmark]
                step += 1
                scores = perplexities(rows, {name: known[fingerprint]})
                ctx.report(step, {key: value for each in scores for key, value in each.metrics().items()})
            if self.kl_samples and names != ["reference"]:
                sampled[fingerprint] = self._sampled(model, rows, tokenizer, caching, loaded)
            if "reference" not in names:
                del model  # before the next one is loaded
        for fingerprint, (samples, own) in sampled.items():  # by the reference, which was loaded last
            compute = lambda samples=samples: logps(model(), samples, batch_size)  # noqa: E731
            of_reference = caching.found(loaded, "answers", _as_json(samples), compute)
            found = list(map(float.__sub__, own, cast("list[float]", of_reference)))
            ratios |= {name: found for name in slots[fingerprint] if name in policies}
        in_order = {name: known[policy.fingerprint] for name, policy in policies.items()}
        in_ratios = {name: ratios[name] for name in policies if ratios}
        return known[reference.fingerprint], in_order, in_ratios, joined(of_benchmarks)

    def _cache(self, tokenizer: "PreTrainedTokenizerBase", files: Path, ctx: TrainContext) -> Cache:
        """What was measured before, on this kind of machine and by these libraries.

        Args:
            files: the directory of the tokenizer.
        """
        from tasks.data.tokens.rendering import turn_ends
        from tasks.data.tokens.tokenize_rows import tokenizer_digest

        resources, batches = ctx.resources, Batches.of(ctx)
        settings = {
            "version": self.version, "rows": batches.rows, "tokens": batches.tokens, "device": resources.device,
            "dtype": resources.frozen_dtype(None), "attention": resources.attention,
            "threads": None if resources.gpus_per_worker else resources.cpus_per_worker,
            "stops": sorted({*turn_ends(tokenizer), tokenizer.eos_token_id or 0}),
            "tokenizer": tokenizer_digest(files), "template": tokenizer.chat_template,
            "libraries": {name: version(name) for name in ("torch", "transformers")},
        }  # fmt: skip
        return Cache(folder=ctx.cache_dir, settings=settings, batches=batches)

    def _measure(
        self, model: Loading, rows: held_out.Rows, tokenizer: "PreTrainedTokenizerBase", caching: Cache, weights: str
    ) -> Measured:
        batches = caching.batches

        def likely(what: str, scored: Sequence[Scored], vision: Vision | None = None) -> list[float]:
            asked = caching.with_images(_as_json(scored), vision, [each.images for each in scored])
            compute = lambda: logps(model(), scored, batches, vision)  # noqa: E731
            return cast("list[float]", caching.found(weights, what, asked, compute) if scored else [])

        def answers(
            what: str, prompts: Sequence[Sequence[int]], of: Mapping[str, object], vision: Vision | None = None,
            images: Sequence[Sequence[int]] = (),
        ) -> list[Answer]:  # fmt: skip
            def compute() -> list[list[object]]:
                found = (
                    self._samples(model(), prompts, tokenizer, batches)
                    if of
                    else greedy_answers(
                        model(), tokenizer, prompts, self.max_new_tokens, batches, vision=vision, images=images
                    )
                )
                return [[each.text, each.finished, each.num_tokens] for each in found]

            asked: object = {"prompts": [[*each] for each in prompts], "max_new_tokens": self.max_new_tokens, **of}
            asked = caching.with_images(asked, vision, images)
            found = cast("list[tuple[str, bool, int]]", caching.found(weights, what, asked, compute) if prompts else [])
            return [Answer(text=text, finished=finished, num_tokens=count) for text, finished, count in found]

        count, temperature = self._sampling()
        sampled = answers(
            "sampled", asked_of(rows).ids if count else [],
            {"count": count, "temperature": temperature, "seed": self.seed},
        )  # fmt: skip
        pairs, asking = (rows.visions.get(slot) for slot in ("pairs", rows.asking))
        questions = rows.visions.get("conversations")
        return Measured(
            text=likely("text", rows.text), answers=likely("answers", rows.answers, questions),
            chosen=likely("answers", rows.pairs.chosen, pairs), rejected=likely("answers", rows.pairs.rejected, pairs),
            unpaired=likely("answers", rows.unpaired.answers, rows.visions.get("unpaired")),
            greedy=answers("greedy", rows.prompt_ids, {}, asking, rows.prompt_images),
            answered=answers("greedy", rows.question_ids, {}, questions, rows.question_images),
            sampled=[sampled[at : at + count] for at in range(0, len(sampled), count or 1)],
        )  # fmt: skip

    def _sampling(self) -> tuple[int, float]:
        """Samples per prompt that ``pass_at_k`` asks for, and their temperature."""
        asking = [each for each in self.own_metrics if each.samples_of]
        temperature = asking[0].temperature if asking else None
        return max((each.samples_of for each in asking), default=0), temperature or _TEMPERATURE

    def _samples(
        self, model: "PreTrainedModel", asked: Sequence[Sequence[int]], tokenizer: "PreTrainedTokenizerBase",
        batch_size: Batches,
    ) -> list[Answer]:  # fmt: skip
        from tasks.train.generation.generating import Sampling

        count, temperature = self._sampling()
        prompts = [[*ids] for ids in asked for _ in range(count)]
        seeds = [Random(f"{self.seed} pass {index}").getrandbits(63) for index in range(len(prompts))]
        sampling = Sampling(temperature=temperature)
        tokens = sampled_tokens(model, tokenizer, prompts, self.max_new_tokens, batch_size, sampling, seeds)
        return answers_of(model, tokenizer, tokens)

    def _benchmark(
        self, benchmark: Benchmark, model: Loading, tokenizer: "PreTrainedTokenizerBase", caching: Cache, weights: str
    ) -> Measurement:
        what = {
            "metric": benchmark.metric.identity(),
            "tasks": benchmark.settings(),
            "batch": benchmark.metric.batch_size,
        }
        measured = lambda: measure(benchmark, "", model(), tokenizer, caching.batches).to_json()  # noqa: E731
        try:
            found = caching.found(weights, "benchmark", what, measured)
        except PipelineError as error:
            if caching.batches.world_size > 1:  # the others would wait for this one
                raise
            return Measurement(failed={f"/{benchmark.metric.label}": str(error)})
        return Measurement.from_json(found)

    def _sampled(
        self, model: Loading, rows: held_out.Rows, tokenizer: "PreTrainedTokenizerBase", caching: Cache, weights: str
    ) -> tuple[list[Scored], list[float]]:
        """``kl_samples`` answers to each prompt, and their log-probabilities."""
        from tasks.train.generation.generating import Sampling

        batches = caching.batches
        prompts = [[*ids] for ids in rows.prompt_ids for _ in range(self.kl_samples or 0)]
        seeds = [Random(f"{self.seed} {index}").getrandbits(63) for index in range(len(prompts))]
        asked = {"prompts": prompts, "seeds": seeds, "max_new_tokens": self.max_new_tokens}
        draw = lambda: sampled_tokens(  # noqa: E731
            model(), tokenizer, prompts, self.max_new_tokens, batches, Sampling(), seeds
        )
        answers = cast("list[list[int]]", caching.found(weights, "sampled tokens", asked, draw))
        samples = list(map(Scored.answer, prompts, answers))
        compute = lambda: logps(model(), samples, batches)  # noqa: E731
        return samples, cast("list[float]", caching.found(weights, "answers", _as_json(samples), compute))

    def _rewards(
        self,
        reward_model: Input,
        rows: held_out.Rows,
        read: Callable[[Sequence[held_out.Prompt], Sequence[Answer]], list[list[int]]],
        measured: Mapping[str, Measured],
        reference: Measured,
        ctx: TrainContext,
        weights: str,
        caching: Cache,
    ) -> tuple[list[RowScores], dict[str, float], dict[str, Sequence[float]]]:
        """The reward model's accuracy on the pairs, its scores of the answers, its accuracy by kind of pair, and its
        scores by policy.

        Args:
            read: tokenizes prompts with their answers.
        """
        from tasks.train.models.load import load_on_device

        num_models = len({id(each) for each in (*measured.values(), reference)})
        prompts, images, slot = rows.judged
        num_rows = 2 * len(rows.pairs.chosen) + len(prompts) * num_models
        model = Loading(partial(load_on_device, reward_model, ctx))
        weights = _digest(model, weights, caching)
        batches = caching.batches.counted(ctx.part, "reward_model", num_rows)

        def score(tokens: Sequence[Sequence[int]], of: str, seen: Sequence[Sequence[int]]) -> list[float]:
            vision = rows.visions.get(of)
            asked = caching.with_images([[*each] for each in tokens], vision, seen)
            compute = lambda: rewards(model(), tokens, batches, vision, seen)  # noqa: E731
            return cast("list[float]", caching.found(weights, "rewards", asked, compute) if tokens else [])

        def of_answers(policy: Measured) -> list[float]:
            return score(read(prompts, judged_of(rows).answers(policy)), slot, images)

        chosen, rejected = (
            score([row.input_ids for row in answers], "pairs", [row.images for row in answers])
            for answers in (rows.pairs.chosen, rows.pairs.rejected)
        )
        ctx.loaded("reward_model")
        wins = list(map(win, chosen, rejected))
        by_kind = {}
        for kind in sorted({kind for kind in rows.pairs.kinds if kind}):
            of_kind = [win for win, found in zip(wins, rows.pairs.kinds, strict=True) if found == kind]
            by_kind[f"reward_model/accuracy/{kind}"] = fmean(of_kind)
        scored = {name: of_answers(policy) for name, policy in measured.items()}
        same = [name for name, policy in measured.items() if policy is reference]
        against = scored[same[0]] if same else of_answers(reference)
        accuracy = [over_rows("accuracy", rows.pairs.chosen, {"reward_model": wins})] if wins else []
        return ([*accuracy, *reward_scores(rows, scored, against)], by_kind, {**scored, "reference": against})


@dataclass(frozen=True, kw_only=True)
class EvaluationCheck(Method):
    """Draws the rows of an evaluation long before it runs; its reference is the model that brings the tokenizer.

    Args:
        method: the evaluation, with ``max_length``, ``thinking`` and ``control_tokens`` as it will have them.
        chat_template: that a training before it installs; None: that of the reference.
    """

    method: Evaluate
    chat_template: str | None

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        """Raises what the evaluation would refuse of its rows."""
        from tasks.model.chat_template import install_chat_template
        from tasks.model.tokenizers import tokenizer_of

        tokenizer, method = tokenizer_of(inputs["reference"].path), self.method
        if self.chat_template:
            install_chat_template(tokenizer, self.chat_template)
        assert method.max_length
        lengths = method.lengths(method.max_length)
        method.rows_of(inputs, tokenizer, [inputs["reference"]], lengths, method.thinking, method.control_tokens)
        return {}


def _digest(model: Loading, files: str, caching: Cache) -> str:
    """Digest of a model by what it computes with; it is loaded where that of its files is not known.

    Args:
        files: digest of its files, which may hold the same model as others.
    """
    from tasks.train.generation.one_policy import digest_of_loaded

    if caching.folder is None:
        return files
    return str(caching.found(files, "loaded", None, lambda: digest_of_loaded(model())))


def _as_json(scored: Sequence[Scored]) -> list[list[list[int]]]:
    """Tokens of rows, and which of them count."""
    return [[[*each.input_ids], [*each.mask]] for each in scored]


def _write_answers(
    directory: Path, metrics: Metrics, rows: held_out.Rows, measured: Mapping[str, Measured], own: Sequence[str],
    failed: Mapping[str, str],
) -> None:  # fmt: skip
    write_report(
        directory, metrics, [prompt.messages for prompt in rows.prompts],
        {name: [answer.text for answer in policy.greedy] for name, policy in measured.items()},
        questions=[question.prompt.messages for question in rows.questions],
        references=[question.reference for question in rows.questions],
        answered={name: [answer.text for answer in policy.answered] for name, policy in measured.items()},
        own=[*dict.fromkeys(own)], failed=failed,
    )  # fmt: skip


def _with_errors(scores: Sequence[RowScores]) -> dict[str, float]:
    """``policy/metric`` -> its value, and ``policy/metric/stderr``."""
    found: dict[str, float] = {}
    for each in scores:
        found |= each.metrics()
        errors = {policy: each.standard_error(policy) for policy in each.scores}
        found |= {f"{name}/{each.metric}/stderr": error for name, error in errors.items() if error is not None}
    return found


def _visions(inputs: Inputs, models: Sequence[Input]) -> dict[str, Vision]:
    """How the images of each slot's rows are read, by the reference's processor; without slots that have none.

    Raises:
        ConfigError: a model is one of text.
    """
    of_rows = {slot: rows.path for slot, rows in inputs.items() if rows.kind in WITH_IMAGES}
    found = {slot: Vision.of(inputs["reference"].path, path) for slot, path in of_rows.items()}
    for model in models if any(found.values()) else ():
        require_reads_images(model.path, model.name)
    return {slot: each for slot, each in found.items() if each}


def trained_length(models: Sequence[Input]) -> int:
    """The longest ``max_length`` in the manifests of the models (ConfigError: no manifest has one)."""
    found = [recipe.get("max_length") for recipe in _recipes(models).values()]
    lengths = [length for length in found if isinstance(length, int)]
    if not lengths:
        raise ConfigError(
            f"max_length of evaluate is not set, and no manifest of {', '.join(model.name for model in models)} has "
            "one; a number of tokens is accepted; set max_length of evaluate"
        )
    return max(lengths)


def trained_thinking(models: Sequence[Input]) -> Thinking | None:
    """The ``thinking`` in the manifests of the models; None: no manifest has one (ConfigError: they do not agree)."""
    return agreed_thinking({
        name: recipe["thinking"] for name, recipe in _recipes(models).items() if "thinking" in recipe
    })  # fmt: skip


def agreed_thinking(trained: Mapping[str, object]) -> Thinking | None:
    """The ``thinking`` that all models were trained with.

    A stage without ``thinking`` refuses rows whose thinking its chat template drops, so it trains the same tokens as
    with ``keep``.

    Args:
        trained: stage -> its ``thinking``.

    Raises:
        ConfigError: some stages trained thinking, and others dropped it.
    """
    dropping = [name for name, thinking in trained.items() if thinking == "drop"]
    others = [name for name, thinking in trained.items() if thinking != "drop"]
    if dropping and others:
        raise ConfigError(
            f"thinking of evaluate is not set, and the stages differ: {', '.join(dropping)} trained with "
            f"thinking=drop, {', '.join(others)} without it; one thinking for all of them is accepted; set thinking of "
            "evaluate to keep or drop, or the same thinking on these stages"
        )
    return "drop" if dropping else "keep" if "keep" in trained.values() else None


def _recipes(models: Sequence[Input]) -> dict[str, Mapping[str, object]]:
    """Name -> recipe, of the models that have a manifest."""
    manifests = {model.name: Entry(model.path.parent).manifest() for model in models if model.path.name == "output"}
    return {name: manifest.recipe for name, manifest in manifests.items() if manifest}


def require_same_tokens(models: Inputs, reference: Input, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Requires the reference's tokens in every model, and its chat template in the reward model.

    Args:
        models: the policies, and the reward model in the slot ``reward_model``.
        tokenizer: the reference's.

    Raises:
        ConfigError: a model has another tokenizer, or the reward model has another chat template.
    """
    from tasks.model.tokenizers import differing_tokens, tokenizer_of

    vocabulary = tokenizer.get_vocab()
    for slot, model in models.items():
        own, known = (each.path / "tokenizer.json" for each in (model, reference))
        same = own.exists() and known.exists() and filecmp.cmp(own, known, shallow=False)
        apart = [] if same else differing_tokens(tokenizer_of(model.path).get_vocab(), vocabulary)
        if apart:
            raise ConfigError(other_tokens(slot, model.name, reference.name, apart))
        if slot == "reward_model" and tokenizer_of(model.path).chat_template != tokenizer.chat_template:
            raise ConfigError(
                f"reward_model ({model.name}) and {reference.name} have different chat templates, so it would score "
                "conversations in a form that it was not trained on; a reward model trained from a policy of the same "
                "chain is accepted; set the input reward_model to one"
            )


def other_tokens(slot: str, name: str, reference: str, apart: Sequence[str]) -> str:
    """The error message for a model that cannot be compared."""
    remedy = (
        "train the reward model from a model of the same base"
        if slot == "reward_model"
        else f"leave {slot} out, or train both from the same base, as cpt-sft-dpo-retrain starts from the champion"
    )
    return (
        f"{slot} ({name}) and {reference} have different tokenizers, so their metrics cannot be compared: "
        f"{len(apart)} tokens of {reference} are missing in {slot} or have other ids there, such as {apart[0]!r}; a "
        f"model that has all of them with the same ids is accepted; {remedy}"
    )

"""Metrics of policies, as scores per row, from their log-probabilities and answers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from lineage.errors import DataError, PipelineError
from tasks.evaluate.answers import Answer
from tasks.evaluate.row_scores import REWARD, RowScores, is_perplexity
from tasks.evaluate.rows import Question, Rows
from tasks.evaluate.scoring import Scored
from tasks.reward_functions import Scorer
from tasks.reward_functions.metric import PASS_AT_K, REWARD_MODEL, WIN_RATE, Metric, Metrics, at_equal_length, pass_at_k

AnswerForm = Literal["one_sentence"]  # expected form of answers

_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s")  # before another sentence


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Log-probabilities and answers of one policy.

    Args:
        text, answers, chosen, rejected: log-probability of each document, of the assistant's turns in each
            conversation, and of the two answers of each pair, in nats.
        greedy: its answer to each prompt.
        answered: its answer to each question of the conversations.
        unpaired: log-probability of each single answer.
        sampled: samples of answers to each prompt or question of ``asked_of``, for pass@k.
    """

    text: Sequence[float]
    answers: Sequence[float]
    chosen: Sequence[float]
    rejected: Sequence[float]
    greedy: Sequence[Answer]
    answered: Sequence[Answer]
    unpaired: Sequence[float] = ()
    sampled: Sequence[Sequence[Answer]] = ()


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What metrics score answers to: the slot ``prompts``, else questions of conversations, else prompts of pairs.

    Args:
        rows: id and group of each.
        columns: column -> a value per prompt; of questions, ``answer`` is the reference.
        answers: the answers of a policy to these prompts.
    """

    rows: Sequence[tuple[str, str]]
    prompts: Sequence[Sequence[Mapping[str, object]]]
    ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[object]]
    answers: Callable[[Measured], Sequence[Answer]]


def asked_of(rows: Rows) -> Asked:
    """What the metrics of a configuration score answers to."""
    if rows.questions and not rows.has_own_prompts:
        return Asked(
            rows=[(each.row_id, each.group) for each in rows.questions], ids=rows.question_ids,
            prompts=[each.prompt.messages for each in rows.questions],
            columns={"answer": [each.reference for each in rows.questions]}, answers=lambda policy: policy.answered,
        )  # fmt: skip
    return Asked(
        rows=[(each.name, each.name) for each in rows.prompts], ids=rows.prompt_ids,
        prompts=[each.messages for each in rows.prompts], columns=columns_of(rows),
        answers=lambda policy: policy.greedy,
    )  # fmt: skip


def judged_of(rows: Rows) -> Asked:
    """What a reward model scores answers to: the prompts, else the questions of conversations."""
    return asked_of(replace(rows, has_own_prompts=bool(rows.prompts)))


def metric_scores(
    asked: Asked,
    measured: Mapping[str, Measured],
    reference: Measured,
    metrics: Metrics,
    functions: Mapping[str, Scorer],
    rewards: Mapping[str, Sequence[float]] | None = None,
) -> tuple[list[RowScores], dict[str, str]]:
    """The metrics of a configuration that score answers, per row; and ``policy/metric`` -> why it has no value.

    Args:
        functions: name of a metric -> its reward function.
        rewards: policy -> a reward model's score of each of its answers, and ``reference``.
    """
    found, failed = list[RowScores](), dict[str, str]()
    for metric in metrics:
        values: dict[str, Sequence[float]] = {}
        for name, policy in measured.items():
            try:
                values[name] = _values(asked, metric, name, policy, reference, functions, rewards or {})
            except (PipelineError, DataError) as error:
                failed[f"{name}/{metric.label}"] = str(error)
        if values and asked.rows:
            small = metric.small_is_good if metric.function != WIN_RATE else False
            scores = equal_weights(metric.label, asked.rows, values)
            bounded = metric.is_bounded or (metric.function == WIN_RATE and not metric.length_control)
            found.append(replace(scores, small_is_good=small, bounded=bounded))
    return found, failed


def _values(
    asked: Asked, metric: Metric, name: str, policy: Measured, reference: Measured, functions: Mapping[str, Scorer],
    rewards: Mapping[str, Sequence[float]],
) -> list[float]:  # fmt: skip
    """A metric's value of each row.

    Raises:
        PipelineError, DataError: its function raised, or did not return a finite number per row.
    """
    answers = [each.text for each in asked.answers(policy)]
    if metric.function == PASS_AT_K:
        samples = metric.samples_of
        texts = [each.text for of_row in policy.sampled for each in of_row[:samples]]
        repeated = [index for index in range(len(asked.prompts)) for _ in range(samples)]
        columns = {column: [values[index] for index in repeated] for column, values in asked.columns.items()}
        scores = functions[metric.label]([asked.prompts[index] for index in repeated], texts, columns)
        right = [sum(score >= 1 for score in scores[at : at + samples]) for at in range(0, len(scores), samples)]
        return [pass_at_k(each, samples, metric.k or 1) for each in right]
    if metric.function != WIN_RATE:
        return functions[metric.label](asked.prompts, answers, asked.columns)
    others = asked.answers(reference)
    if metric.judge == REWARD_MODEL:
        wins = list(map(win, rewards[name], rewards["reference"]))
    else:
        row_columns: dict[str, Sequence[object]] = {**asked.columns, "references": [each.text for each in others]}
        wins = functions[metric.label](asked.prompts, answers, row_columns)
        beyond = next((row for row, value in enumerate(wins) if not 0 <= value <= 1), None)
        if beyond is not None:
            raise PipelineError(
                f"metrics.{metric.label} returned {wins[beyond]:g} for row {beyond}; a judge's number from 0, where "
                "the reference's answer is better, to 1 is accepted; correct the function"
            )
    if not metric.length_control:
        return wins
    return at_equal_length(wins, [each.num_tokens for each in asked.answers(policy)], [o.num_tokens for o in others])


def policy_scores(
    rows: Rows, measured: Mapping[str, Measured], reference: Measured, form: AnswerForm | None = None
) -> list[RowScores]:
    """All metrics that have rows and need no reward model.

    ``preference_accuracy`` compares implicit rewards against the reference: Rafailov et al. 2023, eq. 5.
    """
    wins = {
        name: [
            win(chosen - reference_chosen, rejected - reference_rejected)
            for chosen, rejected, reference_chosen, reference_rejected in zip(
                policy.chosen, policy.rejected, reference.chosen, reference.rejected, strict=True
            )
        ]
        for name, policy in measured.items()
    }
    likelier = {name: list(map(win, policy.chosen, policy.rejected)) for name, policy in measured.items()}
    # A sum over tokens favours the shorter answer.
    per_token = {
        name: list(map(win, _means(policy.chosen, rows.pairs.chosen), _means(policy.rejected, rows.pairs.rejected)))
        for name, policy in measured.items()
    }
    scores = [
        *perplexities(rows, measured),
        over_rows("preference_accuracy", rows.pairs.chosen, wins),
        over_rows("logp_accuracy", rows.pairs.chosen, likelier),
        over_rows("mean_logp_accuracy", rows.pairs.chosen, per_token),
        *_of_unpaired(rows, measured, reference),
        *_of_answers(rows, measured),
        *(_of_form(rows, measured) if form else []),
    ]
    return [each for each in scores if each.row_ids]


def _of_unpaired(rows: Rows, measured: Mapping[str, Measured], reference: Measured) -> list[RowScores]:
    """How the desirable answers are distinguished from the others.

    ``unpaired_accuracy``: the share whose implicit reward against the reference is positive where they are desirable,
    and negative where they are not. ``unpaired_auc``: how often a desirable answer is likelier per token than one that
    is not, over all such pairs of rows.
    """
    answers, desirable = rows.unpaired.answers, rows.unpaired.desirable
    prefers_desirable = {
        name: [
            win(logp, base) if wanted else win(base, logp)
            for logp, base, wanted in zip(policy.unpaired, reference.unpaired, desirable, strict=True)
        ]
        for name, policy in measured.items()
    }
    found = [over_rows("unpaired_accuracy", answers, prefers_desirable)]
    if len(set(desirable)) == 2:
        ranked = {name: auc_scores(_means(policy.unpaired, answers), desirable) for name, policy in measured.items()}
        found.append(over_rows("unpaired_auc", answers, ranked))
    return found


def auc_scores(scores: Sequence[float], positive: Sequence[bool]) -> list[float]:
    """A number for each row: their mean is the area under the curve, their variation that of the area.

    Each is the area, and the row's own share of wins less the area, weighted by how rare its label is: the structural
    components of DeLong et al. 1988, Biometrics 44(3), eq. 2, as pseudo-values, so that a bootstrap over rows has the
    right noise.
    """
    wanted = [score for score, label in zip(scores, positive, strict=True) if label]
    others = [score for score, label in zip(scores, positive, strict=True) if not label]
    shares = [
        fmean(win(score, other) for other in others) if label else fmean(win(other, score) for other in wanted)
        for score, label in zip(scores, positive, strict=True)
    ]
    area = fmean(share for share, label in zip(shares, positive, strict=True) if label)
    return [
        area + (share - area) * len(scores) / len(wanted if label else others)
        for share, label in zip(shares, positive, strict=True)
    ]


def reward_scores(rows: Rows, rewards: Mapping[str, Sequence[float]], reference: Sequence[float]) -> list[RowScores]:
    """The rewards of each policy's answers, and its win rate over the reference.

    Args:
        rewards: policy -> reward of its answer to each prompt of ``judged_of``.
        reference: rewards of the reference's answers.
    """
    wins = {name: list(map(win, of_policy, reference)) for name, of_policy in rewards.items()}
    judged = judged_of(rows).rows
    return [equal_weights("reward_score", judged, rewards), equal_weights("win_rate", judged, wins)]


def function_scores(rows: Rows, measured: Mapping[str, Measured], scorers: Sequence[Scorer]) -> list[RowScores]:
    """What each reward function gives to each policy's greedy answers to the prompts."""
    asked, columns = [prompt.messages for prompt in rows.prompts], columns_of(rows)
    prompts = [(prompt.name, prompt.name) for prompt in rows.prompts]
    return [
        equal_weights(
            f"{REWARD}{scorer.name}", prompts,
            {name: scorer(asked, [each.text for each in policy.greedy], columns) for name, policy in measured.items()},
        )
        for scorer in scorers
    ]  # fmt: skip


def columns_of(rows: Rows) -> dict[str, list[object]]:
    """The further columns of the prompts; None where a row lacks one."""
    names = dict.fromkeys(name for prompt in rows.prompts for name in prompt.columns)
    return {name: [prompt.columns.get(name) for prompt in rows.prompts] for name in names}


def _means(logps: Sequence[float], rows: Sequence[Scored]) -> list[float]:
    """Per token."""
    return [logp / row.num_tokens for logp, row in zip(logps, rows, strict=True)]


def _of_answers(rows: Rows, measured: Mapping[str, Measured]) -> list[RowScores]:
    """The share of answers equal to the right one, and of answers that the limit of new tokens cut off."""
    exact = {
        name: [
            float(answer.text.strip() == question.reference.strip())
            for answer, question in zip(policy.answered, rows.questions, strict=True)
        ]
        for name, policy in measured.items()
    }
    unfinished = {
        name: [float(not answer.finished) for answer in (*policy.greedy, *policy.answered)]
        for name, policy in measured.items()
    }
    asked = [(prompt.name, prompt.name) for prompt in rows.prompts]
    asked += [(each.row_id, each.group) for each in rows.questions]
    return [over_rows("exact_match", rows.questions, exact), equal_weights("unfinished_share", asked, unfinished)]


def _of_form(rows: Rows, measured: Mapping[str, Measured]) -> list[RowScores]:
    """The share of answers to the questions that are one finished sentence, and the length of answers."""
    of_form = {
        name: [float(answer.finished and is_one_sentence(answer.text)) for answer in policy.answered]
        for name, policy in measured.items()
    }
    lengths = {name: [float(answer.num_tokens) for answer in policy.answered] for name, policy in measured.items()}
    return [
        over_rows("one_sentence_share", rows.questions, of_form),
        over_rows("answer_tokens", rows.questions, lengths),
    ]


def is_one_sentence(text: str) -> bool:
    """Whether a text is one line with a single end of a sentence, at its end."""
    line = text.strip()
    return "\n" not in line and line.endswith((".", "!", "?")) and _SENTENCE_END.search(line) is None


def perplexities(rows: Rows, measured: Mapping[str, Measured]) -> list[RowScores]:
    """Perplexities of the documents and of the answers in the conversations, as far as there are rows.

    Where rows have labels, ``text_perplexity/LABEL`` too.
    """
    text = {name: policy.text for name, policy in measured.items()}
    answers = {name: policy.answers for name, policy in measured.items()}
    scores = [
        replace(over_rows(metric, scored, of_policies), weights=[row.num_tokens for row in scored])
        for metric, scored, of_policies in (
            ("text_perplexity", rows.text, text), ("answer_perplexity", rows.answers, answers)
        )
    ]  # fmt: skip
    of_labels = (
        of_label
        for each, scored in zip(scores, (rows.text, rows.answers), strict=True)
        for of_label in _by_label(each, scored)
    )
    return [each for each in (*scores, *of_labels) if each.row_ids]


def by_label(scores: Sequence[RowScores]) -> list[RowScores]:
    """The perplexities of labels among metrics."""
    return [each for each in scores if is_perplexity(each.metric.partition("/")[0]) and "/" in each.metric]


def _by_label(scores: RowScores, rows: Sequence[Scored]) -> list[RowScores]:
    """A perplexity of the rows of each label."""
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        if row.domain is not None:
            places.setdefault(row.domain, []).append(place)
    return [
        replace(
            scores, metric=f"{scores.metric}/{label}", row_ids=[scores.row_ids[each] for each in at],
            groups=[scores.groups[each] for each in at], weights=[scores.weights[each] for each in at],
            scores={name: [values[each] for each in at] for name, values in scores.scores.items()},
        )
        for label, at in sorted(places.items())
    ]  # fmt: skip


def over_rows(metric: str, rows: Sequence[Scored | Question], scores: Mapping[str, Sequence[float]]) -> RowScores:
    """A metric of rows."""
    return equal_weights(metric, [(row.row_id, row.group) for row in rows], scores)


def equal_weights(metric: str, rows: Sequence[tuple[str, str]], scores: Mapping[str, Sequence[float]]) -> RowScores:
    """A metric with equal weights, of rows with their groups."""
    row_ids, groups = [row for row, _ in rows], [group for _, group in rows]
    return RowScores(metric=metric, row_ids=row_ids, groups=groups, weights=[1] * len(rows), scores=scores)


def win(score: float, other: float) -> float:
    """1 where the first of two scores is higher, 0.5 for a tie."""
    return 0.5 if score == other else float(score > other)

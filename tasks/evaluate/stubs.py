"""Known-right and known-wrong stand-ins for a policy, put through its metrics: a gate is tested with them.

Metrics of answers get answers: the right ones, those of other rows, none, and one without an end. Metrics of
log-probabilities get these: a certain model and a uniform one, an order of answers and its reverse. Metrics of rewards
get rewards far above and far below those of the reference.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lineage.errors import DataError, PipelineError
from tasks.evaluate.answers import Answer
from tasks.evaluate.benchmarks import Benchmark, stub_scores
from tasks.evaluate.measured import (
    AnswerForm,
    Asked,
    Measured,
    asked_of,
    equal_weights,
    judged_of,
    metric_scores,
    over_rows,
    policy_scores,
    reward_scores,
)
from tasks.evaluate.row_scores import KL, REWARD, RowScores, read_scores, write_scores
from tasks.evaluate.rows import Rows
from tasks.evaluate.scoring import Scored
from tasks.reward_functions import RewardFunction, Rewards, Scorer
from tasks.reward_functions.answer import EMPTY, SHUFFLED, references
from tasks.reward_functions.built_in import BUILT_IN
from tasks.reward_functions.metric import REWARD_MODEL, WIN_RATE, Metric, Metrics, rewards_of

RIGHT, WRONG, ENDLESS = "right", "wrong", "endless"
SOLUTION = "solution"  # column of a known-right answer, for functions that cannot say one
STUBS_FOLDER, UNTESTED_FILE = "stubs", "untested.json"
FAILS = "it fails"  # a function or a benchmark, which is its fault
_FAR = 1e3  # a reward
# Metric -> the stubs that a rule on it must refuse.
_MUST_REFUSE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("text_perplexity", "answer_perplexity", "preference_accuracy", "logp_accuracy"), (WRONG,)),
    **dict.fromkeys(("mean_logp_accuracy", "unpaired_accuracy", "unpaired_auc"), (WRONG,)),
    "exact_match": (SHUFFLED, EMPTY), "one_sentence_share": (EMPTY, ENDLESS),
    "unfinished_share": (ENDLESS,), "answer_tokens": (ENDLESS,),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Stubs:
    """What metrics give to stubs.

    Args:
        scores: metric -> its scores, of the stub ``right`` and of those that a rule must refuse.
        untested: metric -> why no stub can be put through it.
    """

    scores: Mapping[str, RowScores] = field(default_factory=dict)
    untested: Mapping[str, str] = field(default_factory=dict)

    def write(self, report: Path) -> None:
        """Writes them into the folder of an evaluation's output."""
        write_scores(report / STUBS_FOLDER, [*self.scores.values()], {})
        (report / STUBS_FOLDER / UNTESTED_FILE).write_text(json.dumps(dict(self.untested), indent=2) + "\n")

    @staticmethod
    def read(report: Path) -> "Stubs | None":
        """Those of an evaluation; None: its writer tested no metric."""
        place = report / STUBS_FOLDER
        if not (place / UNTESTED_FILE).is_file():
            return None
        return Stubs(scores=read_scores(place), untested=json.loads((place / UNTESTED_FILE).read_text()))


def stubs_of(
    rows: Rows, *, metrics: Metrics, functions: Mapping[str, Scorer], rewards: Rewards,
    reward_functions: Sequence[Scorer], form: AnswerForm | None, has_reward_model: bool, has_kl: bool,
    vocabulary: int, max_new_tokens: int, num_tokens: Callable[[str], int], benchmarks: Sequence[Benchmark] = (),
) -> Stubs:  # fmt: skip
    """Puts the stubs through the metrics of an evaluation.

    Args:
        functions, reward_functions: those of ``metrics`` by name, and those of ``rewards``.
        vocabulary: number of tokens, over which the wrong model is uniform.
        num_tokens: of a text.
    """
    of_rewards = replace(asked_of(rows), answers=lambda policy: policy.answered)
    built = _built_in_metrics(rows, form, vocabulary, max_new_tokens, num_tokens)
    untested: dict[str, str] = {}
    asked_for = {each.label: each for each in metrics if not each.is_benchmark}
    own: dict[str, tuple[Metric, Scorer | None]] = {
        f"{REWARD}{each.name}": (Metric(function=each.name), each) for each in reward_functions
    }
    for label, metric in asked_for.items():
        own[label] = (metric, functions.get(label))
    specs = {**{f"{REWARD}{name}": each for name, each in rewards.items()}, **rewards_of(metrics)}
    for label, (metric, scorer) in own.items():
        asked = _own_prompts(rows) if label.startswith(REWARD) else of_rewards
        asked = judged_of(rows) if metric.judge == REWARD_MODEL else asked
        found = _of_function(asked, label, metric, specs.get(label), scorer, num_tokens)
        if isinstance(found, str):
            untested[label] = found
        else:
            built.append(found)
    if has_reward_model:
        built += _of_reward_model(rows)
    if has_kl:
        far = [max_new_tokens * math.log(vocabulary)] * len(rows.prompts)
        built.append(
            equal_weights(KL, [(each.name, each.name) for each in rows.prompts], {RIGHT: [0.0] * len(far), WRONG: far})
        )
    for benchmark in benchmarks:
        try:
            built += stub_scores(benchmark)
        except PipelineError as error:
            untested[benchmark.metric.label] = f"{FAILS} on known answers: {error}"
    return Stubs(scores={each.metric: each for each in built if each.row_ids}, untested=untested)


def _built_in_metrics(
    rows: Rows, form: AnswerForm | None, vocabulary: int, max_new_tokens: int, num_tokens: Callable[[str], int]
) -> list[RowScores]:
    """The metrics that need no option, through the code that scores policies."""

    def sure(scored: Sequence[Scored], nats_per_token: float) -> list[float]:
        return [-nats_per_token * row.num_tokens for row in scored]

    def model(good: float, bad: float, answered: Sequence[Answer], asked: Answer) -> Measured:
        return Measured(
            text=sure(rows.text, good), answers=sure(rows.answers, good), chosen=sure(rows.pairs.chosen, good),
            rejected=sure(rows.pairs.rejected, bad), answered=answered, greedy=[asked] * len(rows.prompts),
            unpaired=[
                -(good if wanted else bad) * row.num_tokens
                for row, wanted in zip(rows.unpaired.answers, rows.unpaired.desirable, strict=True)
            ],
        )  # fmt: skip

    right = [each.reference for each in rows.questions]
    texts = {RIGHT: right, WRONG: right, SHUFFLED: shuffled(right) or right, EMPTY: [""] * len(right)}
    uniform = math.log(vocabulary)
    finished = {
        name: [Answer(text=each, finished=True, num_tokens=num_tokens(each)) for each in of_stub]
        for name, of_stub in texts.items()
    }
    endless = Answer(text="x", finished=False, num_tokens=max_new_tokens)
    done = Answer(text="x", finished=True, num_tokens=1)
    stubs = {
        name: model(*((uniform, 0.0) if name == WRONG else (0.0, uniform)), answered, done)
        for name, answered in finished.items()
    }
    stubs[ENDLESS] = model(0.0, uniform, [endless] * len(right), endless)
    undecided = model(uniform / 2, uniform / 2, finished[RIGHT], done)
    found = []
    for each in policy_scores(rows, stubs, undecided, form):
        refused = [
            name
            for name in _MUST_REFUSE.get(each.metric.partition("/")[0], ())  # after the / a label
            if name != SHUFFLED or texts[SHUFFLED] is not right
        ]
        found.append(replace(each, scores={name: each.scores[name] for name in (RIGHT, *refused)}))
    return found


def shuffled(right: Sequence[str]) -> list[str] | None:
    """For each row the right answer of another, which differs; None: all rows have the same."""
    if len(set(right)) < 2:
        return None
    found = []
    for row, own in enumerate(right):
        others = (right[(row + step) % len(right)] for step in range(1, len(right)))
        found.append(next(other for other in others if other != own))
    return found


def _own_prompts(rows: Rows) -> Asked:
    """The prompts that ``rewards`` scores answers to, also where there are questions."""
    return replace(asked_of(replace(rows, has_own_prompts=True)), answers=lambda policy: policy.answered)


def _of_function(
    asked: Asked, label: str, metric: Metric, reward: RewardFunction | None, scorer: Scorer | None,
    num_tokens: Callable[[str], int],
) -> "RowScores | str":  # fmt: skip
    """A metric's scores of stubs; or why it has none."""
    if metric.function == WIN_RATE and metric.judge == REWARD_MODEL:
        wins = {RIGHT: [1.0] * len(asked.rows), WRONG: [0.0] * len(asked.rows)}
        return replace(equal_weights(label, asked.rows, wins), small_is_good=False)
    assert reward and scorer
    missing = [name for name in scorer.columns if name not in asked.columns and name != "references"]
    if missing:
        return f"the rows have no column {missing[0]}"
    built_in = BUILT_IN.get(reward.function or label.removeprefix(REWARD))
    wrong = built_in.wrong(reward) if built_in else (SHUFFLED, EMPTY) if scorer.takes_columns else (EMPTY,)
    if metric.function == WIN_RATE:
        wrong = (SHUFFLED, EMPTY)
    if not wrong:
        return "it measures no rightness: answers of no kind are right or wrong by it"
    known = [
        (row, text)
        for row in range(len(asked.rows))
        if (text := _right({name: values[row] for name, values in asked.columns.items()}, reward, label)) is not None
    ]
    if not known:
        return f"no row says a right answer; a column {SOLUTION} in the rows would"
    at, right = [row for row, _ in known], [text for _, text in known]
    few = replace(
        asked, rows=[asked.rows[row] for row in at], prompts=[asked.prompts[row] for row in at],
        columns={name: [values[row] for row in at] for name, values in asked.columns.items()},
    )  # fmt: skip
    texts: dict[str, Sequence[str]] = {RIGHT: right}
    if SHUFFLED in wrong and (others := shuffled(right)):
        texts[SHUFFLED] = others
    texts[EMPTY] = [""] * len(right)
    try:
        return _through(few, label, metric, scorer, texts, num_tokens)
    except (PipelineError, DataError) as error:
        return f"{FAILS} on known answers: {error}"


def _right(row: Mapping[str, object], reward: RewardFunction, label: str) -> str | None:
    """A right answer of a row: of its column, of the built-in function, else its ``answer``."""
    if row.get(SOLUTION) is not None:
        return str(row[SOLUTION])
    built_in = BUILT_IN.get(reward.function or label.removeprefix(REWARD))
    if built_in:
        return built_in.right(reward, row)
    return references(row["answer"])[0] if row.get("answer") is not None else None


def _through(
    asked: Asked, label: str, metric: Metric, scorer: Scorer, texts: Mapping[str, Sequence[str]],
    num_tokens: Callable[[str], int],
) -> RowScores:  # fmt: skip
    """The scores of stubs by the code that scores policies; a judge compares the right one with a wrong one.

    Raises:
        PipelineError, DataError: the function fails on known answers.
    """
    samples = metric.samples_of
    measured: dict[str, Measured] = {}
    for name, of_texts in texts.items():
        answers = [Answer(text=each, finished=True, num_tokens=num_tokens(each)) for each in of_texts]
        measured[name] = Measured(
            text=(), answers=(), chosen=(), rejected=(), greedy=(), answered=answers,
            sampled=[[each] * samples for each in answers],
        )  # fmt: skip
    metric = replace(metric, name=label)
    score = partial(metric_scores, asked, metrics=[metric], functions={label: scorer})
    other = next(name for name in texts if name != RIGHT)
    found = list[RowScores]()
    for name, of_stub in measured.items():
        scored, failed = score({name: of_stub}, measured[other if name == RIGHT else RIGHT])
        for reason in failed.values():
            raise PipelineError(reason)
        found += scored
    return replace(found[0], scores={name: values for each in found for name, values in each.scores.items()})


def _of_reward_model(rows: Rows) -> list[RowScores]:
    count = len(judged_of(rows).rows)
    far = {RIGHT: [_FAR] * count, WRONG: [-_FAR] * count}
    wins = {RIGHT: [1.0] * len(rows.pairs.chosen), WRONG: [0.0] * len(rows.pairs.chosen)}
    return [*reward_scores(rows, far, [0.0] * count), over_rows("accuracy", rows.pairs.chosen, wins)]

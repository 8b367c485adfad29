"""Writes the results of an evaluation, for people and for programs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lineage.markup import markdown_table
from tasks.data.images import named_images
from tasks.evaluate.row_scores import FAILED_FILE, KL, REWARD

Message = dict[str, str]
METRICS_FILE, ANSWERS_FILE, TABLE_FILE = "metrics.json", "answers.jsonl", "table.md"
LOST = ("rows_dropped", "rows_cut", "prompts_cut")  # numbers of rows
RIGHT = "right answer"
_NUM_SAMPLES = 5
# Metric of a policy -> title of its column, and digits after the point; what matters most comes first.
_COLUMNS = {
    "exact_match": ("exact match ↑", 2),
    "preference_accuracy": ("preference acc. (implicit reward) ↑", 3),
    "win_rate": ("win rate over the reference ↑", 2),
    "one_sentence_share": ("answers of one sentence ↑", 2),
    "unfinished_share": ("answers cut off ↓", 2),
    "reward_score": ("reward of answers ↑", 2),
    "unpaired_accuracy": ("single answers acc. (implicit reward) ↑", 3),
    "answer_tokens": ("tokens per answer ↓", 1),
    "answer_perplexity": ("answer ppl ↓", 1),
    "text_perplexity": ("text ppl ↓", 1),
    "logp_accuracy": ("preference acc. (log-prob.) ↑", 3),
    "mean_logp_accuracy": ("preference acc. (log-prob. per token) ↑", 3),
    "unpaired_auc": ("single answers AUC (log-prob. per token) ↑", 3),
    KL: ("KL to the reference, nats per answer ↓", 2),
}
_PAIRS, _UNPAIRED, _SCORED, _FORM = ("pairs",), ("unpaired",), ("reward_model",), ("answer_form",)
# Metric of a policy -> slots, or the field, of which one must be set; ``kl`` is measured where it is asked for.
POLICY_METRICS: Mapping[str, tuple[str, ...]] = {
    "text_perplexity": ("text",), "answer_perplexity": ("conversations",), "exact_match": ("conversations",),
    "preference_accuracy": _PAIRS, "logp_accuracy": _PAIRS, "mean_logp_accuracy": _PAIRS,
    "unpaired_accuracy": _UNPAIRED, "unpaired_auc": _UNPAIRED, "reward_score": _SCORED, "win_rate": _SCORED,
    "unfinished_share": ("prompts", "pairs", "unpaired", "conversations"), "one_sentence_share": _FORM,
    "answer_tokens": _FORM,
}  # fmt: skip


def write_report(
    directory: Path,
    metrics: Mapping[str, float],
    prompts: Sequence[Sequence[Message]],
    answers: Mapping[str, Sequence[str]],
    questions: Sequence[Sequence[Message]],
    references: Sequence[str],
    answered: Mapping[str, Sequence[str]],
    own: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
) -> None:
    """Writes ``metrics.json``, ``answers.jsonl`` (a prompt, its right answer if there is one, and an answer per
    policy) and ``table.md``.

    Args:
        prompts, answers: of the held-out pairs.
        questions, references, answered: of the held-out conversations, with their right answers: the samples in the
            table. Without questions, the prompts are the samples.
        own: the further metrics, in a table of their own with standard errors.
        failed: ``policy/metric`` -> why it has no value.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / METRICS_FILE).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    lines = [
        json.dumps({"prompt": prompt, **{name: texts[index] for name, texts in answers.items()}}, ensure_ascii=False)
        for index, prompt in enumerate(prompts)
    ]
    lines += [
        json.dumps(
            {"prompt": question, RIGHT: references[index]} | {name: texts[index] for name, texts in answered.items()},
            ensure_ascii=False,
        )
        for index, question in enumerate(questions)
    ]
    if lines:  # without generated answers there is no file
        (directory / ANSWERS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    samples = _samples(questions, {RIGHT: references, **answered}) if questions else _samples(prompts, answers)
    parts = [
        _policies(metrics, list(answers)), _own(metrics, list(answers), own), _failed(failed or {}),
        _reward_model(metrics), _lost(metrics), samples,
    ]  # fmt: skip
    if failed:
        (directory / FAILED_FILE).write_text(json.dumps(dict(failed), indent=2) + "\n", encoding="utf-8")
    (directory / TABLE_FILE).write_text("\n".join(filter(None, parts)), encoding="utf-8")


def shown_columns(metrics: Mapping[str, float], name: str) -> dict[str, tuple[str, int]]:
    """Metric of a policy -> title and digits, for those that were measured, the most important first."""
    first = f"{name}/"
    rewards = [key.removeprefix(first) for key in metrics if key.startswith(f"{first}{REWARD}")]
    known = {**{key: (f"{key.removeprefix(REWARD)} ↑", 3) for key in rewards}, **_COLUMNS}
    return {key: column for key, column in known.items() if f"{first}{key}" in metrics}


def title_of(metric: str) -> str:
    """A metric as people read it: ``answers cut off`` for ``unfinished_share``."""
    return _COLUMNS[metric][0][:-2] if metric in _COLUMNS else metric


def _policies(metrics: Mapping[str, float], names: Sequence[str]) -> str:
    columns = shown_columns(metrics, names[0])
    rows = [
        [name, *(f"{metrics[f'{name}/{key}']:.{digits}f}" for key, (_, digits) in columns.items())] for name in names
    ]
    return table_of(["policy", *(title for title, _ in columns.values())], rows)


OWN_TITLE = "metric (mean ± standard error)"


def _own(metrics: Mapping[str, float], names: Sequence[str], own: Sequence[str]) -> str:
    """A line per further metric: each policy's mean with its standard error."""
    rows = own_rows(metrics, names, own)
    return table_of([OWN_TITLE, *names], rows) if rows else ""


def own_rows(metrics: Mapping[str, float], names: Sequence[str], own: Sequence[str] | None = None) -> list[list[str]]:
    """Further metrics, each with the values of policies; None: those that have no column of their own."""

    def shown(key: str) -> str:
        error = metrics.get(f"{key}/stderr")
        return "" if key not in metrics else f"{metrics[key]:.4g}" + ("" if error is None else f" ± {error:.2g}")

    if own is None:
        first = f"{names[-1]}/"
        every = [key.removeprefix(first) for key in metrics if key.startswith(first) and not key.endswith("/stderr")]
        own = [name for name in every if name not in shown_columns(metrics, names[-1])]
    return [[metric, *(shown(f"{name}/{metric}") for name in names)] for metric in own]


def _failed(failed: Mapping[str, str]) -> str:
    return table_of(["failed", "why"], [[name, _cell(reason)] for name, reason in failed.items()]) if failed else ""


def _reward_model(metrics: Mapping[str, float]) -> str:
    prefix = "reward_model/accuracy"
    shown = {
        key.removeprefix(prefix).lstrip("/") or "all pairs": value
        for key, value in metrics.items()
        if key.startswith(prefix)
    }
    if not shown:
        return ""
    return table_of(["reward model", *shown], [["accuracy ↑", *(f"{value:.2f}" for value in shown.values())]])


def _lost(metrics: Mapping[str, float]) -> str:
    """Numbers of held-out rows that were dropped or cut; empty where none were."""
    rows = [
        [what, kind, f"{count:.0f}"]
        for kind, _, what in (key.rpartition("/") for key in metrics)
        if what in LOST and (count := metrics[f"{kind}/{what}"])
    ]
    return table_of(["held-out rows", "of", "number"], rows) if rows else ""


def _samples(prompts: Sequence[Sequence[Message]], answers: Mapping[str, Sequence[str]]) -> str:
    """A few prompts with the answers below each."""
    blocks = []
    for index, prompt in enumerate(prompts[:_NUM_SAMPLES]):
        rows = [[name, _cell(texts[index])] for name, texts in answers.items()]
        blocks.append(markdown_table(["policy", _cell(named_images(prompt[-1]["content"]))], rows) + "\n")
    return "\n".join(blocks)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of a report, whose columns are aligned."""
    return markdown_table(columns, rows, align="left") + "\n"

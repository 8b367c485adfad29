"""Output of ``posttrain diff``."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from flows.reports.wording import on_screen, printable
from lineage.graph.diff import Cause, Diff
from tasks.evaluate.report import title_of

if TYPE_CHECKING:
    from flows.reports.model import ScoreRow

_TITLES = {
    "diagnosis": "a diagnosis",
    "recipe": "its own recipe",
    "data": "data",
    "graph": "the graph",
    "recipe of a parent": "recipes of what it was made from",
    "bytes of an input": "inputs of the same fingerprint and other bytes",
    "seed": "seeds",
    "code": "code",
    "git": "git",
    "resources": "resources",
    "libraries": "libraries",
    "python": "python",
    "hosts": "hosts",
}
# They name their stage.
_SELF_EXPLAINED = ("diagnosis", "recipe", "data", "graph", "recipe of a parent", "bytes of an input", "seed")
_MOST_METRICS = 8  # of one stage
_MOST_SCORES = 12


def diff_text(found: Diff, scores: "Sequence[ScoreRow]" = ()) -> str:
    """The verdict, the ranked causes, the changed metrics, and what evaluations say of both."""
    lines = [
        f"A {found.first.id}",
        f"B {found.second.id}",
        _verdict(found),
        *cause_lines(found.causes),
        *_metrics(found, without="evaluation/" if scores else "(none)"),
        *_scores(scores),
    ]
    return on_screen("\n".join(map(printable, lines)))


def _scores(scores: "Sequence[ScoreRow]") -> Iterator[str]:
    if scores:
        yield "evaluated:"
    for row in scores[:_MOST_SCORES]:
        first, second = ("(none)" if each is None else f"{each['value']:.4g}" for each in row["values"])
        name, comma, how = row["metric"].partition(", ")  # on other rows or other settings
        yield f"  {title_of(name)} {row['better']}: {first} -> {second}{comma}{how}"
    if len(scores) > _MOST_SCORES:
        yield f"  and {len(scores) - _MOST_SCORES} more (posttrain report --compare A B shows all)"


def _verdict(found: Diff) -> str:
    if found.first.id == found.second.id:
        return "A and B are one artifact"
    if found.same_output:
        same = "the outputs are equal, byte for byte"
        return same if found.same_fingerprint else f"{same}, though the fingerprints differ"
    if found.same_fingerprint and found.same_output is False:
        return (
            "the fingerprints are equal and the outputs differ: the same work gave other bytes; "
            "likely causes are code, libraries and hardware"
        )
    return "what differs, the most likely cause first:" if found.causes else "nothing that is recorded differs"


def cause_lines(causes: Sequence[Cause]) -> Iterator[str]:
    """Causes below their titles."""
    title = ""
    for cause in causes:
        if title != _TITLES[cause.what]:
            title = _TITLES[cause.what]
            yield f"{title}:"
        yield f"  {cause.text}" + ("" if cause.what in _SELF_EXPLAINED else f"  ({', '.join(cause.stages)})")


def _metrics(found: Diff, without: str) -> Iterator[str]:
    """Args: without: beginning of names that are left out."""
    if found.metrics:
        yield "and in consequence, measured:"
    for stage, every in found.metrics.items():
        changed = {name: values for name, values in every.items() if not name.startswith(without)}
        for name, values in list(changed.items())[:_MOST_METRICS]:
            first, second = ("(none)" if value is None else f"{value:.6g}" for value in values)
            yield f"  {stage}: {name}: {first} -> {second}"
        if len(changed) > _MOST_METRICS:
            yield f"  {stage}: and {len(changed) - _MOST_METRICS} more (--json lists all)"

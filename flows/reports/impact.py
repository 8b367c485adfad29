"""Output of ``posttrain impact``."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from flows.reports.wording import empty_table, plain_text, printable, relative
from lineage.artifact import ALIAS, SOURCE, Kind
from lineage.graph.ancestry import MODELS
from lineage.graph.impact import MOST_VERSIONS, Impact, Retraining
from lineage.graph.places import Indexed

_MOST_ARTIFACTS = 20
_MOST_ROWS = 10
_MOST_PIPELINES = 5


def impact_text(found: Impact) -> str:
    """The affected artifacts and aliases, and how to retrain."""
    lines = [*_rows(found), *_artifacts(found), *_aliases(found), "", *_retrainings(found)]
    return "\n".join(map(printable, lines))


def _rows(found: Impact) -> Iterator[str]:
    rows = found.meant.rows
    for row in rows[:_MOST_ROWS]:
        yield f"row {row.row_id}: {row.text}"
    if len(rows) > _MOST_ROWS:
        yield f"and {len(rows) - _MOST_ROWS} more rows"
    if rows:
        yield ""


def _artifacts(found: Impact) -> Iterator[str]:
    counts = found.below.counts
    total = sum(count for *_, count in counts)
    if found.below.num_models > MOST_VERSIONS:
        versions = f"not counted: {found.below.num_models:,} models, and at most {MOST_VERSIONS:,} are looked up"
    else:
        models = Counter(each.pipeline for each in found.below.newest() if found.version(each))
        versions = ", ".join(f"{count:,} of {pipeline}" for pipeline, count in models.items()) or "none"
    yield f"{found.meant.description}: went into {total:,} artifact{'' if total == 1 else 's'}"
    yield f"  registered versions: {versions}"
    newest = found.below.newest(_MOST_ARTIFACTS)
    if total > len(newest):
        yield "  " + ", ".join(f"{pipeline}/{stage} {count:,}" for pipeline, stage, _, count in counts)
        yield f"  the newest {len(newest)} (--json lists all):"
    table = empty_table("stage", "artifact", "version", "used as", "finished", "directory")
    for each in reversed(newest):
        table.add_row(*_artifact(found, each))
    yield from plain_text(table).splitlines() if newest else ()
    if found.unaffected:
        yield f"  {found.unaffected} more models were trained on the other rows of such data, not on it"


def _artifact(found: Impact, each: Indexed) -> list[str]:
    held = "".join(f" [{alias}]" for alias, model in found.aliases.items() if model == each.id)
    when = datetime.fromtimestamp(each.end).strftime("%Y-%m-%d %H:%M")
    where = str(found.index.entry(each.id).path)
    version = found.version(each)
    registered = f"v{version}" if version else ""
    return [f"{each.pipeline}/{each.stage}", each.id + held, registered, found.role(each) or each.kind, when, where]


def _aliases(found: Impact) -> Iterator[str]:
    for alias, model in sorted(found.aliases.items()):
        line = f"  alias {alias} names {model}"
        if alias in found.before:
            line += f"; 0 s: posttrain rollback --alias {alias} points it back to {found.before[alias]}, "
            line += "which is not affected"
        yield line
    if not found.aliases:
        yield "  aliases: none"


def _retrainings(found: Impact) -> Iterator[str]:
    if not found.retrainings:
        made = (
            "the current artifacts of the pipelines were not made from it"
            if found.below.newest(1)
            else "nothing was made from it"
        )
        yield f"retraining: none is needed: {made}"
        return
    yield "the cheapest retraining without it (estimated by the last durations of the stages):"
    for each in found.retrainings[:_MOST_PIPELINES]:
        yield from _retraining(found, each)
    if len(found.retrainings) > _MOST_PIPELINES:
        yield f"and {len(found.retrainings) - _MOST_PIPELINES} more pipelines (--json lists all)"


def _retraining(found: Impact, each: Retraining) -> Iterator[str]:
    again = ", ".join(f"{one.stage} {one.end - one.start:.0f} s" for one in each.again)
    yield f"  {each.pipeline}: run again {again}: about {each.seconds:.0f} s one after the other"
    if each.reused:
        yield f"    reused: {', '.join(one.stage for one in each.reused)}"
    if each.restart:
        yield f"    training starts again from: {', '.join(one.id for one in each.restart)}"
    for stage, other in each.instead.items():
        when = datetime.fromtimestamp(other.end).strftime("%Y-%m-%d %H:%M")
        yield f"    cheaper, 0 s: {other.id} ({when}) is a finished {stage} that is not affected: use or promote it"
    if found.meant.rows and not any(one.kind in MODELS for one in each.again):
        yield "    no current model was trained on it: only data and measurements change"
        yield "    (deleting it still changes the identity of the data: a run would train again what reads it)"
    slots = _filled_by_alias(found, each)
    if slots:
        yield "    first fill these with something else (base, or nothing), since the alias's model may be affected:"
        yield f"      {', '.join(slots)}"
    yield f"    to do: {_to_do(found, each)}"


def _filled_by_alias(found: Impact, each: Retraining) -> list[str]:
    """Slots of the stages to run again that an alias fills, with a champion or with its data."""
    slots = set()
    for one in each.again:
        for parent, slot in found.index.parents(one.id):
            named = [record.source.revision or "" for record in found.index.records(parent) if record.source]
            if one.kind not in (Kind.REPORT, Kind.VERDICT) and any(name.startswith(ALIAS) for name in named):
                slots.add(f"stages.{one.stage}.inputs.{slot}")
    return sorted(slots)


_STEPS = "tasks.steps.Steps"  # the method of sessions, which no pipeline runs


def _to_do(found: Impact, each: Retraining) -> str:
    if driven := [one.stage for one in each.again if one.method == _STEPS]:
        stage = f"--stage {', '.join(driven)}"
        return f"run the program of the session again on the other model, then posttrain steps commit SESSION {stage}"
    store = relative(found.index.store)
    run = f"posttrain run pipeline={each.pipeline}" + ("" if store == "artifacts" else f" store={store}")
    meant = found.meant
    names = sorted({node.rpartition("@")[0].removeprefix(SOURCE) for node in meant.sources})
    if meant.rows and meant.files:
        files = meant.files[0] if len(meant.files) == 1 else f"whichever of {', '.join(meant.files[:4])} holds it"
        return f"delete the row from {files}; {run}"
    if names:
        changed = " ".join(f"sources.{name}.path=DATA-WITHOUT-IT" for name in names)
        return f"{run} {changed}"
    readers = [
        f"stages.{child.rpartition('@')[0]}.inputs.{slot}=ANOTHER"
        for root in meant.roots
        for child, slot in found.index.children(root)
        if any(one.id == child for one in each.again)
    ]
    return f"{run} {' '.join(readers)}".rstrip()

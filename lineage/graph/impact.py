"""Everything that a dataset or a row went into, and the cheapest retraining without it.

Rows are searched in prepared data by ``row_id`` or text; for each pipeline the stages to run again and to reuse are
listed.
"""

import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import DATA, SOURCE
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.digest import digest_file
from lineage.fingerprint import without_nones
from lineage.graph.ancestry import MODELS, Descendants
from lineage.graph.index import Index
from lineage.graph.places import Indexed, node_key, parts_below
from lineage.graph.refs import resolve
from lineage.record.run_file import RunFile
from lineage.store import Entry

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """What to run again in one pipeline, as its view (or else its newest artifacts) stands.

    Args:
        again: the stages to run again, in order.
        reused: the unaffected stages.
        replaced: artifacts of this pipeline that are themselves to be removed.
        restart: unaffected models from which the training starts again.
        instead: stage to run again -> an unaffected finished model of that stage.
    """

    pipeline: str
    again: list[Indexed]
    reused: list[Indexed]
    replaced: list[Indexed]
    restart: list[Indexed]
    instead: dict[str, Indexed]

    @property
    def seconds(self) -> float:
        """Estimated duration: the sum of the last durations of the stages."""
        return sum(each.end - each.start for each in self.again)


def retrainings(index: Index, below: Descendants, roots: list[str]) -> list[Retraining]:
    """One per pipeline that has stages to run again."""
    made = [artifact for artifact in map(index.artifact, roots) if artifact]
    pipelines = dict.fromkeys([*(pipeline for pipeline, *_ in below.counts), *(each.pipeline for each in made)])
    found = [_retraining(index, below, roots, pipeline) for pipeline in pipelines]
    return [each for each in found if each.again]


def _retraining(index: Index, below: Descendants, roots: list[str], pipeline: str) -> Retraining:
    now = current(index, pipeline)
    again = [each for each in now if below.holds(each.id)]
    replaced = [each for each in now if each.id in roots and each not in again]
    reused = [each for each in now if each not in again and each not in replaced]
    read = {parent for each in again for parent, _ in index.parents(each.id)}
    restart = [each for each in reused if each.id in read and each.kind in MODELS]
    inner = {parent for each in again if each.kind in MODELS for parent, _ in index.parents(each.id)}
    instead = {}
    for each in again:
        other = below.newest_outside(pipeline, each.stage)
        if each.kind in MODELS and each.id not in inner and other and other.id not in roots:
            instead[each.stage] = other
    return Retraining(
        pipeline=pipeline, again=again, reused=reused, replaced=replaced, restart=restart, instead=instead
    )


def current(index: Index, pipeline: str) -> list[Indexed]:
    """The current artifacts of a pipeline, one per stage, in the order in which they were finished.

    Taken from the view if there is one; else the newest artifact with its ancestors, then the same for the stages
    that are still missing.
    """
    found: dict[str, Indexed] = {}
    for start in _viewed(index, pipeline) or index.newest_of_each_stage(pipeline):
        if start.stage not in found:
            for each in [start, *reversed(index.ancestors([start.id]))]:
                found.setdefault(each.stage, each)
    return sorted(found.values(), key=lambda each: (each.end, each.id))


def _viewed(index: Index, pipeline: str) -> list[Indexed]:
    viewed = []
    for path in (index.store / "pipelines" / pipeline).glob("*/manifest.json"):
        manifest = Entry(path.parent).readable_manifest()
        artifact = index.artifact(node_key(manifest.stage, manifest.fingerprint)) if manifest else None
        viewed += [artifact] if artifact else []
    return sorted(viewed, key=lambda each: -each.end)


logger = logging.getLogger(__name__)

SPLITS = ("train", "held_out")
_ROW_ID = re.compile("[0-9a-f]{16}(-[0-9]+)?")
_SHOWN = 120  # characters of a row


@dataclass(frozen=True, kw_only=True)
class FoundRow:
    """A row, and its split in each data artifact that holds it: ``train`` or ``held_out``."""

    row_id: str
    text: str
    sides: dict[str, str] = field(default_factory=dict)


def find_rows(index: Index, source: str, wanted: str) -> list[FoundRow]:
    """Every row with that id (and its duplicates) or that text, among all rows that were read from a source.

    Args:
        source: its name, or the node of one version of it.

    Raises:
        ConfigError: no such source, no such row, or its data cannot be searched.
    """
    nodes = [source] if "@" in source else index.sources(source.removeprefix(SOURCE))
    made = [index.artifact(child) for node in nodes for child, _ in index.children(node)]
    data = [artifact for artifact in made if artifact and artifact.kind in DATA]
    if not data:
        raise ConfigError(
            f"{source}: no data stage in {index.store} has read rows of that source; there are: "
            f"{', '.join(sorted({node.rpartition('@')[0] for node in index.sources()})) or 'none'}"
        )
    found: dict[str, FoundRow] = {}
    for artifact in data:
        for split in SPLITS:
            for row_id, text in _matching_rows(index, artifact, split, wanted):
                found.setdefault(row_id, FoundRow(row_id=row_id, text=text)).sides[artifact.id] = split
    unsearched = [each.id for each in data if not any(_file(index, each.id, split).exists() for split in SPLITS)]
    if unsearched and not found:
        raise ConfigError(
            f"{source}#{wanted}: unknown: {', '.join(unsearched[:8])} cannot be searched, for there is no "
            f"{' or '.join(f'{split}.parquet' for split in SPLITS)} in its output; search its source yourself, or ask "
            f"for all of it: posttrain impact {unsearched[0]}"
        )
    if unsearched:
        logger.warning("artifacts=%s searched=no reason=no parquet rows; may hold it too", ",".join(unsearched[:8]))
    if not found:
        raise ConfigError(
            f"{source}#{wanted}: no row of that id or with that text in {', '.join(each.id for each in data[:8])}; "
            "a row id is 16 hexadecimal digits, a text is found as it is written, capitals and all"
        )
    return list(found.values())


def row_splits(index: Index, artifact: str) -> dict[str, str]:
    """Row id -> split, of every row of a data artifact; empty: it has no such files."""
    sides = {}
    for split in SPLITS:
        file = _file(index, artifact, split)
        if file.exists():
            import pyarrow.parquet as pq  # a fifth of a second, in vain where there are none

            sides.update(dict.fromkeys(pq.read_table(file, columns=["row_id"])["row_id"].to_pylist(), split))
    return sides


def _file(index: Index, artifact: str, split: str) -> Path:
    return index.entry(artifact).output / f"{split}.parquet"


def _matching_rows(index: Index, artifact: Indexed, side: str, wanted: str) -> list[tuple[str, str]]:
    """Id and text of the rows found in one file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = _file(index, artifact.id, side)
    if not file.exists():  # the method writes no such rows
        return []
    found = []
    try:
        for batch in pq.ParquetFile(file).iter_batches():
            ids = batch.column("row_id")
            places = _with_id(ids, wanted) if _ROW_ID.fullmatch(wanted) else _with_text(batch.columns[1:], wanted)
            found += [(ids[place].as_py(), _text(batch.slice(place, 1).to_pylist()[0])) for place in sorted(places)]
    except (pa.ArrowException, KeyError, OSError) as error:
        raise ArtifactError(
            f"{file}: cannot be read as rows ({error}); see what changed with: posttrain verify {artifact.id}"
        ) from error
    return found


def _with_id(ids: "pa.Array", wanted: str) -> set[int]:
    """Indices of a row and of its duplicates, whose ids are numbered: ``0123456789abcdef-1``."""
    import pyarrow.compute as pc

    return set(pc.indices_nonzero(pc.or_(pc.equal(ids, wanted), pc.starts_with(ids, wanted + "-"))).to_pylist())


def _with_text(columns: "list[pa.Array]", wanted: str) -> set[int]:
    """Indices of the rows with a text in any string, nested ones included."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found: set[int] = set()
    for column in columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            found |= set(pc.indices_nonzero(pc.match_substring(column, wanted)).to_pylist())
        elif pa.types.is_struct(column.type):
            found |= _with_text(column.flatten(), wanted)
        elif pa.types.is_list(column.type):
            rows = pc.list_parent_indices(column)
            found |= {rows[place].as_py() for place in _with_text([column.flatten()], wanted)}
    return found


def _text(row: dict[str, object]) -> str:
    """The beginning of a row, for display."""
    values = without_nones({name: value for name, value in row.items() if name not in ("row_id", "kind")})
    assert isinstance(values, dict)
    whole = values.get("text")
    text = whole if isinstance(whole, str) else json.dumps(values, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


LABEL = "label:"
FORMS = "impact also takes label:NAME, source:NAME#ROW-ID, source:NAME#TEXT, and the path of a data file"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The nodes that a REF refers to.

    Args:
        description: of the artifacts and sources.
        roots: nodes whose descendants are affected.
        within: artifacts that are affected themselves: the data that holds a row.
        sources: the sources that would have to change.
        files: paths of the source files that hold the row, or of the given file.
    """

    description: str
    roots: list[str]
    within: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    rows: list[FoundRow] = field(default_factory=list)


def parse_target(ref: str, index: Index) -> Target:
    """Resolves a REF of ``impact`` (ConfigError: there is nothing of that name)."""
    if not ref.strip():
        raise ConfigError(f"REF is empty ({ref!r}); name an artifact or a source; {FORMS}")
    if ref.startswith(LABEL):
        return _label(ref.removeprefix(LABEL), index)
    source, hash_sign, wanted = ref.partition("#")
    if source.startswith(SOURCE) and hash_sign:
        return _rows(source, wanted, index)
    if source.startswith(SOURCE) and "@" not in source and index.sources(source.removeprefix(SOURCE)):
        nodes = index.sources(source.removeprefix(SOURCE))
        versions = f", all {len(nodes)} versions that were ever read" if len(nodes) > 1 else ""
        return Target(description=source + versions, roots=nodes, sources=nodes)
    path = os.path.abspath(os.path.expanduser(ref))
    may_be_file = os.sep in ref or os.path.exists(path)
    nodes = _reading(path, index) if may_be_file and not parts_below(index.store, path) else []
    if nodes:
        return Target(description=f"the file {path}", roots=nodes, sources=nodes, files=[path])
    try:
        node = resolve(ref, index).node
    except ConfigError as error:
        raise ConfigError(f"{error}; {FORMS}") from error
    return Target(description=node, roots=[node], sources=[node] if node.startswith(SOURCE) else [])


def _label(label: str, index: Index) -> Target:
    nodes = index.sources_with_label(label)
    if not nodes:
        known = sorted({each for node in index.sources() for each in index.labels(node)})
        raise ConfigError(
            f"{LABEL}{label}: no source in {index.store} was recorded with that label; "
            f"labels there: {', '.join(known) or 'none'}; label a source with sources.NAME.labels=[...]"
        )
    return Target(description=f"the label {label}", roots=nodes, sources=nodes)


def _rows(source: str, wanted: str, index: Index) -> Target:
    if not wanted:
        raise ConfigError(f"{source}#: a row is named by its id or by a text in it, such as {source}#some text")
    rows = find_rows(index, source, wanted)
    held = sorted({artifact for row in rows for artifact in row.sides})
    trained = sorted({artifact for row in rows for artifact, side in row.sides.items() if side == "train"})
    parents = {parent for artifact in held for parent, _ in index.parents(artifact)}
    sources = sorted(parent for parent in parents if parent.startswith(source.partition("@")[0] + "@"))
    description = f"row {rows[0].row_id} of {source}" if len(rows) == 1 else f"{len(rows)} rows of {source}"
    measured = [each.id for each in index.descendants(held) if each.kind in ("report", "verdict")]
    files = sorted({file for node in sources for file in _files(node, index)})
    return Target(
        description=description, roots=trained, within=[*held, *measured], sources=sources, files=files, rows=rows
    )


def _files(source: str, index: Index) -> Iterator[str]:
    for record in index.records(source):
        if record.source:
            yield from record.source.files


def _reading(path: str, index: Index) -> list[str]:
    """The sources that a file or directory belongs to: by its path, or else by its current content."""
    named = [node for node in index.sources_recording(path) if _is_part(path, node, index)]
    if named or not os.path.isfile(path):
        return named
    return index.sources_recording(digest_file(Path(path)))


def _is_part(path: str, source: str, index: Index) -> bool:
    recorded = [record.source.path for record in index.records(source) if record.source]
    return any(each == path or each.startswith(path + os.sep) for each in [*recorded, *_files(source, index)])


MOST_VERSIONS = 1000  # a file is read for each version


@dataclass(frozen=True, kw_only=True)
class Impact:
    """The result of ``impact``.

    Args:
        below: the affected artifacts; for a row, without the models from which it was held out.
        aliases: alias -> the affected model that it points to.
        before: alias -> the model that it pointed to before, if that one is not affected.
        unaffected: for a row: number of models whose data holds it in ``held_out`` only.
    """

    index: Index
    ref: str
    meant: Target
    below: Descendants
    aliases: dict[str, str]
    before: dict[str, str]
    unaffected: int
    retrainings: list[Retraining]

    def role(self, artifact: Indexed) -> str | None:
        """For a row: how an artifact used it."""
        if not self.meant.rows:
            return None
        if artifact.kind in MODELS:
            return "trained on it"
        if artifact.kind in DATA:
            sides = {row.sides[artifact.id] for row in self.meant.rows if artifact.id in row.sides}
            return " and ".join(f"has it in {side}" for side in sorted(sides, reverse=True))
        return "measured on it" if artifact.id in self.meant.within else "measures a model that was trained on it"

    def version(self, artifact: Indexed) -> int | None:
        """Version of the registered model, read from the run file; None: it has none, or there are very many models."""
        if artifact.kind not in MODELS or self.below.num_models > MOST_VERSIONS:
            return None
        note = RunFile.read(self.index.entry(artifact.id).path)
        return note.version if note else None

    def to_dict(self) -> dict[str, object]:
        """The object that ``impact --json`` prints."""
        return {
            "ref": self.ref,
            "meant": self.meant.description,
            "roots": self.meant.roots,
            "files": self.meant.files,
            "rows": [asdict(row) for row in self.meant.rows],
            "artifacts": [self._row(each) for each in self.below.newest()],
            "aliases": self.aliases,
            "unaffected_models": self.unaffected,
            "retraining": [_retraining_row(each) for each in self.retrainings],
        }

    def _row(self, each: Indexed) -> dict[str, object]:
        aliases = [alias for alias, model in self.aliases.items() if model == each.id] if self.aliases else []
        version = self.version(each)
        return {
            "id": each.id, "pipeline": each.pipeline, "stage": each.stage, "kind": each.kind or None,
            "fingerprint": each.fingerprint, "path": f"{self.index.store}/{each.stage}/{each.fingerprint[:16]}",
            "finished": each.end, "registered_model": each.pipeline if version else None,
            "registered_version": version, "aliases": aliases, "role": self.role(each),
        }  # fmt: skip


def impact(ref: str, index: Index) -> Impact:
    """Everything that was made from what a REF names (ConfigError: there is nothing of that name)."""
    meant = parse_target(ref, index)
    below = Descendants(index, meant.roots, meant.within)
    held = {alias: node for alias, node in index.aliases.items() if below.holds(node) or node in meant.roots}
    return Impact(
        index=index, ref=ref, meant=meant, below=below, aliases=held,
        before={alias: node for alias, node in _previous(index, held).items() if not below.holds(node)},
        unaffected=_unaffected(index, meant, below), retrainings=retrainings(index, below, meant.roots),
    )  # fmt: skip


def _previous(index: Index, aliases: dict[str, str]) -> dict[str, str]:
    """Alias -> the model that it would point to after a rollback."""
    held = {alias: index.alias_history[alias] for alias in aliases}
    return {alias: nodes[-2] for alias, nodes in held.items() if len(nodes) > 1 and index.artifact(nodes[-2])}


def _unaffected(index: Index, meant: Target, below: Descendants) -> int:
    if not meant.rows:
        return 0
    held = [artifact for row in meant.rows for artifact in row.sides]
    models = [each for each in index.descendants(set(held)) if each.kind in MODELS]
    return sum(not below.holds(each.id) for each in models)


def _retraining_row(each: Retraining) -> dict[str, object]:
    def stages(artifacts: list[Indexed]) -> list[dict[str, object]]:
        return [{"stage": one.stage, "id": one.id, "seconds": one.end - one.start} for one in artifacts]

    return {
        "pipeline": each.pipeline,
        "run_again": stages(each.again),
        "reused": stages(each.reused),
        "replace": [one.id for one in each.replaced],
        "restart_from": [one.id for one in each.restart],
        "instead": {stage: one.id for stage, one in each.instead.items()},
        "estimated_seconds": each.seconds,
    }

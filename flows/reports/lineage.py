"""Output of ``posttrain lineage``: the ancestry as a tree, each artifact once."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from flows.reports.wording import on_screen, printable, spelled
from lineage.errors import ArtifactError
from lineage.fingerprint import short
from lineage.graph.ancestry import Graph, Node
from lineage.promotions import Event
from lineage.record.certificate import read_certificate
from lineage.record.metrics_file import headline_metric
from lineage.store import Manifest, Provenance

# Fields that are shown elsewhere, or nearly always have their default.
_HIDDEN_FIELDS = ("method", "version", "warmup_ratio", "lr_schedule", "weight_decay", "max_grad_norm")
_MOST_FIELDS = 12


def ancestry_tree(graph: Graph) -> str:
    """A block of lines per artifact with its inputs below; repeated artifacts are only named."""
    lines = list(_block(graph, graph.root, slot="", indent="", below="", shown=set()))
    environment = list(_environment(graph))
    return on_screen("\n".join(map(printable, [*lines, "", *environment] if environment else lines)))


def moves_text(moves: Sequence[Event]) -> str:
    """Which models an alias named, the newest first: when, since which move, by whom, and why; empty: no moves."""
    lines = [
        f"{datetime.fromtimestamp(each.time).strftime('%Y-%m-%d %H:%M')}  {each.action} to "
        f"{each.stage}@{short(each.fingerprint)} by {each.who}{', forced' if each.forced else ''}"
        f"{f': {each.why}' if each.why else ''}"
        for each in reversed(moves)
    ]
    return "\n".join(map(printable, ["", "", f"moves of alias {moves[0].alias}:", *lines])) if moves else ""


def _block(graph: Graph, name: str, slot: str, indent: str, below: str, shown: set[str]) -> Iterator[str]:
    node = graph.nodes[name]
    title = f"{slot}: {_title(node)}" if slot not in ("", node.name) else _title(node)
    parents = graph.parents(name)
    if name in shown:
        yield f"{indent}{title} (above)" if parents else f"{indent}{title}"
        return
    shown.add(name)
    yield indent + title
    bar = "│ " if parents else "  "
    yield from (f"{below}{bar}  {line}" for line in _details(node))
    for place, edge in enumerate(parents, start=1):
        last = place == len(parents)
        joint, rest = ("└─ ", "   ") if last else ("├─ ", "│  ")
        yield from _block(graph, edge.parent, edge.slot, below + joint, below + rest, shown)


def _title(node: Node) -> str:
    badges = "".join(f" [{alias}]" for alias in node.aliases)
    return f"{node.name} {short(node.fingerprint)}{badges}"


def _details(node: Node) -> list[str]:
    if node.manifest:
        return _artifact(node.manifest, node)
    if node.entry:
        return ["deleted from the store", *(each.summary() for each in node.exports)]
    return _source(node)


def _artifact(manifest: Manifest, node: Node) -> list[str]:
    ran = manifest.provenance
    code = f"git {short(ran.git_commit)[:8]}{' (dirty)' if ran.git_dirty else ''}" if ran.git_commit else "git: none"
    when = datetime.fromtimestamp(ran.end).strftime("%Y-%m-%d %H:%M")
    method = manifest.recipe.get("method", manifest.method)
    lines = [f"{method}  {_recipe(manifest.recipe)}".rstrip()]
    measured = _measured(manifest.metrics)
    if measured:
        lines.append(measured)
    lines.append(f"{when}, {ran.end - ran.start:.1f} s on {', '.join(ran.hosts)}; {code}, code {ran.code_digest[:8]}")
    return [*lines, *_certificate(manifest, node), *_labels(node), *(each.summary() for each in node.exports)]


def _certificate(manifest: Manifest, node: Node) -> list[str]:
    """The result and date of the certificate."""
    if manifest.certificate is None or node.entry is None:
        return []
    try:
        found = read_certificate(node.entry.path.parents[1], manifest.certificate)
    except ArtifactError as error:
        return [f"certificate: {error}"]
    when = datetime.fromtimestamp(found.provenance.end).strftime("%Y-%m-%d")
    return [f"certificate {short(manifest.certificate)[:8]} of {when}: {found.summary()}"]


def _recipe(recipe: Mapping[str, object]) -> str:
    parts = [
        f"{name}={spelled(value)}" for name, value in recipe.items() if name not in _HIDDEN_FIELDS and value is not None
    ]
    more = [f"and {len(parts) - _MOST_FIELDS} more"] if len(parts) > _MOST_FIELDS else []
    return " ".join(parts[:_MOST_FIELDS] + more)


def _measured(metrics: Mapping[str, float]) -> str:
    """Counts of rows of a data stage; share of trained tokens and loss or reward of a training."""
    parts = [
        f"{int(metrics[name]):,} {name.replace('_', ' ')}"
        for name in ("rows", "train_rows", "images")
        if name in metrics
    ]
    percent = metrics.get("trained_tokens_percent")
    if percent is not None:
        parts.append(f"{percent:.1f} % of the tokens trained")
    name = headline_metric(metrics)
    if name in metrics:
        parts.append(f"{name} {metrics[name]:.4g}")
    return ", ".join(parts)


def _source(node: Node) -> list[str]:
    source = node.record.source if node.record else None
    if source is None:
        return ["recorded by an earlier version: no path, no files"]
    digest = node.record.digest if node.record else None
    content = f"SHA-256 {short(digest)}" if digest else f"revision {source.revision}"
    lines = [source.path, ", ".join([content, *([f"{node.rows:,} rows"] if node.rows is not None else [])])]
    # Of rows, what was read beside them: images.
    beside = [] if source.kind != "rows" else [each for each in source.files if not each.startswith(source.path)]
    if beside and len(beside) < len(source.files):  # else the path is a glob
        lines.append(f"images: {len(beside):,} files, {os.path.commonpath(beside)}")
    if source.dvc:
        lines.append(f"DVC {source.dvc}")
    return [*lines, *_labels(node)]


def _labels(node: Node) -> list[str]:
    return [f"labels: {', '.join(sorted(node.labels))}"] if node.labels else []


def _environment(graph: Graph) -> Iterator[str]:
    """Versions of Python and libraries, then the stages that ran with others."""
    ran = {node.name: node.manifest.provenance for node in graph.nodes.values() if node.manifest}
    if not ran:
        return
    (common, _), *_ = Counter(_versions(each) for each in ran.values()).most_common()
    yield "made with " + ", ".join(f"{name} {version}" for name, version in common)
    for stage, each in ran.items():
        others = sorted(set(_versions(each)) - set(common))
        if others:
            yield f"but {stage} with " + ", ".join(f"{name} {version}" for name, version in others)


def _versions(ran: Provenance) -> tuple[tuple[str, str], ...]:
    return (("python", ran.python), *sorted(ran.libraries.items()))

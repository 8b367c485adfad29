"""Differences of two artifacts: fields, inputs, code, environment; ranked by their likely effect on the result."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

from lineage.artifact import DATA
from lineage.errors import ArtifactError
from lineage.fingerprint import differences, digest_json, short
from lineage.graph.ancestry import Graph, Node, ancestry
from lineage.graph.impact import row_splits
from lineage.graph.index import Index
from lineage.store import InputRecord, Manifest, Provenance, SourceRecord

# The most likely cause first.
RANKS = (
    "diagnosis", "recipe", "data", "graph", "recipe of a parent", "bytes of an input", "seed", "code", "git",
    "resources", "libraries", "python", "hosts",
)  # fmt: skip
_MOST_FILES = 5
COMMAND_LOG = "commands.jsonl"  # in the output of a session of steps: each call that changed it


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One difference, and the stages where it was found."""

    what: str  # one of RANKS
    text: str
    stages: tuple[str, ...]


def grouped(found: list[Cause]) -> Iterator[Cause]:
    """Merges equal differences and ranks them; within a rank, those nearest to the compared artifacts come first."""
    stages: dict[tuple[str, str], list[str]] = {}
    for cause in found:
        # The same value of a recipe in two stages is two decisions; the same library is one environment.
        once = cause.what in ("code", "git", "libraries", "python", "hosts", "resources")
        key = (cause.what, cause.text if once else f"{cause.stages[0]}: {cause.text}")
        stages.setdefault(key, []).extend(cause.stages)
    for (what, text), names in sorted(stages.items(), key=lambda item: RANKS.index(item[0][0])):
        yield Cause(what=what, text=text, stages=tuple(dict.fromkeys(names)))


def causes(index: Index, left: Graph, right: Graph, pair: tuple[str, str], is_root: bool) -> Iterator[Cause]:
    """Differences of a pair of nodes, without those of their parents."""
    a, b = left.nodes[pair[0]], right.nodes[pair[1]]
    if a.id == b.id:
        return
    name = _both_names(a, b)
    if a.record or b.record:
        for text in _source(a, b):
            yield Cause(what="data", text=text, stages=(name,))
    elif a.manifest and b.manifest:
        for cause in _artifacts(index, a, b, a.manifest, b.manifest, is_root):
            yield replace(cause, stages=(name,))


def _both_names(a: Node, b: Node) -> str:
    return a.name if a.name == b.name else f"{a.name}|{b.name}"


def _artifacts(index: Index, a: Node, b: Node, before: Manifest, after: Manifest, is_root: bool) -> Iterator[Cause]:
    for text in differences({"class": before.method, **before.recipe}, {"class": after.method, **after.recipe}):
        seed = text.startswith("seed:")
        yield _cause("seed" if seed else "recipe" if is_root else "recipe of a parent", text)
    for side, one, other in (("A", before, after), ("B", after, before)):
        because = one.provenance.because
        if because and because != other.provenance.because:
            name, _, found_in = because.partition(":")
            yield _cause("diagnosis", f"{side} follows the rule {name}, which posttrain diagnose found in {found_in}")
    for slot in sorted(before.inputs.keys() | after.inputs.keys()):
        yield from _slot(slot, before.inputs.get(slot), after.inputs.get(slot))
    yield from (_cause("data", text) for text in _rows(index, a, b, before, after))
    yield from (_cause("recipe", text) for text in _calls(index, a, b, before, after))
    yield from _provenance(before.provenance, after.provenance)


def _cause(what: str, text: str) -> Cause:
    return Cause(what=what, text=text, stages=())


def _slot(slot: str, before: InputRecord | None, after: InputRecord | None) -> Iterator[Cause]:
    if before is None or after is None or before.artifact != after.artifact:
        first, second = (each.artifact if each else "(none)" for each in (before, after))
        yield _cause("graph", f"input {slot}: {first} -> {second}")
    elif before.fingerprint == after.fingerprint and before.digest != after.digest:
        digests = " -> ".join(short(each.digest or "(none)") for each in (before, after))
        yield _cause(
            "bytes of an input", f"input {slot}: {before.artifact} was produced again in between, digest {digests}"
        )


def _rows(index: Index, a: Node, b: Node, before: Manifest, after: Manifest) -> Iterator[str]:
    """Rows that were added, removed or moved to another split between two data artifacts."""
    if before.produces not in DATA or after.produces not in DATA or before.output_digest == after.output_digest:
        return
    try:
        first, second = row_splits(index, a.id), row_splits(index, b.id)
    except (ArtifactError, OSError, ValueError):  # missing or damaged: `verify` reports it
        return
    both = first.keys() & second.keys()
    moved = sum(first[row] != second[row] for row in both)
    if len(first) != len(both) or len(second) != len(both) or moved:
        only = f"{len(first) - len(both):,} only in A, {len(second) - len(both):,} only in B"
        yield f"rows: {len(both):,} in both, {only}, {moved:,} changed between train and held_out"


def digest_of_call(call: Mapping[str, object]) -> str:
    """Of a line of a command log: what is called, with which rows and settings."""
    return digest_json({"call": call["name"], "body": call["body"]})


def _calls(index: Index, a: Node, b: Node, before: Manifest, after: Manifest) -> Iterator[str]:
    """The first call in which two command logs differ."""
    logs = [each.files.get(COMMAND_LOG) for each in (before, after)]
    if None in logs or logs[0] == logs[1]:
        return
    try:
        first, second = (
            [line for line in map(json.loads, (index.entry(each.id).output / COMMAND_LOG).open()) if "name" in line]
            for each in (a, b)
        )
        pairs = enumerate(zip_longest(first, second), start=1)
        number, found = next(
            (number, pair) for number, pair in pairs
            if None in pair or len({(each.get("session"), digest_of_call(each)) for each in pair}) > 1
        )  # fmt: skip
    except (ArtifactError, OSError, ValueError, StopIteration):  # `verify` reports what is missing or damaged
        return
    texts = " -> ".join(f"{each['name']} {short(digest_of_call(each))}" if each else "(none)" for each in found)
    keys = []
    if None not in found and found[0]["name"] == found[1]["name"]:
        keys = [text.partition(":")[0] for text in differences(found[0]["body"], found[1]["body"])]
    what = f" in {', '.join(keys)}" if keys else ""
    yield f"calls: number {number} of {len(first)} and {len(second)} is the first that differs{what}: {texts}"


def _source(a: Node, b: Node) -> Iterator[str]:
    first, second = a.record, b.record
    before, after = first.source if first else None, second.source if second else None
    if not before or not after:
        if a.fingerprint != b.fingerprint:
            yield f"content: {short(a.fingerprint)} -> {short(b.fingerprint)}"
        return
    yield from differences(_declared(before), _declared(after))
    yield from _files(before.files, after.files)
    if a.rows != b.rows:
        yield f"rows: {a.rows} -> {b.rows}"
    if a.fingerprint != b.fingerprint and before.path != after.path:
        yield f"path: {before.path} -> {after.path}"


def _declared(source: SourceRecord) -> dict[str, object]:
    return {**source.configured(), "labels": source.labels, "dvc": source.dvc}


def _files(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Compares files by content: a moved or renamed file is no difference."""
    lost = {path: digest for path, digest in before.items() if digest not in after.values()}
    new = {path: digest for path, digest in after.items() if digest not in before.values()}
    phrases = [
        f"file {path}: changed, SHA-256 {short(lost[path])} -> {short(new[path])}" for path in lost if path in new
    ]
    phrases += [f"file {path}: only in A" for path in lost if path not in new]
    phrases += [f"file {path}: only in B" for path in new if path not in lost]
    yield from phrases[:_MOST_FILES]
    if len(phrases) > _MOST_FILES:
        yield f"and {len(phrases) - _MOST_FILES} more files"


def _provenance(before: Provenance, after: Provenance) -> Iterator[Cause]:
    if before.code_digests != after.code_digests:
        old, new = (", ".join(map(short, each.code_digests)) for each in (before, after))
        yield _cause("code", f"code of the method: {old} -> {new}")
    for text in differences(
        {"commit": before.git_commit, "dirty": before.git_dirty}, {"commit": after.git_commit, "dirty": after.git_dirty}
    ):
        yield _cause("git", f"git {text}")
    for text in differences(before.resources, after.resources):
        yield _cause("resources", text)
    for text in differences(before.libraries, after.libraries):
        yield _cause("libraries", text)
    for what, first, second in (("python", before.python, after.python), ("hosts", before.hosts, after.hosts)):
        for text in differences({what: first}, {what: second}):
            yield _cause(what, text)


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The result of a comparison.

    Args:
        causes: the differences, likeliest cause of a changed result first.
        metrics: stage -> metric -> value in each; None: not measured there.
    """

    first: Node
    second: Node
    causes: list[Cause]
    metrics: dict[str, dict[str, tuple[float | None, float | None]]]

    @property
    def same_fingerprint(self) -> bool:
        return self.first.fingerprint == self.second.fingerprint

    @property
    def same_output(self) -> bool | None:
        """Whether the outputs are byte-identical; None: one of them is not a finished artifact."""
        if not self.first.manifest or not self.second.manifest:
            return None
        return self.first.manifest.output_digest == self.second.manifest.output_digest

    def to_dict(self) -> dict[str, object]:
        """The object that ``diff --json`` prints."""
        return {
            "a": self.first.id,
            "b": self.second.id,
            "same_fingerprint": self.same_fingerprint,
            "same_output": self.same_output,
            "differences": [
                {"what": cause.what, "stages": list(cause.stages), "text": cause.text} for cause in self.causes
            ],
            "metrics": {
                stage: {name: list(pair) for name, pair in each.items()} for stage, each in self.metrics.items()
            },
        }


def diff(index: Index, first: str, second: str) -> Diff:
    """Compares the ancestries of two nodes."""
    left, right = ancestry(index, first), ancestry(index, second)
    pairs = paired_nodes(left, right)
    found = [cause for place, pair in enumerate(pairs) for cause in causes(index, left, right, pair, place == 0)]
    found += _unpaired(left, right, pairs)
    metrics = {}
    for a, b in pairs:
        changed = _metrics(left.nodes[a], right.nodes[b])
        if changed:
            metrics[_both_names(left.nodes[a], right.nodes[b])] = changed
    return Diff(first=left.nodes[first], second=right.nodes[second], causes=list(grouped(found)), metrics=metrics)


def paired_nodes(left: Graph, right: Graph) -> list[tuple[str, str]]:
    """Corresponding nodes of two graphs, nearest to the compared artifacts first.

    Paired by slot, if the names are equal or neither occurs in the other graph; the rest by name.
    """
    names = {node.name for node in left.nodes.values()}, {node.name for node in right.nodes.values()}
    pairs = [(left.root, right.root)]
    for a, b in pairs:  # grows in the loop
        below = {edge.slot: edge.parent for edge in right.parents(b)}
        for edge in left.parents(a):
            other = below.get(edge.slot)
            if other and _correspond(left.nodes[edge.parent].name, right.nodes[other].name, names):
                _add(pairs, edge.parent, other)
    for node in left.nodes:
        for other in right.nodes:
            if left.nodes[node].name == right.nodes[other].name:
                _add(pairs, node, other)
    return pairs


def _correspond(a: str, b: str, names: tuple[set[str], set[str]]) -> bool:
    return a == b or (a not in names[1] and b not in names[0])


def _add(pairs: list[tuple[str, str]], a: str, b: str) -> None:
    if all(a != first and b != second for first, second in pairs):
        pairs.append((a, b))


def _unpaired(left: Graph, right: Graph, pairs: list[tuple[str, str]]) -> Iterator[Cause]:
    for graph, side, paired in ((left, "A", {a for a, _ in pairs}), (right, "B", {b for _, b in pairs})):
        for node in graph.nodes.values():
            if node.id not in paired:
                yield Cause(what="graph", text=f"only {side} was made with {node.id}", stages=(node.name,))


def _metrics(a: Node, b: Node) -> dict[str, tuple[float | None, float | None]]:
    """Metrics with different values; durations are left out."""
    if not a.manifest or not b.manifest:
        return {}
    before, after = a.manifest.metrics, b.manifest.metrics
    return {
        name: (before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and "second" not in name
    }

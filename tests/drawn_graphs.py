"""Graphs for the lineage page, harmless and hostile, and what a browser would see of a page."""

import hashlib
from html.parser import HTMLParser

ATTACK = (
    "\"'><img src=x onerror=alert(1)></script></svg></title><script>alert(2)</script><!--<script>"
    "&lt;b&gt;${policy}{{7*7}}\u2028\u2029\u202e"
)
HOSTILE = ATTACK + "\x00\r\udc80"  # what an HTML parser replaces, and what UTF-8 has not

Node = dict[str, object]


def stage(name: str, **fields: object) -> Node:
    fingerprint = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
    return {
        "id": f"{name}@{fingerprint[:16]}", "kind": "stage", "name": name, "fingerprint": fingerprint,
        "artifact_kind": "checkpoint", "labels": [], "aliases": [], "pipeline": "toy", "stage": name,
        "method": "tests.toy_methods.ToyTraining", "recipe": {"learning_rate": 0.1}, "metrics": {"loss": 0.5},
        "path": f"/store/{name}", "output_digest": "d1", "files": {"model.txt": "f1"},
        "provenance": {"start": 1.0, "end": 2.0, "hosts": ["h"], "libraries": {"torch": "2"}},
        "mlflow_run_id": None, "state": "present", **fields,
    }  # fmt: skip


def source(name: str, **fields: object) -> Node:
    record = {"path": f"/data/{name}", "kind": "rows", "revision": None, "split": "train", "labels": [], "files": {}}
    return {**stage(f"source:{name}"), "kind": "source", "artifact_kind": "rows", "source": record, "rows": 9, **fields}


def graph_of(nodes: list[Node], edges: list[tuple[int, int, str]], **fields: object) -> dict[str, object]:
    """Edges by place in ``nodes``; the last node is the root."""
    ids = [node["id"] for node in nodes]
    joined = [{"from": ids[one], "to": ids[other], "slot": slot} for one, other, slot in edges]
    return {"ref": "toy/last", "root": ids[-1], "nodes": nodes, "edges": joined, **fields}


def small() -> dict[str, object]:
    nodes = [source("rows"), stage("data", artifact_kind="text"), stage("base"), stage("sft"), stage("dpo")]
    edges = [(0, 1, "rows"), (1, 2, "rows"), (2, 3, "policy"), (1, 3, "rows"), (3, 4, "policy"), (3, 4, "reference")]
    return graph_of(nodes, edges)


def hostile(text: str = HOSTILE) -> dict[str, object]:
    """Hostile text in every field of every node, keys of mappings included."""
    mapping = {text: text, "__proto__": text, "nested": {text: [text]}}
    evil = {
        "artifact_kind": text, "fingerprint": text, "labels": [text], "aliases": [text],
        "pipeline": text, "stage": text, "method": text, "recipe": mapping, "metrics": {text: 1.0},
        "path": text, "output_digest": text, "files": {text: text}, "provenance": mapping,
        "mlflow_run_id": text, "state": text, "digest": text,
    }  # fmt: skip
    rows = source(text, **{**evil, "source": {**mapping, "path": text}, "rows": 1})
    return graph_of([rows, stage(text, **evil)], [(0, 1, text)], ref=text)


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        self.raw.get(self._inside, self.words).append(data)

    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def count(self, name: str, value: str) -> int:
        return sum(value in (attributes.get(name) or "").split() for _, attributes in self.elements)

"""A lineage graph as one HTML page that loads nothing: drawn as SVG, searched and read by a script of its own.

All that comes from the graph is text: the drawing is built as a tree and written by ElementTree, the data travels as
JSON in which no ``<`` is left, and the script makes text nodes only. The page's policy lets nothing else run or load.
"""

import base64
import hashlib
import html
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import cast
from xml.etree.ElementTree import Element, tostring

from flows.reports.drawing import Node, draw, kind_of
from flows.reports.layout import Edge

_HERE = Path(__file__)


def render(graph: Mapping[str, object]) -> str:
    """The page of what ``posttrain lineage REF --json`` prints; pure ASCII.

    Args:
        graph: ``{"ref", "root", "nodes", "edges"}``.
    """
    nodes = {str(node["id"]): node for node in cast("Sequence[Node]", graph["nodes"])}
    edges = [
        Edge(parent=edge["from"], child=edge["to"], slot=edge["slot"])
        for edge in cast("Sequence[dict[str, str]]", graph["edges"])
    ]
    style, script = (_HERE.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
    return Template(_HERE.with_suffix(".html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        ref=_ascii(html.escape(str(graph["ref"]))),
        summary=_summary(nodes.values()),
        legend="".join(_legend(nodes.values())),
        drawing=_ascii_tree(draw(nodes, edges, str(graph["root"]))),
        data=_script_json(graph),
        style=style,
        script=script,
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _ascii(text: str) -> str:
    """Character references for the rest: a lone surrogate, from a file name that is not UTF-8, can then be written."""
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _ascii_tree(element: Element) -> str:
    return str(tostring(element, encoding="us-ascii", short_empty_elements=False), "ascii")


def _script_json(graph: Mapping[str, object]) -> str:
    """JSON that ends no script element and opens no comment in it."""
    text = json.dumps(_finite(graph), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: object) -> object:
    """The value with nan and the infinities, which JSON has not, as words: a diverged loss is a finding."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _summary(nodes: Collection[Node]) -> str:
    kinds = [node["kind"] for node in nodes]
    counts = ((kinds.count("stage"), "artifact"), (kinds.count("source"), "source"))
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)


def _legend(nodes: Collection[Node]) -> Iterator[str]:
    for kind in sorted({kind_of(node) for node in nodes}):
        item = Element("li", {"data-kind": kind})
        item.text = kind.replace("_", " ")
        yield _ascii_tree(item)

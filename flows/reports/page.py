"""A lineage graph as one self-contained HTML page: an SVG drawing and a script for details and search.

Content of the graph is always escaped: ElementTree writes the drawing, the data is JSON without ``<``, and the script
creates only text nodes. The page's content security policy allows nothing else to run or load.
"""

import base64
import hashlib
import html
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import cast
from xml.etree.ElementTree import Element, SubElement, tostring

from flows.reports.wording import screen_cells
from lineage.graph.ancestry import Edge
from lineage.markup import html_page
from lineage.record.metrics_file import headline_metric

_HERE = Path(__file__)

WIDTH = 176  # of a box, pixels
GAP_X = 92  # between layers: a slot's name fits in it
GAP_Y, LANE = 30, 12  # between boxes; height that a passing edge takes
PORT = 17  # least distance of two edges that enter one box
ORDER_SWEEPS = 12
MARGIN = 30
_PAD = 13  # from a box's side to its text
_ROW = 19  # of badges
_TEXT = 66  # height of a box without badges
_NAME, _SMALL, _BADGE = 9.4, 6.6, 6.1  # width of a letter in pixels, rounded up
_BADGE_LETTERS = 22


Node = Mapping[str, object]
Badge = tuple[str, str]  # word and style
Point = tuple[float, float]


@dataclass(kw_only=True)
class Box:
    """Position of a node; ``x`` and ``y`` are its upper left corner."""

    x: float = 0.0
    y: float = 0.0
    height: float


def render(graph: Mapping[str, object]) -> str:
    """The page for the object that ``posttrain lineage REF --json`` prints; pure ASCII.

    Args:
        graph: ``{"ref", "root", "nodes", "edges"}``.
    """
    nodes = {str(node["id"]): node for node in cast("Sequence[Node]", graph["nodes"])}
    edges = [
        Edge(parent=edge["from"], child=edge["to"], slot=edge["slot"])
        for edge in cast("Sequence[dict[str, str]]", graph["edges"])
    ]
    style, script = (_HERE.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
    body = Template(_HERE.with_suffix(".html").read_text(encoding="utf-8")).substitute(
        ref=html.escape(str(graph["ref"])),
        summary=_summary(nodes.values()),
        legend="".join(_legend(nodes.values())),
        drawing=ascii_tree(draw(nodes, edges, str(graph["root"]))),
        data=script_json(graph),
        script=script,
    )
    return html_page(
        title=f"lineage of {html.escape(str(graph['ref']))}", style=style, body=body.rstrip(),
        policy=f"default-src 'none'; style-src {source_hash(style)}; script-src {source_hash(script)}",
    )  # fmt: skip


def source_hash(text: str) -> str:
    """A script or style as the content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def ascii_tree(element: Element) -> str:
    """An element as markup."""
    return str(tostring(element, encoding="us-ascii", short_empty_elements=False), "ascii")


def script_json(graph: Mapping[str, object]) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(_finite(graph), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: object) -> object:
    """The value with non-finite numbers as text, which JSON cannot express."""
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
        yield ascii_tree(item)


# --- the drawing


@dataclass(kw_only=True)
class _View:
    """A node for grandalf, whose layers are stacked vertically and ours horizontally, so ``w`` is a height."""

    w: float
    h: float = WIDTH
    xy: tuple[float, float] = field(default=(0.0, 0.0))


def layout(heights: Mapping[str, float], edges: Sequence[Edge]) -> tuple[dict[str, Box], list[list[Point]]]:
    """Positions of the nodes, and the points of each edge: ends of horizontal pieces, to be joined by curves.

    Layers go from left to right, each node as near to its readers as possible (Sugiyama et al. 1981, by grandalf).

    Args:
        heights: node -> height of its text; boxes grow with the number of incoming edges.
    """
    from grandalf.graphs import Edge as Link
    from grandalf.graphs import Graph, Vertex
    from grandalf.layouts import SugiyamaLayout

    entering = Counter(edge.child for edge in edges)
    vertices = {name: Vertex(name) for name in heights}
    for name, vertex in vertices.items():
        vertex.view = _View(w=max(heights[name], (entering[name] + 1) * PORT))
    pairs = dict.fromkeys((edge.parent, edge.child) for edge in edges)
    links = {pair: Link(vertices[pair[1]], vertices[pair[0]]) for pair in pairs}  # readers are above
    boxes: dict[str, Box] = {}
    waypoints: dict[tuple[str, str], list[Point]] = {}
    top = 0.0
    for component in Graph(list(vertices.values()), list(links.values())).C:
        placed = SugiyamaLayout(component)
        placed.xspace, placed.dw, placed.dh = GAP_Y, LANE, WIDTH
        placed.init_all()
        placed.draw(ORDER_SWEEPS)
        last = max(placed.grx[vertex].rank for vertex in component.sV)
        up = top - min(vertex.view.xy[0] - vertex.view.w / 2 for vertex in component.sV)
        for vertex in component.sV:
            x, middle = (last - placed.grx[vertex].rank) * (WIDTH + GAP_X), vertex.view.xy[0] + up
            boxes[vertex.data] = Box(x=x, y=middle - vertex.view.w / 2, height=vertex.view.w)
        for link in component.sE:
            stops = sorted(placed.ctrls.get(link, {}).items(), reverse=True)[1:-1]  # by rank, without the two ends
            points = [((last - rank) * (WIDTH + GAP_X), stop.view.xy[0] + up) for rank, stop in stops]
            waypoints[link.v[1].data, link.v[0].data] = points
        top = max(box.y + box.height for box in boxes.values()) + GAP_Y
    return boxes, _routes(edges, boxes, waypoints)


def _routes(
    edges: Sequence[Edge], boxes: Mapping[str, Box], waypoints: Mapping[tuple[str, str], Sequence[Point]]
) -> list[list[Point]]:
    """The points of each edge; incoming edges of a box are spread over its left side in order."""
    routes: list[list[Point]] = []
    for edge in edges:
        parent = boxes[edge.parent]
        points = [(parent.x + WIDTH, parent.y + parent.height / 2)]
        for x, y in waypoints[edge.parent, edge.child]:
            points += [(x, y), (x + WIDTH, y)]
        routes.append(points)
    for name, box in boxes.items():
        order = sorted(
            (routes[index][-1][1], edge.slot, index) for index, edge in enumerate(edges) if edge.child == name
        )
        for place, (_, _, index) in enumerate(order, start=1):
            routes[index].append((box.x, box.y + box.height * place / (len(order) + 1)))
    return routes


def kind_of(node: Node) -> str:
    """The kind of an artifact; manifests of schema 1 have none."""
    return str(node["artifact_kind"] or "artifact")


def draw(nodes: Mapping[str, Node], edges: Sequence[Edge], root: str) -> Element:
    """The drawing as a tree, which escapes all texts when it is written.

    ``data-node`` and ``data-edge`` are indices: an HTML parser would replace some characters of names.
    """
    badges = {name: list(_badge_rows(node)) for name, node in nodes.items()}
    boxes, routes = layout({name: _TEXT + _ROW * len(rows) for name, rows in badges.items()}, edges)
    wide = max((box.x + WIDTH for box in boxes.values()), default=0.0) + 2 * MARGIN
    high = max((box.y + box.height for box in boxes.values()), default=0.0) + 2 * MARGIN
    view = f"{-MARGIN} {-MARGIN} {wide:g} {high:g}"
    svg = Element("svg", {"id": "graph", "viewBox": view, "role": "group", "aria-label": "lineage graph"})
    scene = SubElement(svg, "g", {"id": "scene"})
    for index, points in enumerate(routes):
        SubElement(scene, "path", {"class": "edge", "data-edge": str(index), "d": _curve(points)})
    for index, (edge, points) in enumerate(zip(edges, routes, strict=True)):  # names are drawn above all curves
        x, y = points[-1]
        label = _text(scene, edge.slot, x - 8, y + 4, 13, "edge slot")
        label.attrib |= {"data-edge": str(index), "text-anchor": "end"}
    for index, (name, node) in enumerate(nodes.items()):
        group = SubElement(scene, "g", {"data-node": str(index), **_attributes(node, boxes[name])})
        _fill(group, node, boxes[name], badges[name], is_root=name == root)
    return svg


def _curve(points: Sequence[Point]) -> str:
    """An SVG path of curves between layers and lines through them."""
    x, y = points[0]
    path = [f"M{x:.1f} {y:.1f}"]
    for index, (to_x, to_y) in enumerate(points[1:]):
        middle = (x + to_x) / 2
        bend = f"C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
        path.append(f"H{to_x:.1f}" if index % 2 else bend)
        x, y = to_x, to_y
    return "".join(path)


def _fill(group: Element, node: Node, box: Box, badges: Sequence[Sequence[Badge]], *, is_root: bool) -> None:
    radius = 20 if node["kind"] == "source" else 8
    if is_root:
        _rect(group, "ring", -5, -5, WIDTH + 10, box.height + 10, radius + 4)
    _rect(group, "box", 0, 0, WIDTH, box.height, radius)
    top = (box.height - _TEXT - _ROW * len(badges)) / 2
    wide, right = WIDTH - 2 * _PAD, WIDTH - _PAD
    _text(group, str(node["name"]).removeprefix("source:"), _PAD, top + 22, int(wide / _NAME), "name")
    _text(group, _subtitle(node, int(wide / _SMALL)), _PAD, top + 39, int(wide / _SMALL), "small")
    _text(group, str(node["fingerprint"])[:8], _PAD, top + 56, 8, "mono")
    _text(group, _headline(node), right, top + 56, 13, "small").set("text-anchor", "end")
    for row, row_badges in enumerate(badges):
        x, y = float(_PAD), top + _TEXT + _ROW * row
        for word, style in row_badges:
            _rect(group, f"badge {style}", x, y - 2, _badge_width(word), 15, 7.5)
            _text(group, word, x + 7, y + 9, _BADGE_LETTERS, f"badge-text {style}")
            x += _badge_width(word) + 4


def _attributes(node: Node, box: Box) -> dict[str, str]:
    name, kind = str(node["name"]), kind_of(node)
    return {
        "class": "node source" if node["kind"] == "source" else "node",
        "data-kind": kind,
        "transform": f"translate({box.x:.1f} {box.y:.1f})",
        "tabindex": "-1",
        "role": "button",
        "aria-label": f"{name}, {kind.replace('_', ' ')}",
    }


def _rect(parent: Element, style: str, x: float, y: float, width: float, height: float, radius: float) -> None:
    sizes = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
    SubElement(parent, "rect", {"class": style, **{name: f"{value:g}" for name, value in sizes.items()}})


def _text(parent: Element, text: str, x: float, y: float, letters: int, style: str) -> Element:
    """A text of limited length; the full text is its tooltip."""
    element = SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "class": style})
    element.text = _shorten(text, letters)
    if element.text != text:
        SubElement(element, "title").text = text
    return element


def _subtitle(node: Node, letters: int) -> str:
    """Kind and, if it fits, method of an artifact; last part of the path of a source."""
    if node["kind"] == "source":
        source = cast("Node", node["source"] or {"path": "source"})
        return str(source["path"]).rstrip("/").rsplit("/", 1)[-1]
    kind = kind_of(node).replace("_", " ")
    both = f"{kind} · {str(node.get('method') or '').rsplit('.', 1)[-1]}"
    return kind if both.endswith(" ") or screen_cells(both) > letters else both


def _headline(node: Node) -> str:
    """The most informative number: reward, loss, or number of rows."""
    metrics = cast("Mapping[str, object]", node.get("metrics") or {})
    name = headline_metric(metrics)
    value, rows = metrics.get(name), metrics.get("rows", node.get("rows"))
    if isinstance(value, int | float):
        return f"{name} {value:.4g}"
    return f"{rows:,.0f} rows" if isinstance(rows, int | float) else ""


def _badge_rows(node: Node) -> Iterator[list[Badge]]:
    """State, aliases and labels, in rows that fit the box."""
    badges = [("missing", "missing")] if node.get("state") == "missing" else []
    badges += [(_shorten(str(alias), _BADGE_LETTERS), "alias") for alias in cast("Sequence[str]", node["aliases"])]
    badges += [(_shorten(str(label), _BADGE_LETTERS), "label") for label in cast("Sequence[str]", node["labels"])]
    row: list[Badge] = []
    taken = 0.0
    for word, style in badges:
        width = _badge_width(word)
        if row and taken + width > WIDTH - 2 * _PAD:
            yield row
            row, taken = [], 0.0
        row.append((word, style))
        taken += width + 4
    if row:
        yield row


def _badge_width(word: str) -> float:
    return screen_cells(word) * _BADGE + 14


def _shorten(text: str, letters: int) -> str:
    if screen_cells(text[: letters + 1]) <= letters:
        return text
    text = text[:letters]
    while screen_cells(text) >= letters:
        text = text[:-1]
    return text + "…"

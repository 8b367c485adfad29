"""A lineage graph as SVG: boxes by kind with badges, curves with the names of slots."""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import cast
from xml.etree.ElementTree import Element, SubElement

from flows.reports.layout import WIDTH, Box, Edge, Point, layout

MARGIN = 30
_PAD = 13  # from a box's side to its text
_ROW = 19  # of badges
_TEXT = 66  # height of a box without badges
_NAME, _SMALL, _BADGE = 9.4, 6.6, 6.1  # pixels a letter takes, on the safe side
_BADGE_LETTERS = 22

Node = Mapping[str, object]
Badge = tuple[str, str]  # word and style


def kind_of(node: Node) -> str:
    """The kind of an artifact; manifests of the first schema state none."""
    return str(node["artifact_kind"] or "artifact")


def draw(nodes: Mapping[str, Node], edges: Sequence[Edge], root: str) -> Element:
    """The drawing; every text in it is a text of the tree, so that writing it escapes all.

    ``data-node`` and ``data-edge`` count: a name may hold letters that an HTML parser replaces.
    """
    badges = {name: list(_badge_rows(node)) for name, node in nodes.items()}
    drawing = layout({name: _TEXT + _ROW * len(rows) for name, rows in badges.items()}, edges)
    box = f"{-MARGIN} {-MARGIN} {drawing.width + 2 * MARGIN:g} {drawing.height + 2 * MARGIN:g}"
    svg = Element("svg", {"id": "graph", "viewBox": box, "role": "group", "aria-label": "lineage graph"})
    scene = SubElement(svg, "g", {"id": "scene"})
    for index, (_, points) in enumerate(drawing.routes):
        SubElement(scene, "path", {"class": "edge", "data-edge": str(index), "d": _curve(points)})
    for index, (edge, points) in enumerate(drawing.routes):  # names lie on top of all curves
        x, y = points[-1]
        label = _text(scene, edge.slot, x - 8, y + 4, 13, "edge slot")
        label.attrib |= {"data-edge": str(index), "text-anchor": "end"}
    for index, (name, node) in enumerate(nodes.items()):
        group = SubElement(scene, "g", {"data-node": str(index), **_attributes(node, drawing.boxes[name])})
        _fill(group, node, drawing.boxes[name], badges[name], is_root=name == root)
    return svg


def _curve(points: Sequence[Point]) -> str:
    """Alternately a curve to the next layer and a line through it."""
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
    for row, words in enumerate(badges):
        x, y = float(_PAD), top + _TEXT + _ROW * row
        for word, style in words:
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
    """At most so many letters; what was cut off shows when one points at it."""
    element = SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "class": style})
    element.text = _shorten(text, letters)
    if element.text != text:
        SubElement(element, "title").text = text
    return element


def _subtitle(node: Node, letters: int) -> str:
    """What it is and, where there is room, the method that made it; of a source, the last part of where it lies."""
    if node["kind"] == "source":
        source = cast("Node", node["source"] or {"path": "source"})
        return str(source["path"]).rstrip("/").rsplit("/", 1)[-1]
    kind = kind_of(node).replace("_", " ")
    both = f"{kind} · {str(node.get('method') or '').rsplit('.', 1)[-1]}"
    return kind if both.endswith(" ") or _width(both) > letters else both


def _headline(node: Node) -> str:
    """The number that says most at a glance."""
    metrics = cast("Mapping[str, object]", node.get("metrics") or {})
    loss, rows = metrics.get("loss"), metrics.get("rows", node.get("rows"))
    if isinstance(loss, int | float):
        return f"loss {loss:.4g}"
    return f"{rows:,.0f} rows" if isinstance(rows, int | float) else ""


def _badge_rows(node: Node) -> Iterator[list[Badge]]:
    """State, aliases and labels, in rows that fit the box."""
    words = [("missing", "missing")] if node.get("state") == "missing" else []
    words += [(_shorten(str(alias), _BADGE_LETTERS), "alias") for alias in cast("Sequence[str]", node["aliases"])]
    words += [(_shorten(str(label), _BADGE_LETTERS), "label") for label in cast("Sequence[str]", node["labels"])]
    row: list[Badge] = []
    taken = 0.0
    for word, style in words:
        width = _badge_width(word)
        if row and taken + width > WIDTH - 2 * _PAD:
            yield row
            row, taken = [], 0.0
        row.append((word, style))
        taken += width + 4
    if row:
        yield row


def _badge_width(word: str) -> float:
    return _width(word) * _BADGE + 14


def _width(text: str) -> int:
    """In letters; those of East Asian scripts take two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _shorten(text: str, letters: int) -> str:
    if _width(text[: letters + 1]) <= letters:
        return text
    text = text[:letters]
    while _width(text) >= letters:
        text = text[:-1]
    return text + "…"

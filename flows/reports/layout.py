"""Where each box and curve of a drawn graph lies: layers from left to right, few crossings, straight long edges.

The steps of Sugiyama et al. 1981: layers by longest path, a waypoint in every layer that an edge passes, order within
a layer by the mean place of the neighbours, then heights. Waypoints of edges that leave one node are shared, so that
what is read by many later stages draws as one trunk with branches.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise

WIDTH = 176  # of a box, pixels
GAP_X = 92  # between layers: a slot's name fits in it
GAP_Y, LANE = 30, 12  # between boxes; height that a passing edge takes
PORT = 17  # least distance of two edges that enter one box
ORDER_SWEEPS, HEIGHT_SWEEPS = 12, 60

Point = tuple[float, float]
Key = str | tuple[str, int]  # a node, or the waypoint of its outgoing edges in a layer


@dataclass(frozen=True, kw_only=True)
class Edge:
    """``child`` reads ``parent`` in ``slot``."""

    parent: str
    child: str
    slot: str


@dataclass(frozen=True, kw_only=True)
class Box:
    """A node's place; ``x`` and ``y`` are its upper left corner."""

    layer: int
    x: float
    y: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The drawing: a box per node, and per edge the ends of its horizontal pieces; curves join them."""

    boxes: dict[str, Box]
    routes: list[tuple[Edge, list[Point]]]
    width: float
    height: float


def layout(heights: Mapping[str, float], edges: Sequence[Edge]) -> Layout:
    """Places every node and edge.

    Args:
        heights: node -> what its text needs; a box grows with the number of edges that enter it.

    Raises:
        graphlib.CycleError: the edges go in a circle.
    """
    layers = layer_of(heights, edges)
    entering = Counter(edge.child for edge in edges)
    size: dict[Key, float] = {node: max(heights[node], (entering[node] + 1) * PORT) for node in heights}
    chains = [_chain(edge, layers) for edge in edges]
    links = {pair for chain in chains for pair in pairwise(chain)}
    columns = _columns(layers, chains)
    size |= {key: LANE for column in columns for key in column if not isinstance(key, str)}
    before: dict[Key, list[Key]] = {key: [] for key in size}
    after: dict[Key, list[Key]] = {key: [] for key in size}
    for left, right in sorted(links, key=str):
        before[right].append(left)
        after[left].append(right)
    _order(columns, before, after)
    middle = _heights(columns, size, before, after)
    top = min((middle[key] - size[key] / 2 for key in size), default=0.0)
    boxes = {
        node: Box(layer=layer, x=layer * (WIDTH + GAP_X), y=middle[node] - size[node] / 2 - top, height=size[node])
        for node, layer in layers.items()
    }
    return Layout(
        boxes=boxes,
        routes=_routes(edges, chains, boxes, {key: y - top for key, y in middle.items()}),
        width=len(columns) * (WIDTH + GAP_X) - GAP_X,
        height=max((middle[key] + size[key] / 2 for key in size), default=0.0) - top,
    )


def layer_of(nodes: Iterable[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Node -> layer: each as near to its readers as they allow, the last layer read by none."""
    children: dict[str, list[str]] = {node: [] for node in nodes}
    for edge in edges:
        children[edge.parent].append(edge.child)
    to_end: dict[str, int] = {}
    for node in TopologicalSorter(children).static_order():  # readers first
        to_end[node] = 1 + max((to_end[child] for child in children[node]), default=-1)
    last = max(to_end.values(), default=0)
    return {node: last - to_end[node] for node in children}


def _chain(edge: Edge, layers: Mapping[str, int]) -> list[Key]:
    passed = range(layers[edge.parent] + 1, layers[edge.child])
    return [edge.parent, *((edge.parent, layer) for layer in passed), edge.child]


def _columns(layers: Mapping[str, int], chains: Sequence[Sequence[Key]]) -> list[list[Key]]:
    """Per layer its nodes, then the waypoints of edges that pass it."""
    columns: list[list[Key]] = [[] for _ in range(max(layers.values(), default=-1) + 1)]
    for node, layer in layers.items():
        columns[layer].append(node)
    for key in dict.fromkeys(key for chain in chains for key in chain if not isinstance(key, str)):
        columns[key[1]].append(key)
    return columns


def _order(columns: list[list[Key]], before: Mapping[Key, list[Key]], after: Mapping[Key, list[Key]]) -> None:
    """Sorts each layer by the mean place of its neighbours, to and fro, and keeps the order with fewest crossings."""
    best, fewest = [list(column) for column in columns], _crossings(columns, after)
    for sweep in range(ORDER_SWEEPS):
        forward = sweep % 2 == 0
        for column in columns if forward else reversed(columns):
            place = {key: index / len(each) for each in columns for index, key in enumerate(each)}
            near = before if forward else after
            column.sort(key=lambda key: _mean([place[other] for other in near[key]], place[key]))
        crossings = _crossings(columns, after)
        if crossings < fewest:
            best, fewest = [list(column) for column in columns], crossings
    columns[:] = best


def _crossings(columns: Sequence[Sequence[Key]], after: Mapping[Key, list[Key]]) -> int:
    place = {key: index for column in columns for index, key in enumerate(column)}
    total = 0
    for column in columns:
        seen: list[int] = []
        for key in column:
            for end in sorted(place[other] for other in after[key]):
                total += len(seen) - bisect_right(seen, end)
                insort(seen, end)
    return total


def _heights(
    columns: Sequence[Sequence[Key]],
    size: Mapping[Key, float],
    before: Mapping[Key, list[Key]],
    after: Mapping[Key, list[Key]],
) -> dict[Key, float]:
    """Middle of each box: as near to its neighbours' as the order and the gaps allow."""
    middle: dict[Key, float] = dict.fromkeys(size, 0.0)
    for sweep in range(HEIGHT_SWEEPS):
        for column in columns if sweep % 2 else reversed(columns):
            wanted = [_mean([middle[other] for other in before[key] + after[key]], middle[key]) for key in column]
            middle.update(zip(column, _apart(wanted, [size[key] for key in column]), strict=True))
    return middle


def _apart(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """The places nearest to the wanted ones, by least squares, at which nothing overlaps (isotonic regression)."""
    offsets = [0.0]
    for one, other in pairwise(sizes):
        offsets.append(offsets[-1] + (one + other) / 2 + GAP_Y)
    blocks: list[tuple[float, int]] = []  # mean of what is left without the offsets, how many
    for place, offset in zip(wanted, offsets, strict=True):
        mean, count = place - offset, 1
        while blocks and blocks[-1][0] >= mean:
            other_mean, other_count = blocks.pop()
            mean = (mean * count + other_mean * other_count) / (count + other_count)
            count += other_count
        blocks.append((mean, count))
    means = [mean for mean, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _routes(
    edges: Sequence[Edge], chains: Sequence[Sequence[Key]], boxes: Mapping[str, Box], middle: Mapping[Key, float]
) -> list[tuple[Edge, list[Point]]]:
    """The pieces of each edge; those that enter a box spread over its left side in the order in which they come."""
    entering: dict[str, list[int]] = {}
    for index in sorted(range(len(edges)), key=lambda index: (middle[chains[index][-2]], edges[index].slot)):
        entering.setdefault(edges[index].child, []).append(index)
    ports = {
        index: boxes[child].y + boxes[child].height * (place + 1) / (len(indices) + 1)
        for child, indices in entering.items()
        for place, index in enumerate(indices)
    }
    routes = []
    for index, (edge, chain) in enumerate(zip(edges, chains, strict=True)):
        x = boxes[edge.parent].x
        points: list[Point] = [(x + WIDTH, middle[edge.parent])]
        for key in chain[1:-1]:
            x += WIDTH + GAP_X
            points += [(x, middle[key]), (x + WIDTH, middle[key])]
        routes.append((edge, [*points, (boxes[edge.child].x, ports[index])]))
    return routes


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise

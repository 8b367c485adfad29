"""Where boxes and curves of the lineage page lie."""

from itertools import pairwise

import pytest

from flows.reports.layout import WIDTH, Edge, layout


def chain_of(count: int) -> list[Edge]:
    """Each node reads the one before, and some earlier ones."""
    jumps = [(index // 3, index) for index in range(2, count)] + [(index - 7, index) for index in range(9, count, 2)]
    pairs = [(index - 1, index) for index in range(1, count, 2)] + jumps
    return [Edge(parent=str(one), child=str(other), slot="rows") for one, other in pairs if one < other]


@pytest.mark.parametrize("count", [1, 2, 30, 300])
def test_layers_respect_edges_and_boxes_do_not_overlap(count: int):
    edges = chain_of(count)
    drawing = layout(dict.fromkeys(map(str, range(count)), 66.0), edges)
    assert len(drawing.boxes) == count
    assert [edge for edge, _ in drawing.routes] == edges
    for edge, points in drawing.routes:
        parent, child = drawing.boxes[edge.parent], drawing.boxes[edge.child]
        assert parent.layer < child.layer
        assert points[0] == (parent.x + WIDTH, pytest.approx(parent.y + parent.height / 2))
        assert points[-1][0] == child.x
        assert child.y < points[-1][1] < child.y + child.height
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    for one in drawing.boxes.values():
        assert one.y >= 0
        assert one.y + one.height <= drawing.height + 1e-6
    columns = sorted(drawing.boxes.values(), key=lambda box: (box.layer, box.y))
    for upper, lower in pairwise(columns):
        assert upper.layer < lower.layer or upper.y + upper.height < lower.y


def test_crossings_that_can_be_avoided_are():
    edges = [Edge(parent=one, child=other, slot="rows") for one, other in ("ad", "bc", "ce", "df")]
    ends = [Edge(parent=one, child="end", slot=one) for one in "ef"]
    drawing = layout(dict.fromkeys(["a", "b", "c", "d", "e", "f", "end"], 66.0), edges + ends)
    y = {name: box.y for name, box in drawing.boxes.items()}
    assert (y["a"] < y["b"]) == (y["d"] < y["c"]) == (y["f"] < y["e"])


def test_a_box_of_many_slots_grows():
    edges = [Edge(parent=str(index), child="end", slot=str(index)) for index in range(20)]
    drawing = layout(dict.fromkeys([*map(str, range(20)), "end"], 66.0), edges)
    heights = sorted(points[-1][1] for _, points in drawing.routes)
    assert min(high - low for low, high in pairwise(heights)) >= 15

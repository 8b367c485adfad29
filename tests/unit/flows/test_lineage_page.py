"""The lineage page: all of the graph is in it, and none of it is anything but text."""

import base64
import hashlib
import json
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from flows.commands.rehearse import SHIPPED
from flows.operate.doctor import LOCK
from flows.reports.page import WIDTH, draw, layout, render
from lineage.graph.ancestry import Edge
from tests.drawn_graphs import Page, graph_of, hostile, small, source, stage


def test_hostile_text_makes_no_element_and_no_attribute():
    harmless, attacked = Page(render(small())), Page(render(hostile()))
    assert set(attacked.tags()) <= {*harmless.tags(), "title"}  # title: a text that was cut
    assert attacked.tags().count("script") == 2
    names = {name for _, attributes in attacked.elements for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "style", "srcdoc")]


def test_hostile_text_arrives_as_it_is():
    text = render(hostile())
    assert text.isascii()  # it can be written whatever a file is called
    assert json.loads(Page(text).raw["script"][0]) == hostile()


def test_no_field_of_a_template_is_filled_from_the_graph():
    assert render(graph_of([stage("$script")], [], ref="$data ${style}")).count("$data ${style}") == 3


@pytest.mark.parametrize("graph", [small(), hostile()])
def test_nothing_is_loaded_and_only_our_script_runs(graph: dict[str, object]):
    text = render(graph)
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags())
    assert not re.search(r"url\(|@import", text)
    assert "http://" not in text
    assert "https://" not in text
    ((policy,),) = ([attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes],)
    assert policy
    assert policy.startswith("default-src 'none'; ")
    for kind, code in (("script", page.raw["script"][1]), ("style", page.raw["style"][0])):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_every_node_and_edge_is_drawn():
    page = Page(render(small()))
    assert page.count("class", "node") == 5
    assert page.count("class", "slot") == 6
    assert page.tags().count("path") == 6
    assert {"rows", "data", "base", "sft", "dpo", "policy", "reference"} <= set(page.words)


def test_records_that_lack_their_details_are_drawn():
    gone = {"id": "base@00", "kind": "stage", "name": "base", "fingerprint": "00", "labels": [], "aliases": [],
            "stage": "base", "path": "/store/base/00", "state": "missing", "artifact_kind": None}  # fmt: skip
    unknown = source("old", source=None, artifact_kind=None, rows=None)
    page = Page(render(graph_of([unknown, gone], [(0, 1, "rows")])))
    assert {"base", "old", "missing", "artifact"} <= set(page.words)


def test_numbers_that_json_has_not_are_words():
    node = stage("sft", metrics={"loss": math.nan, "grad_norm": math.inf})
    data = json.loads(Page(render(graph_of([node], []))).raw["script"][0], parse_constant=pytest.fail)
    assert data["nodes"][0]["metrics"] == {"loss": "nan", "grad_norm": "inf"}


def test_long_text_is_cut_and_told_in_full_to_who_points_at_it():
    (name,) = [each for each in draw({"n": stage("n" * 500)}, [], "n").iter("text") if each.get("class") == "name"]
    assert len(name.text or "") < 30
    assert name[0].tag == "title"
    assert name[0].text == "n" * 500


def test_the_files_beside_the_modules_are_ascii_and_packaged():
    folder = Path(render.__code__.co_filename).parent
    builder = WheelBuilder(str(folder.parents[1]))
    with builder.config.set_build_data(
        {"artifacts": [], "force_include": {}, "force_include_editable": {}, **builder.get_default_build_data()}
    ):
        packaged = {file.distribution_path for file in builder.recurse_included_files()}
    for name in (f"{page}.{suffix}" for page in ("page", "model") for suffix in ("html", "css", "js")):
        assert (folder / name).read_text().isascii()
        assert f"posttrain/flows/reports/{name}" in packaged
    assert {f"posttrain/{each.name}" for each in (LOCK, SHIPPED)} <= packaged and LOCK.is_file() and SHIPPED.is_file()


def chain_of(count: int) -> list[Edge]:
    """Each node reads the one before, and some earlier ones."""
    jumps = [(index // 3, index) for index in range(2, count)] + [(index - 7, index) for index in range(9, count, 2)]
    pairs = [(index - 1, index) for index in range(1, count, 2)] + jumps
    return [Edge(parent=str(one), child=str(other), slot="rows") for one, other in pairs if one < other]


@pytest.mark.parametrize("count", [1, 2, 30, 300])
def test_layers_respect_edges_and_boxes_do_not_overlap(count: int):
    edges = chain_of(count)
    boxes, routes = layout(dict.fromkeys(map(str, range(count)), 66.0), edges)
    assert len(boxes) == count
    for edge, points in zip(edges, routes, strict=True):
        parent, child = boxes[edge.parent], boxes[edge.child]
        assert parent.x + WIDTH < child.x
        assert points[0] == (parent.x + WIDTH, pytest.approx(parent.y + parent.height / 2))
        assert points[-1][0] == child.x
        assert child.y < points[-1][1] < child.y + child.height
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    columns = sorted(boxes.values(), key=lambda box: (box.x, box.y))
    assert all(box.y >= 0 for box in columns)
    assert all(upper.x < lower.x or upper.y + upper.height < lower.y for upper, lower in pairwise(columns))


def test_badges_say_alias_label_and_what_is_missing():
    node = stage("dpo", aliases=["champion"], labels=["cc-by-nc-4.0"], state="missing")
    assert {"champion", "cc-by-nc-4.0", "missing"} <= set(Page(render(graph_of([node], []))).words)


def test_a_box_of_many_slots_grows():
    edges = [Edge(parent=str(index), child="end", slot=str(index)) for index in range(20)]
    _boxes, routes = layout(dict.fromkeys([*map(str, range(20)), "end"], 66.0), edges)
    heights = sorted(points[-1][1] for points in routes)
    assert min(high - low for low, high in pairwise(heights)) >= 15

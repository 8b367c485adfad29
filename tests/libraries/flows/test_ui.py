"""``posttrain ui``: every page of a store is behind the key, changes nothing, and is quick with many artifacts."""

import json
import re
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from flows.serving.ui import site
from lineage.store import Store
from tests.drawn_graphs import ATTACK
from tests.written_store import WrittenStore, node

PAGES = ("/", "/list/models", "/list/data", "/list/reports", "/list/all")


def client(store: WrittenStore, key: str = "k") -> TestClient:
    """A browser that opened the printed address."""
    found = TestClient(site(store.root, "k"), base_url="http://127.0.0.1")
    assert found.get(f"/?key={key}").status_code == (200 if key == "k" else 403)
    return found


def files(root: Path) -> dict[str, int]:
    return {
        str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file() and path.suffix != ".sqlite"
    }


@pytest.fixture
def store(tmp_path: Path) -> WrittenStore:
    """A chain with a promoted model, a log, curves, rows, a sweep, and a recipe that would run in a page."""
    store = WrittenStore(tmp_path / "store")
    made = store.chain(beta=ATTACK, metrics={"loss": 1.25})
    store.made = made
    store.event(made["dpo"])
    entry = Store(store.root).entry("dpo", made["dpo"].fingerprint)
    reports = [{"step": step, "time": float(step), "metrics": {"loss": 2.0 / step}} for step in range(1, 30)]
    entry.metrics.write_text("".join(json.dumps(each) + "\n" for each in reports))
    entry.logs.mkdir()
    entry.log.write_text(f"step 1\n{ATTACK}\n")
    rows = Store(store.root).entry("pairs", made["pairs"].fingerprint).output
    (rows / "report.html").write_text("<!doctype html><title>rows of pairs</title>")
    (store.root / "sweeps" / "s1").mkdir(parents=True)
    (store.root / "sweeps" / "s1" / "trials.csv").write_text("trial,loss\n0,1.5\n")
    return store


def test_nothing_is_shown_without_the_key_or_to_another_host(store):
    stranger = TestClient(site(store.root, "k"), base_url="http://127.0.0.1")
    assert {stranger.get(page).status_code for page in (*PAGES, "/?key=x", "/nothing")} == {403}
    known = client(store)
    assert known.get("/").status_code == 200 and known.post("/").status_code == 405
    assert known.get("/", headers={"host": "evil.example"}).status_code == 400
    first = TestClient(site(store.root, "k"), base_url="http://127.0.0.1", follow_redirects=False).get("//e.com?key=k")
    assert first.headers["location"] == "/" and "samesite=strict" in first.headers["set-cookie"].lower()


def test_each_link_of_the_site_leads_to_a_page_and_no_page_changes_the_store(store):
    browser, seen, waiting = client(store), {}, ["/"]
    before = files(store.root)
    while waiting:
        address = waiting.pop()
        answer = browser.get(address)
        assert answer.status_code == 200, (address, answer.text)
        seen[address] = answer.text
        links = re.findall(r'href="(/[^"]*)"', answer.text)
        waiting += [each for each in links if each not in seen and each not in waiting]
    dpo, pairs = node(store.made["dpo"]), node(store.made["pairs"])
    for page in (
        f"/artifact/{dpo}",
        f"/lineage/{dpo}",
        f"/page/{dpo}",
        f"/curves/{dpo}",
        f"/log/{dpo}",
        f"/rows/{pairs}",
        "/sweep/s1",
    ):
        assert page in seen
    for reported in ("champion", "1.25", "cc-by-nc-4.0", node(store.made["cpt"])):
        assert reported in seen["/"] + seen[f"/artifact/{dpo}"], reported
    assert (
        "<polyline" in seen[f"/curves/{dpo}"]
        and "0,1.5" in seen["/sweep/s1"]
        and "rows of pairs" in seen[f"/rows/{pairs}"]
    )
    assert "step 1" in seen[f"/log/{dpo}"] and ATTACK not in seen[f"/log/{dpo}"]
    assert files(store.root) == before


def test_what_is_not_there_is_answered_with_its_name(store):
    browser = client(store)
    for page, reported in (
        ("/artifact/sft@0123456789abcdef", "sft@0123456789abcdef"), ("/sweep/none", "has no trials"),
        ("/rows/" + node(store.made["dpo"]), "no longer there"), ("/sweep/..%2F..", "Not Found"),
    ):  # fmt: skip
        answer = browser.get(page)
        assert answer.status_code == 404 and reported in answer.text, (page, answer.text)
    for page in ("/artifact/%00", "/log/%00", "/curves/a%0ab", "/page/%ff", "/sweep/%e2%80%ae", "/rows/%1b[2J",
                 f"/artifact/{'a' * 5000}", f"/sweep/{'a' * 300}", "/log/../../etc/passwd", "/log/%2Fetc%2Fpasswd",
                 "/lineage/source:none", "/page/alias:none", "/curves/'", "/artifact/%25", "/nothing", "/list/",
                 "/rows/~", "/artifact/*", "/log/@", "/sweep/."):  # fmt: skip
        answer = browser.get(page)
        assert answer.status_code in (400, 404) and "/ lists" in answer.text, (page, answer.status_code, answer.text)
    for page in ("/list/none", "/list/all?page=-1", "/list/all?page=%00", "/list/models?page=99999999999", "/?x=%00"):
        assert browser.get(page).status_code == 200, page


@pytest.mark.slow
def test_pages_of_two_thousand_artifacts_take_less_than_a_second(tmp_path):
    store = WrittenStore(tmp_path / "store")
    for number in range(2_000):
        store.stage(
            ("sft", "corpus")[number % 2], {}, recipe={"seed": number}, produces=("checkpoint", "text")[number % 2]
        )
    browser = client(store)  # which reads the manifests into the index
    for page in (*PAGES, "/list/all?page=20"):
        began = time.process_time()
        assert browser.get(page).status_code == 200
        assert time.process_time() - began < 1, page
    assert (
        browser.get("/list/all?page=20").text.count("<tr>") == 101
        and "older" not in browser.get("/list/all?page=20").text
    )

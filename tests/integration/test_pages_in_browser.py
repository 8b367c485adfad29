"""The pages in a real browser, where one is installed: scripts run, hostile text does not, and all can be read."""

import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from flows.reports.model import model_page, model_report
from flows.reports.page import render
from lineage.graph.index import Index
from tests.drawn_graphs import ATTACK, Page, hostile, small
from tests.reported import reported

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return found


def opened(browser: str, folder: Path, graph: dict[str, object]) -> Page:
    """The page after its script has run."""
    (folder / "page.html").write_text(render(graph))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
    address = (folder / "page.html").as_uri()
    result = subprocess.run(
        [browser, *options, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True
    )
    return Page(result.stdout)


def test_the_root_is_chosen_and_its_details_are_shown(browser: str, tmp_path: Path):
    page = opened(browser, tmp_path, small())
    assert page.count("class", "selected") == 1
    assert page.count("class", "up") == 5 + 2 * 6  # boxes; curves and names of slots: the root is made from all
    assert {"Recipe", "learning_rate", "Code and environment", "libraries.torch"} <= set(page.words)


def test_hostile_text_is_shown_and_does_nothing(browser: str, tmp_path: Path):
    page = opened(browser, tmp_path, hostile(ATTACK))
    assert not {"img", "iframe"} & set(page.tags())
    assert page.tags().count("script") == 2
    assert {"Recipe", "Metrics", "Files, SHA-256"} <= set(page.words)


class Tab:
    """A tab of a browser, driven over its debugging protocol."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address, max_size=None)
        self._numbers = itertools.count(1)

    def __call__(self, method: str, **params: object) -> dict:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def show(self, page: Path, width: int, height: int, scheme: str = "light") -> None:
        is_phone = width < 500
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self("Page.navigate", url=page.as_uri())
        until = time.monotonic() + 60
        ready = "location.protocol === 'file:' && document.readyState === 'complete'"
        while not self.value(ready):
            assert time.monotonic() < until

    def value(self, script: str):
        found = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")


@contextlib.contextmanager
def tab(browser: str, folder: Path) -> Iterator[Tab]:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
    with subprocess.Popen(
        [browser, *options, "--remote-debugging-port=0", "about:blank"], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            until, file = time.monotonic() + 60, folder / "DevToolsActivePort"
            while not (file.exists() and file.read_text().count("\n")):
                assert time.monotonic() < until
                time.sleep(0.05)
            with urllib.request.urlopen(f"http://127.0.0.1:{file.read_text().split()[0]}/json") as answer:
                pages = [each for each in json.load(answer) if each["type"] == "page"]
            yield Tab(pages[0]["webSocketDebuggerUrl"])
        finally:
            process.terminate()


# What a reader could not see: wider than the page, cut off, or empty.
UNSEEN = """(() => {
  const name = (each) => `${each.tagName}.${each.className.baseVal ?? each.className} ${each.textContent.slice(0, 40)}`;
  const all = [...document.body.querySelectorAll("*")].filter((each) => !each.closest("script, svg"));
  const inside = all.filter((each) => !each.closest(".wide") || each.matches(".wide"));
  const cut = (each) => getComputedStyle(each).overflowX !== "visible" && !each.matches(".wide")
    && each.scrollWidth > each.clientWidth + 1;
  const charts = [...document.querySelectorAll(".chart")];
  const labels = charts.flatMap((each) => [...each.querySelectorAll("text")].filter((text) => {
    const [one, other] = [text.getBoundingClientRect(), each.getBoundingClientRect()];
    return text.textContent.trim() && one.width && (one.right > other.right + 1 || one.left < other.left - 1
      || one.bottom > other.bottom + 1);
  }));
  return {
    body: document.documentElement.scrollWidth - innerWidth,
    outside: inside.filter((each) => each.getBoundingClientRect().right > innerWidth + 1).map(name),
    cut: inside.filter(cut).map(name),
    labels: labels.map((each) => each.textContent),
    empty: [...document.querySelectorAll("section, figure, article, .wide")].filter((each) =>
      each.offsetHeight < 20 || !(each.textContent.trim() || each.querySelector("svg"))).map(name),
    undrawn: charts.filter((each) => !each.querySelector("path.js-line, path.point")).length,
  };
})()"""


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_all_of_a_models_page_can_be_read(browser: str, tmp_path: Path, size: tuple[int, int]):
    long = "a_name_that_has_no_place_to_break_and_is_longer_than_a_phone_is_wide " * 3
    store = reported(tmp_path / "artifacts", long)
    with Index(store.root) as index:
        reports = [model_report(ref, index) for ref in ("p/sft", "p/dpo")]
    (tmp_path / "one.html").write_text(model_page(reports[1:]))
    (tmp_path / "two.html").write_text(model_page(reports, ["A differs from B"]))
    with tab(browser, tmp_path / "profile") as shown:
        for page in ("one.html", "two.html"):
            shown.show(tmp_path / page, *size)
            found = shown.value(UNSEEN)
            assert found.pop("body") <= 0
            assert found == {"outside": [], "cut": [], "labels": [], "empty": [], "undrawn": 0}
        shown.show(tmp_path / "one.html", *size)
        texts = "[...document.querySelectorAll('.chart .xtitle')].map((each) => each.textContent)"
        assert set(shown.value(texts)) == {"step"}
        shown.value("document.querySelector('input[value=tokens]').click()")
        assert set(shown.value(texts)) == {"tokens"}

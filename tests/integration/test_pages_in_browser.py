"""The pages in a real browser, where one is installed: scripts run, hostile text does not, and all can be read."""

import contextlib
import itertools
import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from flows.progress.run_record import RunRecord, StageRecord, new_id
from flows.reports.model import model_page, model_report
from flows.reports.page import render
from flows.serving import ui
from flows.serving.serve_model import bound_socket
from lineage.filesystem.owner import Owner
from lineage.graph.index import Index
from tests.drawn_graphs import ATTACK, Page, hostile, small
from tests.reported import reported
from tests.written_store import WrittenStore, node

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

    def show(self, page: Path | str, width: int, height: int, scheme: str = "light") -> None:
        is_phone, address = width < 500, page if isinstance(page, str) else page.as_uri()
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self("Page.navigate", url=address)
        until = time.monotonic() + 60
        ready = f"location.protocol === '{address.partition(':')[0]}:' && document.readyState === 'complete'"
        while not self.value(ready):
            assert time.monotonic() < until

    def wait_for(self, text: str) -> None:
        """Until the page, which loads itself again, shows a text."""
        until = time.monotonic() + 60
        while text not in self.value("document.body ? document.body.innerText : ''"):
            assert time.monotonic() < until, f"{text} is not shown"
            time.sleep(0.1)

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
    scrolled: [...document.querySelectorAll(".wide")].filter((each) =>
      each.querySelector("table") && each.scrollWidth > each.clientWidth + 1).map(name),
    labels: labels.map((each) => each.textContent),
    empty: [...document.querySelectorAll("section, figure, article, .wide")].filter((each) =>
      each.offsetHeight < 20 || !(each.textContent.trim() || each.querySelector("svg"))).map(name),
    undrawn: charts.filter((each) => !each.querySelector("path.js-line, path.point")).length,
  };
})()"""


SIZES = [pytest.param((1400, 900), id="desktop", marks=pytest.mark.slow), pytest.param((390, 844), id="phone")]


@pytest.mark.parametrize("size", SIZES)
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
            assert found == {"outside": [], "cut": [], "scrolled": [], "labels": [], "empty": [], "undrawn": 0}
            facts = "(each => each.scrollWidth - each.clientWidth)(document.querySelector('#facts .wide'))"
            assert shown.value(facts) <= 0
        shown.show(tmp_path / "one.html", *size)
        texts = "[...document.querySelectorAll('.chart .xtitle')].map((each) => each.textContent)"
        assert set(shown.value(texts)) == {"step"}
        shown.value("document.querySelector('input[value=tokens]').click()")
        assert set(shown.value(texts)) == {"tokens"}


@contextlib.contextmanager
def served(store: Path) -> Iterator[str]:
    """The address of the site over a store, without its key."""
    import uvicorn

    with bound_socket("127.0.0.1", 0) as bound:
        server = uvicorn.Server(uvicorn.Config(ui.site(store, "k"), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(120)


def report_steps(folder: Path, first: int, last: int) -> None:
    now = time.time()
    lines = [
        {"step": n, "time": now - 20 + n, "metrics": {"loss": 2 / n, "grad_norm": 1.0}} for n in range(first, last)
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def running(tmp_path: Path) -> tuple[WrittenStore, Path]:
    """A store with a chain, and the folder of a stage that runs."""
    store = WrittenStore(tmp_path / "store")
    store.made = store.chain(metrics={"loss": 1.25})
    folder = store.root / "sft" / "0123456789abcdef"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "stage.log").write_text("the first line\n")
    report_steps(folder, 1, 11)
    stage = StageRecord(
        state="running", total=40, directory=str(folder), since=time.time() - 30, workers=1, cpus=2, gpus=0
    )
    RunRecord(
        id=new_id(), pipeline="live", cli_args=["pipeline=live"], driver=Owner.here(), started=time.time() - 31,
        stages={"sft": stage},
    ).write(store.root)  # fmt: skip
    return store, folder


@pytest.mark.parametrize("size", SIZES)
def test_each_page_of_the_site_fits_and_can_be_read(browser: str, tmp_path: Path, running, size: tuple[int, int]):
    store, _ = running
    dpo = node(store.made["dpo"])
    pages = ("", *f"artifact/{dpo} curves/{dpo} log/{dpo} lineage/{dpo} list/models list/all".split())
    with served(store.root) as address, tab(browser, tmp_path / "profile") as shown:
        shown.show(f"{address}/?key=k", *size)
        for page in pages:
            shown.show(f"{address}/{page}", *size)
            assert shown.value("document.body.innerText").strip(), page
            assert shown.value("document.documentElement.scrollWidth") <= shown.value("innerWidth") == size[0], page


def test_what_runs_is_shown_live_with_its_curves_its_log_and_its_end(
    browser: str, tmp_path: Path, running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ui, "_REFRESH_SECONDS", 1)
    store, folder = running
    size = (1280, 900)
    with served(store.root) as address, tab(browser, tmp_path / "profile") as shown:
        shown.show(f"{address}/?key=k", *size)
        shown.wait_for("10/40")
        assert "ETA 0:" in shown.value("document.body.innerText")
        report_steps(folder, 11, 21)
        shown.wait_for("20/40")
        shown.show(f"{address}/log/sft@{folder.name}", *size)
        with (folder / "logs" / "stage.log").open("a") as file:
            file.write("a later line\n")
        shown.wait_for("a later line")
        shown.show(f"{address}/curves/sft@{folder.name}", *size)
        shown.wait_for("20 steps")
        assert shown.value("document.querySelectorAll('polyline').length") == 2  # loss and gradient norm
        report_steps(folder, 21, 31)
        shown.wait_for("30 steps")

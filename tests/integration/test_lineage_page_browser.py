"""The lineage page in a real browser, where one is installed: its script runs, and hostile text does not."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flows.reports.page import render
from tests.drawn_graphs import ATTACK, Page, hostile, small

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

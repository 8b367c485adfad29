"""Unit tests do not import what takes seconds to import, for which each worker of ``make check`` would wait."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.written_store import WrittenStore

SLOW_TO_IMPORT = {"accelerate", "mlflow", "peft", "prefect", "ray", "torch", "transformers", "trl"}


@pytest.fixture(scope="session")
def _only_unit_tests(request: pytest.FixtureRequest) -> bool:
    return all(Path(__file__).parent in item.path.parents for item in request.session.items)


@pytest.fixture(autouse=True)
def _no_slow_import(_only_unit_tests: bool) -> Iterator[None]:
    yield
    found = sorted(SLOW_TO_IMPORT.intersection(sys.modules)) if _only_unit_tests else []
    SLOW_TO_IMPORT.difference_update(found)  # of the test that imports it alone
    assert not found, f"imports {', '.join(found)}: move it to tests/libraries"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Thousands of small files need not survive a power failure; that they are flushed is tested by replacing this."""
    with pytest.MonkeyPatch.context() as patch:  # a test's own monkeypatch ends before the fixtures that it came after
        patch.setattr(os, "fsync", lambda descriptor: None)
        if "tests.command" in sys.modules:  # their runs are refused: a fork server would import for nothing
            patch.setattr("tests.command.warm_up", lambda: None)
        yield


@pytest.fixture
def store(tmp_path: Path) -> WrittenStore:
    """A store without an artifact yet; a file may have a ``store`` of its own."""
    return WrittenStore(tmp_path / "store")

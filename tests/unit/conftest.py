"""Unit tests do not import what takes seconds to import, for which each worker of ``make check`` would wait."""

import hashlib
import os
import pickle
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.written_store import WrittenStore

_TEST_GROUPS = Path(__file__).parents[1] / "conf"
_WEEK_SECONDS = 7 * 86_400
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
        yield


@pytest.fixture(scope="session", autouse=True)
def _kept_compositions(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hydra composes in 0.2 s: what it makes of shipped groups is kept for later runs, by all that it is made from."""
    compose = sys.modules.get("flows.declare.config")
    if compose is None or not hasattr(pytestconfig, "cache"):
        yield
        return
    folder = pytestconfig.cache.mkdir("compositions")
    for path in folder.iterdir():
        if time.time() - path.stat().st_mtime > _WEEK_SECONDS:
            path.unlink(missing_ok=True)
    own = str(tmp_path_factory.getbasetemp())
    composer, code = compose._composer, (Path(compose.__file__).read_bytes(), version("hydra-core"))

    @cache
    def kept(overrides, config_dir, files):
        if config_dir not in (None, _TEST_GROUPS) or own in str(overrides):
            return composer(overrides, config_dir, files)
        file = folder / hashlib.sha256(repr((overrides, files, code)).encode()).hexdigest()
        if not file.exists():
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_bytes(pickle.dumps(composer(overrides, config_dir, files)))
            draft.replace(file)
        return pickle.loads(file.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_composer", kept)
        yield


@pytest.fixture
def store(tmp_path: Path) -> WrittenStore:
    """A store without an artifact yet; a file may have a ``store`` of its own."""
    return WrittenStore(tmp_path / "store")

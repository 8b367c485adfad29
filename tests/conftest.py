"""Marks tests by their folder, and keeps Prefect's database of the tests apart from the user's."""

import os
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Also for the processes that tests start.
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="posttrain-tests-prefect-")
os.environ.pop("PREFECT_API_URL", None)
# Before torch is imported: tests share the machine, and spinning threads would stall each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in ("integration", "gpu"):
            item.add_marker(folder)
        if folder == "gpu" and not Path("/dev/nvidiactl").exists():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))

"""Marks tests by folder, and keeps what they leave on this machine apart from the user's and from each other's."""

import atexit
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
# Of this process and of those that tests start: Prefect's database, and the slots of the machine, for which a test that
# hangs would else keep all others waiting. The name is short, since sockets lie below it.
OWN = Path(tempfile.mkdtemp(prefix="pt-"))
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays where it is looked for
os.environ["TMPDIR"] = str(OWN)
os.environ["PREFECT_HOME"] = str(OWN / "prefect")
os.environ.pop("PREFECT_API_URL", None)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what nohup gives us is not for what the tests start
# Before torch is imported: tests share the machine, and spinning threads would stall each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
tempfile.tempdir = None  # looked up again
atexit.register(shutil.rmtree, OWN, ignore_errors=True)
settings.register_profile("posttrain", deadline=None)  # other work on the machine makes any example slow
settings.load_profile("posttrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in ("integration", "gpu"):
            item.add_marker(folder)
        if folder == "gpu" and not Path("/dev/nvidiactl").exists():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))

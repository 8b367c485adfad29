"""Marks tests by folder, and gives each a directory and an environment of its own: nothing there is the user's."""

import atexit
import gc
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

gc.disable()  # until all is imported: a quarter of the time of that
HERE = Path(__file__).parent
# Of this process and of those that tests start: the slots of the machine, for which a test that hangs would else keep
# all others waiting. The name is short, since sockets lie below it.
OWN = Path(tempfile.mkdtemp(prefix="pt-"))
# What the product, or a library below it, reads of the user's.
USERS = (
    "AWS_", "DVC_", "GIT_", "HF_", "HUGGINGFACE_", "HYDRA_", "MLFLOW_", "POSTTRAIN_", "PREFECT_", "RAY_",
    "TRANSFORMERS_", "WANDB_", "XDG_",
)  # fmt: skip
for name in [name for name in os.environ if name.startswith(USERS)]:
    del os.environ[name]
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays where it is looked for
os.environ.update(TMPDIR=str(OWN), HOME=str(OWN / "home"), PREFECT_HOME=str(OWN / "home/.prefect"))
os.environ["PYTHONPATH"] = str(HERE.parent)  # processes that tests start in their own directories
(OWN / "home").mkdir()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what nohup gives us is not for what the tests start
# Before torch is imported: tests share the machine, and spinning threads would stall each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
tempfile.tempdir = None  # looked up again
atexit.register(shutil.rmtree, OWN, ignore_errors=True)
# Other work on the machine makes any example slow. A commit is judged on the same examples as the one before it.
settings.register_profile("posttrain", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=300)
settings.load_profile("posttrain")
_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _empty_directory() -> Iterator[None]:
    """For what fixtures of several tests do; in the checkout may lie the store of a demo."""
    (OWN / "shared").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(OWN / "shared")
        yield


@pytest.fixture(autouse=True)
def _own_place(_empty_directory: None) -> Iterator[None]:
    """An empty working directory and a home for each test."""
    folder = OWN / f"test-{next(_numbers)}"
    (folder / "home").mkdir(parents=True)
    (folder / "work").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("PREFECT_HOME", str(folder / "home/.prefect"))
        patch.chdir(folder / "work")
        yield
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in ("integration", "gpu"):
            item.add_marker(folder)
        if folder == "gpu" and not Path("/dev/nvidiactl").exists():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection looks at what was imported
    gc.enable()

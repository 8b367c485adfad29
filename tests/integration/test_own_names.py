"""Our packages have common names: a user's own modules of these names neither replace ours nor are hidden by them."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import posttrain
from tests.command import REPOSITORY

STOPS = "raise SystemExit('a module of the user replaced ours')\n"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder of a user with modules of all our names."""
    for name in ("flows", "lineage", "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(STOPS)
    (tmp_path / "tasks.py").write_text(STOPS)
    return tmp_path


@pytest.mark.parametrize("on_path", [False, True])
def test_a_command_runs_ours_in_a_folder_with_modules_of_our_names(hostile: Path, on_path: bool) -> None:
    path = os.pathsep.join([str(REPOSITORY), *([str(hostile)] if on_path else [])])
    called = [sys.executable, "-m", "posttrain", "plan", "pipeline=sft", "tracking=none"]
    done = subprocess.run(
        called, cwd=hostile, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and "5 of 5 stages to run" in done.stdout


def test_what_ours_lack_comes_from_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks.py").write_text("def double(x):\n    return 2 * x\nsft = 'not ours'\n")
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows/theirs.py").write_text("from tasks import double\nsix = double(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    posttrain.hold()
    monkeypatch.delitem(sys.modules, "tasks.sft", raising=False)
    monkeypatch.delattr(importlib.import_module("tasks"), "sft", raising=False)
    try:
        assert importlib.import_module("flows.theirs").six == 6
        from tasks import sft

        assert sft.SFT.__name__ == "SFT"  # ours, since we have it
        with pytest.raises(AttributeError, match="'tasks' of posttrain has no attribute 'missing'"):
            importlib.import_module("tasks").missing  # noqa: B018
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("flows.missing")
    finally:
        sys.modules.pop("flows.theirs", None)


def test_a_deployed_flow_finds_modules_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder was on the path only while the entry was imported, as with ``prefect deploy``."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    entry = importlib.import_module("posttrain.entry")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
    with pytest.raises(AttributeError, match=r"there is no pipeline/none-such\.yaml here"):
        getattr(entry, "none-such")
    assert str(tmp_path) in sys.path

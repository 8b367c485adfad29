"""A built wheel, in an environment of its own, runs in a folder whose modules have the names of our packages."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from flows.__main__ import COMMANDS
from tests.command import REPOSITORY
from tests.miniature import overrides_of

pytestmark = pytest.mark.slow
STOPS = "raise SystemExit('a module of the user replaced ours')\n"
SFT = (*overrides_of("sft"), "stages.sft.method.num_steps=2")


class Wheel:
    """The programs of an environment that has the wheel, and the other packages of this one."""

    def __init__(self, place: Path) -> None:
        built = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", place]
        subprocess.run([*built, REPOSITORY], check=True)
        venv.create(place / "env", with_pip=False)
        self.python = place / "env/bin/python"
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *place.glob("*.whl")], check=True)
        (site,) = (place / "env/lib").glob("*/site-packages")
        (site / "zz-others.pth").write_text(sysconfig.get_path("purelib"))
        self.folder = place / "work"
        for name in ("flows", "lineage", "conf"):
            (self.folder / name).mkdir(parents=True)
            (self.folder / name / "__init__.py").write_text(STOPS)
        (self.folder / "tasks.py").write_text(STOPS)
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**kept, "PATH": path, "DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": str(place / "dvc")}

    def __call__(self, *arguments: str | Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            list(map(str, arguments)), cwd=self.folder, env={**self.environment, **variables}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    pytest.importorskip("hatchling")
    return Wheel(tmp_path_factory.mktemp("wheel"))


def test_it_brings_one_folder_and_leaves_the_names_to_others(wheel: Wheel) -> None:
    found = wheel(wheel.python, "-P", "-c", "import tasks, flows.declare; print(tasks.__file__)").stdout
    assert f"{os.sep}posttrain{os.sep}tasks{os.sep}" in found
    done = wheel(wheel.python, "-c", "import tasks", code=1)
    assert "a module of the user" in done.stderr, "in the user's own processes the user's win"


def test_each_command_starts(wheel: Wheel) -> None:
    started = {
        name: subprocess.Popen(
            ["posttrain", name, "--help"], cwd=wheel.folder, env=wheel.environment, stdout=subprocess.PIPE, text=True
        )
        for name in COMMANDS
    }
    for name, process in started.items():
        assert f"posttrain {name}" in process.communicate()[0] and process.returncode == 0, name


@pytest.mark.parametrize("launcher", ["local", "cluster"])
def test_a_run_trains_there_by_its_stages_and_by_rays_workers(wheel: Wheel, launcher: str) -> None:
    """Also with the user's folder first on PYTHONPATH."""
    words = [*SFT, f"store={launcher}", "tracking.dvc=false"]
    if launcher == "cluster":
        words += ["+stages.sft.resources={launcher: cluster, num_workers: 2, micro_batch_size: 4}"]
    done = wheel("posttrain", "run", *words, "--json", PYTHONPATH=str(wheel.folder))
    assert {row["state"] for row in json.loads(done.stdout)["stages"]} == {"run"}
    assert "sft" in wheel("posttrain", "lineage", "sft/sft", f"store={launcher}").stdout


def test_the_users_own_code_finds_its_own_modules(wheel: Wheel, tmp_path: Path) -> None:
    wheel.folder, before = tmp_path, wheel.folder
    try:
        (tmp_path / "tasks.py").write_text("def chats():\n    yield from ({'text': f'row {n}'} for n in range(40))\n")
        (tmp_path / "mine.py").write_text("from tasks import chats\n\n\ndef rows():\n    return chats()\n")
        done = wheel("posttrain", "data", "python:mine.rows", "--json")
        assert json.loads(done.stdout)["rows"] == 40
    finally:
        wheel.folder = before


def test_dvc_calls_it(wheel: Wheel) -> None:
    wheel("git", "init", "--quiet")
    wheel(sys.executable, "-P", "-m", "dvc", "init", "--quiet")
    wheel(wheel.python, "-P", "-m", "flows.dvc_yaml", *SFT, "tracking.mlflow=false")
    wheel(sys.executable, "-P", "-m", "dvc", "repro", "instructions")
    assert list((wheel.folder / "artifacts/instructions").glob("*/manifest.json"))


def test_prefect_runs_its_deployments(wheel: Wheel, prefect_url: str) -> None:
    api = {"PREFECT_API_URL": prefect_url, "PREFECT_API_AUTH_STRING": os.environ["PREFECT_API_AUTH_STRING"]}
    serving = subprocess.Popen(
        ["posttrain", "serve", *SFT, "store=served", "tracking=none"], cwd=wheel.folder,
        env={**wheel.environment, **api}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert serving.stdout
        said = ""
        while "run one: " not in said:
            line = serving.stdout.readline()
            assert line, said
            said += line
        wheel(wheel.python, "-P", "-m", "prefect", "deployment", "run", "sft/local", "--watch", **api)
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.communicate(timeout=60)
    assert list((wheel.folder / "served/evaluate").glob("*/manifest.json"))

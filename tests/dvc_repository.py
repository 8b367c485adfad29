"""A git and DVC repository of a user's own, whose pipeline takes no time, and their two commands."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.command import CONF, REPOSITORY, call, call_dvc

WORDS = ("--config-dir", "conf", "pipeline=mini", "model=none", "sources.rows.path=data/rows.txt",
         "tracking.mlflow=false")  # fmt: skip
RECIPE = "# what a user edits\nlearning_rate: 0.1\n"


class DvcRepository:
    """Data under ``data/``, groups under ``conf/``, ``dvc.yaml`` rendered and committed.

    Args:
        overrides: what declares the pipeline.
        environment: further variables of every command.
    """

    def __init__(self, folder: Path, *overrides: str, environment: dict[str, str]) -> None:
        self.folder, self.overrides = folder, list(overrides)
        programs = folder.parent / "bin"
        programs.mkdir(exist_ok=True)
        for name, words_of_it in {"posttrain": "-m flows", "dvc": "-m dvc"}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P {words_of_it} "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "DVC_SITE_CACHE_DIR": str(folder.parent / "site"),
            "DVC_NO_ANALYTICS": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
            **environment,
        }

    def create(self) -> "DvcRepository":
        """Makes the repository with the toy pipeline, whose ``left`` has a recipe of its own."""
        (self.folder / "data").mkdir(parents=True)
        (self.folder / "data/rows.txt").write_text("rows")
        toy = (CONF / "pipeline/toy.yaml").read_text().replace("name: toy", "name: mini")
        for name, text in {
            "pipeline/mini.yaml": f"# @package _global_\ndefaults:\n  - /recipe@stages.left.method: left\n{toy}",
            "recipe/left.yaml": RECIPE,
            "model/none.yaml": "# @package _global_\n{}\n",
        }.items():
            (self.folder / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "conf" / name).write_text(text)
        self.start_tracking()
        return self

    def start_tracking(self) -> None:
        """git, DVC with the settings of this project, ``dvc.yaml``; all committed."""
        self("git", "init", "--quiet")
        self("dvc", "init", "--quiet")
        shutil.copyfile(REPOSITORY / ".dvc/config", self.folder / ".dvc/config")
        self(sys.executable, "-m", "flows.dvc_yaml", *self.overrides)
        self.commit("declared")

    def __call__(self, *overrides: str, fails: bool = False, **variables: str) -> str:
        """Runs a command and returns what it printed, both streams."""
        if overrides[0] == "dvc":
            called = call_dvc(list(overrides[1:]), self.folder, {**self.environment, **variables})
            return _output(overrides, called, fails)
        done = subprocess.run(
            overrides, cwd=self.folder, env={**self.environment, **variables}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
        )  # fmt: skip
        return _output(overrides, done, fails)

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            overrides, cwd=self.folder, env=self.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def posttrain(self, verb: str, *overrides: str, fails: bool = False, **variables: str) -> str:
        """Runs ``posttrain`` on the declared pipeline, in this process."""
        return self.called(verb, *self.overrides, *overrides, fails=fails, **variables)

    def called(self, *overrides: str, fails: bool = False, **variables: str) -> str:
        """Runs ``posttrain`` in this process."""
        done = call(list(overrides), self.folder, {**self.environment, **variables})
        return _output(["posttrain", *overrides], done, fails)

    def copy(self, folder: Path) -> "DvcRepository":
        """All of it elsewhere, with every file that has several names still one file."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["cp", "--archive", self.folder, folder], check=True)
        other = DvcRepository(folder, *self.overrides, environment={})
        kept = {name: value for name, value in self.environment.items() if name not in ("PATH", "DVC_SITE_CACHE_DIR")}
        other.environment |= kept
        return other

    def commit(self, message: str) -> None:
        self("git", "add", "--all")
        self("git", "commit", "--quiet", "--message", message)

    def is_clean(self) -> bool:
        return "Data and pipelines are up to date." in self("dvc", "status")

    def clone(self, folder: Path) -> "DvcRepository":
        folder.parent.mkdir()
        self("git", "clone", "--quiet", ".", str(folder))
        other = DvcRepository(folder, *self.overrides, environment={})
        other.environment = {**self.environment, "DVC_SITE_CACHE_DIR": str(folder.parent / "site")}
        return other

    def view(self, stage: str) -> Path:
        return self.folder / "artifacts/pipelines/mini" / stage

    def entry(self, stage: str) -> Path:
        """The only directory that the store has of a stage."""
        [path] = (self.folder / "artifacts" / stage).iterdir()
        return path


def _output(overrides: Sequence[str], done: subprocess.CompletedProcess[str], fails: bool) -> str:
    output = done.stdout + (done.stderr or "")
    assert (done.returncode != 0) == fails, f"{shlex.join(overrides)} ended with {done.returncode}:\n{output}"
    return output


def disk_bytes(*folders: Path) -> int:
    """What folders take on the disk, a file with several names once."""
    found = (path.lstat() for folder in folders for path in [folder, *folder.rglob("*")])
    return sum({status.st_ino: status.st_blocks * 512 for status in found}.values())

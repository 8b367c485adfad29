"""Plants each fault of ``faults.py`` in a copy of the repository, and says which test of ``make test`` fails.

python -m tests.mutations                 # the tests that a fault names; where they pass, the whole suite
python -m tests.mutations --quick         # the named tests alone
python -m tests.mutations --at 82e2e7cc   # the code and tests of a commit, with the faults of this one

A fault is caught if a test fails with it that passes without it. Exit code 1: fewer than 9 of 10 faults are caught.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.mutations.faults import FAULTS, Fault

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("lineage", "tasks", "flows")
IN_SUITE = "not slow and not nightly"
SHARE = 0.9  # of the faults that must be caught
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


def read_code(root: Path) -> dict[Path, str]:
    """The text of each file of the packages."""
    paths = (path for package in PACKAGES for path in sorted((root / package).rglob("*.py")))
    return {path: path.read_text(encoding="utf-8") for path in paths}


def places(files: Mapping[Path, str], fault: Fault) -> list[Path]:
    """The files that have the text of a fault, each as often as it has it."""
    return [path for path, text in files.items() for _ in range(text.count(fault.text))]


def test_files(root: Path, fault: Fault) -> Iterator[str]:
    """The arguments of pytest for the tests that a fault names."""
    for named in fault.tests:
        file, _, test = named.partition("::")
        for path in sorted((root / "tests").rglob(f"{Path(file).name}.py")):
            if path.with_suffix("").as_posix().endswith(f"/{file}"):
                yield f"{path.relative_to(root)}::{test}" if test else str(path.relative_to(root))


class Copy:
    """The repository in a folder of its own, in which faults are planted."""

    def __init__(self, folder: Path, commit: str | None) -> None:
        self.root, self._temporary = folder / "r", folder / "t"
        self._passing: set[str] = set()  # tests that pass without a fault
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        if commit is None:
            for name in subprocess.run(
                listed, cwd=REPOSITORY, check=True, capture_output=True, text=True
            ).stdout.split():
                if (REPOSITORY / name).is_file():
                    (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(REPOSITORY / name, self.root / name)
            self.code = read_code(self.root)
            return
        archive = folder / "commit.tar"
        subprocess.run(["git", "archive", "--output", archive, commit], cwd=REPOSITORY, check=True)
        with tarfile.open(archive) as file:
            file.extractall(self.root, filter="data")
        self.code = read_code(self.root)

    def caught_by(self, fault: Fault, *, quick: bool) -> str | None:
        """The first test that fails with a fault and passes without it; None: none does."""
        [path] = places(self.code, fault)
        before = self.code[path]
        named = list(dict.fromkeys(test_files(self.root, fault)))
        for tests in [named] if quick else [named, ["tests"]]:
            try:
                path.write_text(before.replace(fault.text, fault.wrong), encoding="utf-8")
                code, output = self._pytest(["-x", *tests])
            finally:
                path.write_text(before, encoding="utf-8")
            for test in _FAILED.findall(output) if code == 1 else ():
                if test in self._passing or self._pytest([test])[0] == 0:
                    self._passing.add(test)
                    return test
            if code not in (0, 1):
                print(output[-2000:])
        return None

    def _pytest(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Runs tests in a child of this process, which has imported what takes long; unit tests refuse that."""
        self._temporary.mkdir()
        log, cli_args = self.root.parent / "log", ["-rfE", "-m", IN_SUITE, "-p", "no:cacheprovider", *arguments]
        if all(word.startswith(("-", "tests/unit/")) for word in arguments):
            environment = {**os.environ, "PYTHONPATH": str(self.root), "TMPDIR": str(self._temporary)}
            command = [sys.executable, "-m", "pytest", *cli_args]
            with log.open("wb") as file:
                code = subprocess.run(command, cwd=self.root, env=environment, stdout=file, stderr=file).returncode
        else:
            child = os.fork()
            if child == 0:
                self._become(log)
                os._exit(int(pytest.main(cli_args)))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shutil.rmtree(self._temporary, ignore_errors=True)
        return code, log.read_text(errors="replace")

    def _become(self, log: Path) -> None:
        """Makes this process one that runs the tests of the copy."""
        with log.open("wb") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        os.environ["TMPDIR"], tempfile.tempdir = str(self._temporary), None
        os.chdir(self.root)
        sys.path[:] = [str(self.root), *(each for each in sys.path if Path(each or ".").resolve() != REPOSITORY)]
        for name in [name for name in sys.modules if name.partition(".")[0] in (*PACKAGES, "tests", "bench")]:
            del sys.modules[name]


def import_once() -> None:
    """Imports what most tests need; each of them starts from a fork of this process."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as tests/conftest.py has it
    sys.dont_write_bytecode = True  # two faults of one size within a second would share a compiled file
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import datasets
    import peft
    import transformers.trainer
    import trl

    assert all((datasets, peft, transformers.trainer, trl))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the named tests alone")
    parser.add_argument("--at", metavar="COMMIT", help="plant the faults in this commit")
    parser.add_argument("--only", default="", metavar="WORDS", help="faults whose description has these words")
    options = parser.parse_args()
    import_once()
    wanted = [fault for fault in FAULTS if options.only in fault.what]
    num_caught, begin = 0, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mu-", ignore_cleanup_errors=True) as folder:
        copy = Copy(Path(folder), options.at)
        for fault in wanted:
            if len(places(copy.code, fault)) != 1:
                print(f"not there   {fault.what}", flush=True)
                continue
            test = copy.caught_by(fault, quick=options.quick)
            num_caught += test is not None
            print(f"caught      {fault.what}: {test}" if test else f"NOT CAUGHT  {fault.what}", flush=True)
    print(f"{num_caught} of {len(wanted)} faults caught in {time.perf_counter() - begin:.0f} s")
    return int(num_caught < SHARE * len(wanted))


if __name__ == "__main__":
    sys.exit(main())

"""Reward for programs that pass tests, run in a sandboxed process (``sandbox.py``)."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from lineage.errors import DataError, PipelineError
from tasks.reward_functions.answer import SHARED, Answer, BuiltIn, unfenced
from tasks.reward_functions.function import RewardFunction

_SANDBOX = Path(__file__).with_name("sandbox.py")
_TESTS = "tests"  # column
_TIMEOUT_SECONDS, _MEMORY_MIB = 2, 512  # defaults
_WAIT = 5  # seconds added to three times the processor time, after which a program that sleeps is killed


def _code(reward: RewardFunction, answer: Answer) -> float:
    """The share of tests that pass; with ``partial_credit`` the share times it, unless all pass.

    The program is the last Markdown code block of an answer, or else all of it. The tests run after it, in its
    namespace and in order, each as one or more statements; tests that did not run in time have not passed.
    """
    tests = _tests(answer.row[reward.column or _TESTS])
    program = unfenced(answer.text)
    if not program.strip():
        return 0.0
    seconds, memory = reward.timeout_seconds or _TIMEOUT_SECONDS, reward.memory_mib or _MEMORY_MIB
    share = len(passed(program, tests, seconds, memory)) / len(tests)
    return 1.0 if share == 1 else share * (1.0 if reward.partial_credit is None else reward.partial_credit)


def passed(program: str, tests: Sequence[str], cpu_seconds: int, memory_mib: int) -> set[int]:
    """The numbers of the tests that pass, in a process of their own that ends with this call.

    Raises:
        PipelineError: this machine cannot filter system calls, so that the program would not be contained.
    """
    token = secrets.token_hex(16)
    request = {"token": token, "program": program, "tests": list(tests), "cpu_seconds": cpu_seconds,
             "memory_bytes": memory_mib << 20}  # fmt: skip
    with (
        tempfile.TemporaryFile() as question,
        tempfile.TemporaryFile() as result,
        tempfile.TemporaryDirectory() as here,
    ):
        question.write(json.dumps(request).encode())
        question.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", "-B", str(_SANDBOX)], stdin=question, stdout=result,
            stderr=subprocess.DEVNULL, cwd=here, env={"PYTHONHASHSEED": "0"}, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout=3 * cpu_seconds + _WAIT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        result.seek(0)
        lines = [line.split(" ", 1) for line in result.read().decode(errors="replace").splitlines()]
    reported = [line[1] for line in lines if len(line) == 2 and line[0] == token]
    refused = [each.removeprefix("refused ") for each in reported if each.startswith("refused ")]
    if refused:
        raise PipelineError(
            f"the reward function code cannot contain a program on this machine ({refused[0]}); Linux with seccomp on "
            "x86_64 or aarch64 is accepted; run the stage on such a machine, or remove the reward"
        )
    return {int(each) for each in reported if each.isdigit()} & set(range(len(tests)))


@cache
def require_sandbox() -> None:
    """Runs a program in the sandbox, before the first step (PipelineError: it cannot be contained, or does not run)."""
    if passed("answer = 6 * 7", ["assert answer == 42"], _TIMEOUT_SECONDS, _MEMORY_MIB) != {0}:
        raise PipelineError(
            f"the sandbox of the reward function code does not run on this machine ({sys.platform}, {sys.executable}); "
            "Linux with seccomp on x86_64 or aarch64 is accepted; run the stage on such a machine, or remove the reward"
        )


def _check_tests(reward: RewardFunction, row: Mapping[str, object]) -> None:
    _tests(row[reward.column or _TESTS])
    require_sandbox()


def _tests(value: object) -> list[str]:
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, list) or not tests or not all(isinstance(each, str) and each.strip() for each in tests):
        raise DataError(f"the tests are {value!r}; Python text, or a list of such texts, is accepted; correct the row")
    for test in tests:
        try:
            compile(test, "test", "exec")
        except (SyntaxError, ValueError) as error:
            raise DataError(f"the test {test!r} is not Python: {error}; correct the row") from error
    return tests


CODE: Mapping[str, BuiltIn] = {
    "code": BuiltIn(
        score=_code, options=SHARED | {"timeout_seconds", "memory_mib"}, check_row=_check_tests,
        columns=lambda reward: (reward.column or _TESTS,), starts_processes=True,
    )
}  # fmt: skip

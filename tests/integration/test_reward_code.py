"""The reward ``code``: programs run in a sandbox that lets them compute, and nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lineage.errors import DataError, PipelineError
from tasks.reward_functions import code
from tasks.reward_functions.code import passed
from tests.unit.tasks.reward_functions.test_texts import score

TESTS = ["assert double(2) == 4", "assert double(0) == 0", "import math\nassert double(math.pi) > 6"]
ALWAYS = ["assert True"]


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("def double(x): return 2 * x", 1), ("So:\n```python\ndef double(x):\n    return x + x\n```\nDone.", 1),
        ("def double(x): return x ** 2", 1), ("def double(x): return x + 2", 1 / 3), ("def double(x): pass", 0),
        ("", 0), ("def double(x:", 0), ("double = " + "(" * 90_000, 0), ("x = 1\n" * 20_000, 0),
        ("def double(x): raise SystemExit(0)", 0), ("print('passed')\nimport sys\nsys.exit(0)", 0),
        ("import os\nos._exit(0)", 0), ("import os\nos.write(1, b'\\ntoken 0\\n' * 10)", 0),
        ("import builtins\nc = compile\nbuiltins.compile = lambda *_: c('pass', 'test', 'exec')", 0),
        ("import builtins\nbuiltins.enumerate = lambda tests: ((index, 'pass') for index in range(3))", 0),
    ],
)  # fmt: skip
def test_the_share_of_tests_that_pass(completion, value):
    if "x ** 2" in completion:
        value = 1  # 2 ** 2 == 4, 0 ** 2 == 0 and pi ** 2 > 6: tests can be too weak
    assert score("code", completion, {"tests": TESTS}) == pytest.approx(value)
    if 0 < value < 1:
        assert score("code", completion, {"wanted": TESTS}, column="wanted", partial_credit=0.3) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.socket()", "import socket; socket.socketpair()", "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])", "import os; os.execv('/bin/true', ['true'])",
        "import threading; threading.Thread(target=print).start()", "import os; os.kill(os.getppid(), 0)",
        "open({file!r}, 'w')", "open({file!r}, 'a')", "open('new', 'x')", "import os; os.unlink({file!r})",
        "import os; os.rename({file!r}, 'b')", "import os; os.truncate({file!r}, 0)",
        "import os; os.chmod({file!r}, 0)",
        "import os; os.symlink('a', 'b')", "import os; os.mkdir('a')", "import os; os.setsid()",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9, 9))", "bytearray(1 << 30)",
        "import os; os.open({file!r}, os.O_RDONLY | os.O_CREAT)", "import ctypes; ctypes.string_at(0)",
    ],
)  # fmt: skip
def test_what_is_not_computing_is_refused(attempt, tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    assert passed(f"open({str(file)!r}).read()", ALWAYS, 2, 256) == {0}
    assert passed(attempt.format(file=str(file)), ALWAYS, 2, 256) == set()
    assert file.read_text() == "kept" and [each.name for each in tmp_path.iterdir()] == ["file"]


HUNT = """
import gc, os, sys
def found(frame):
    while frame:
        for line, _ in frame.f_locals.get("numbered", ()): os.write(1, line)
        frame = frame.f_back
def walk():
    found(me.gi_frame)
    yield
"""


@pytest.mark.parametrize(
    "attempt",
    [
        "found(sys._getframe())", "try: 1 / 0\nexcept Exception as error: found(error.__traceback__.tb_frame)",
        "me = walk()\nnext(me)", "sys.settrace(lambda frame, *_: found(frame))\n(lambda: 0)()",
        "for each in gc.get_objects():\n    if isinstance(each, tuple) and isinstance(each[:1], tuple):\n        "
        "[os.write(1, part) for part in each if isinstance(part, bytes) and part.endswith(b' 0\\n')]",
        "open('/proc/self/mem')", "os.open('/dev/fd/../mem', os.O_RDONLY)", "import ctypes",
    ],
)  # fmt: skip
def test_a_program_cannot_report_that_it_passes(attempt):
    assert passed(HUNT + attempt, ["assert False"], 2, 256) == set()
    refused = (
        "opened = True\ntry:\n    " + attempt.replace("\n", "\n    ") + "\nexcept (OSError, ValueError): opened = False"
    )
    if "found" not in attempt and "me" not in attempt[:2]:
        assert passed(HUNT + refused, ["assert not opened"], 2, 256) == {0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "endless", ["while True: pass", "import signal\nsignal.signal(24, lambda *_: 0)\nwhile True: pass",
                "import os\nwhile True: os.write(1, b'x' * 9999)", "import time; time.sleep(1000)"],
)  # fmt: skip
def test_a_program_that_does_not_end_is_killed(endless, monkeypatch):
    monkeypatch.setattr(code, "_WAIT", 0)
    start = time.monotonic()
    assert passed(endless, ALWAYS, 1, 256) == set()
    assert time.monotonic() - start < 30
    # Tests that passed before count.
    assert passed("", ["assert True", endless, "assert True"], 1, 256) >= {0} - {1}


def test_a_killed_program_scores_and_does_not_hang(monkeypatch):
    class Killed(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout:
                os.kill(self.pid, 9)
            return super().wait(timeout)

    monkeypatch.setattr(code.subprocess, "Popen", Killed)
    assert passed("", ALWAYS, 2, 256) == set()


def test_a_machine_that_does_not_filter_is_refused_before_the_first_step(monkeypatch, tmp_path):
    text = Path(code.__file__).with_name("sandbox.py").read_text()
    for old, new, found in (
        ('_MACHINES[platform.machine()]', '_MACHINES["a vax"]', "KeyError"),
        ("        _filter_calls()\n", "", "lets a socket through"),
        ("(_JUMP_SET, 1, 0, _WRITING)", "(_JUMP_SET, 0, 0, _WRITING)", "lets a file for writing through"),
    ):  # fmt: skip
        assert old in text
        sandbox = tmp_path / "sandbox.py"
        sandbox.write_text(text.replace(old, new))
        monkeypatch.setattr(code, "_SANDBOX", sandbox)
        code.require_sandbox.cache_clear()
        with pytest.raises(PipelineError, match=f"cannot contain a program on this machine .*{found}"):
            score("code", "", {"tests": ALWAYS})
    monkeypatch.setattr(code, "_SANDBOX", tmp_path / "none.py")
    with pytest.raises(PipelineError, match=f"does not run on this machine .*{sys.executable}"):
        score("code", "", {"tests": ALWAYS})
    code.require_sandbox.cache_clear()


@pytest.mark.parametrize("tests", [None, [], [1], "", ["assert"], [" "]])
def test_a_column_without_tests_is_refused(tests):
    with pytest.raises(DataError, match=r"rewards.code: row 0 of the prompts: the test"):
        score("code", "", {"tests": tests})

"""A chat template is a program: what it may use of the process that renders it."""

import resource
import signal
import subprocess
import sys

import pytest

from lineage.errors import ConfigError
from tasks.data.tokens import template as limits
from tasks.data.tokens.rendering import Template
from tasks.model.chat_template import CHATML

SAID = [{"role": "user", "content": "q"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'a' * 200000000 }}"


def template(text: str) -> Template:
    return Template(plain=text, with_tools=text, special_tokens={}, name="/models/evil")


@pytest.fixture
def hasty(monkeypatch):
    """Limits that a test reaches at once, and a watch that begins with them."""
    for name, value in (("SECONDS", 0.1), ("_POLL_SECONDS", 0.01), ("_watches", [])):
        monkeypatch.setattr(limits, name, value)


def test_loops_without_end_are_stopped_in_the_models_name(hasty):
    with pytest.raises(ConfigError, match=r"the chat template of /models/evil takes more than .* s of CPU time.*row r"):
        template(ENDLESS).render([SAID], None, "r")


def test_a_huge_text_is_refused_and_memory_is_free_again(monkeypatch):
    monkeypatch.setattr(limits, "MEMORY_BYTES", 2**26)
    for text in (HUGE, "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"):
        with pytest.raises(ConfigError, match=r"the chat template of /models/evil takes more than 64 MiB"):
            template(text).render([SAID], None, "r")
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits._LIMITS
    assert template(CHATML).render([SAID], None, "r")


def test_the_limits_hold_on_the_rows_themselves(hasty):
    """Not only on what a template is tried on."""
    sly = template("{% if messages | length > 1 %}" + ENDLESS + "{% endif %}{{ messages[0]['content'] }}")
    assert sly.render([SAID], None, "r") == ["q"]
    with pytest.raises(ConfigError, match="CPU time"):
        sly.render([SAID * 2], None, "r")


def test_an_operation_that_cannot_be_interrupted_ends_its_process():
    code = "from tasks.data.tokens import template as r; r._PROCESS_SECONDS = 0.05\nwith r.Limited(): 9 ** (10**9)"
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGVTALRM


def test_what_was_stopped_once_is_not_tried_again(hasty, monkeypatch):
    evil = template(ENDLESS + "again")
    with pytest.raises(ConfigError):
        evil.render([SAID], None, "r")
    monkeypatch.setattr(Template, "_texts", None)
    with pytest.raises(ConfigError, match="takes more than"):
        evil.render([SAID], None, "s")


def test_after_a_limit_the_process_runs_as_before():
    """With an error that stays announced, a call under a trace function, as of a debugger, would never end."""
    code = (
        "import sys\nfrom tasks.data.tokens import template as r\nr.SECONDS, r._POLL_SECONDS = 0.1, 0.01\n"
        "try:\n    with r.Limited():\n        while True: pass\nexcept r.OverTimeError: print('stopped')\n"
        "def call(): return 'called'\nsys.settrace(lambda *_: None)\nprint(call())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["stopped", "called"]

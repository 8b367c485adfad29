"""A template that leaves out something that rows say is refused, and one that says it in its own way is not."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lineage.errors import ConfigError
from tasks.chat_template import CHATML, HERMES
from tasks.data.tokens.rendering import Renderer
from tasks.data.tokens.template import Tools
from tests import tiny
from tests.libraries.tasks.data.tokens.test_rendering import (
    CALL,
    FORGETTING,
    OWN_SYSTEM,
    PLAIN_WORDS,
    STRIPPING,
    WEATHER,
    WITH_TOOLS,
)

SYSTEM = {"role": "system", "content": " be short "}
TURN = [{"role": "user", "content": "sum?"}, {"role": "assistant", "content": " adds"}]
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
NUMBERS = {"type": "function", "function": {"name": "get_weather", "arguments": {"days": [3], "wet": True}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def called(content: str, *calls: dict[str, object]) -> list[dict[str, object]]:
    return [TURN[0], {"role": "assistant", "content": content, "tool_calls": list(calls)}]


def hermes_without(part: str, instead: str = "") -> str:
    assert part in HERMES
    return HERMES.replace(part, instead)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "lost"),
    [
        ("{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + CHATML, [SYSTEM, *TURN],
         None, "what the system message says"),
        ("{% for m in messages %}{% if m['role'] != 'user' or loop.first %}"
         "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}", [*TURN, *TURN], None,
         "what the user says"),
        (hermes_without("+ '\\n' + message['content'] }}",
                        "+ '\\n' + ('' if message['tool_calls'] else message['content']) }}"),
         called("I ask", CALL), [WEATHER], "what the assistant says beside a call"),
        (hermes_without("call['function']['arguments'] | tojson", "'{}'"), called("", CALL), [WEATHER],
         "an argument of the call of get_weather"),
        (hermes_without("call['function']['arguments'] | tojson", "'{}'"), called("", NUMBERS), [WEATHER],
         "an argument of the call of get_weather"),
        (hermes_without("message['tool_calls'] or []", "(message['tool_calls'] or [])[:1]"), called("", CALL, CALL),
         [WEATHER], "the call of get_weather"),
        (hermes_without("for tool in tools", "for tool in tools[:1]"), TURN, [WEATHER, TIME], "the tool get_time"),
        (hermes_without("+ message['content'] + '\\n</tool_response>'", "+ '</tool_response>'"), WITH_TOOLS, [WEATHER],
         "what a tool answers"),
    ],
    ids=["system", "later user", "beside a call", "argument", "number", "second call", "second tool", "result"],
)  # fmt: skip
def test_what_is_lost_is_named(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, object]], tools: Tools | None, lost: str
) -> None:
    Renderer.of(with_template(tokenizer, HERMES)).turns(messages, tools, "a")
    with pytest.raises(ConfigError, match=f"leaves out {lost} on row a; .*chat_template=(chatml|hermes)"):
        Renderer.of(with_template(tokenizer, template)).turns(messages, tools, "a")


@pytest.mark.parametrize("template", [CHATML, HERMES, STRIPPING, OWN_SYSTEM, PLAIN_WORDS, FORGETTING])
def test_blanks_and_thoughts_may_go(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    (turns,) = Renderer.of(with_template(tokenizer, template)).turns([SYSTEM, *TURN, *TURN], None, "a")
    assert len(turns.spans) == 2


def test_a_form_is_looked_at_once(tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = Renderer.of(with_template(tokenizer, hermes_without("for tool in tools", "for tool in tools[:1]")))
    renderer.turns(TURN, [WEATHER], "one tool")
    with pytest.raises(ConfigError, match="the tool get_time on row two"):
        renderer.turns(TURN, [WEATHER, TIME], "two")


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = template
    return tokenizer

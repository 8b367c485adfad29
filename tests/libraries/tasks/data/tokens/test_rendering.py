"""Borders of turns: proven from the template, learned once per form; nothing that a row says is left out."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lineage.errors import ConfigError, DataError
from tasks.data.kinds import IGNORED
from tasks.data.tokens.rendering import DATE, Renderer
from tasks.data.tokens.template import Tools
from tasks.model.chat_template import CHATML, HERMES
from tests import tiny
from tests.libraries.tasks.data.tokens.tokens import token_rows


def plain_labels(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, object]],
    tools: list[dict[str, object]] | None = None,
) -> tuple[list[int], list[int]]:
    """Tokens and labels; a token belongs to a turn if it is not among those of the text before the turn.

    The blanks that some templates write behind the token that ends a turn are not of the turn.
    """

    def text(count: int, *, prompt: bool = False) -> str:
        part = list(messages[:count])
        return str(tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt))

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def shared(first: list[int], second: list[int]) -> int:
        pairs = zip(first, second, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))

    whole = text(len(messages)).rstrip()
    ids = tokens(whole)
    labels = [IGNORED] * len(ids)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before, upto = text(place, prompt=True), text(place + 1).rstrip()
            assert whole.startswith(upto) and upto.startswith(before)
            start, end = (shared(tokens(part), ids) for part in (before, upto))
            labels[start:end] = ids[start:end]
    return ids, labels


# As Llama 3 has it: contents are stripped, the first turn has what begins every text.
STRIPPING = (
    "{% for message in messages %}"
    "{% set content = '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set content = '<|endoftext|>' + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
# As Qwen 2.5 has it: a system turn of its own, and a newline after the end of each turn.
OWN_SYSTEM = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nhelp<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen 3 has it: thoughts are kept in the last turn alone.
FORGETTING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN_WORDS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {
    "chatml": CHATML, "hermes": HERMES, "stripping": STRIPPING, "own system": OWN_SYSTEM, "plain words": PLAIN_WORDS,
}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
WITH_TOOLS = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "rain", "tool_call_id": "1"},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "both"},
]

contents = st.text(st.sampled_from("ab \n\té€😀.:'ß1") | st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, object]]:
    turns = draw(st.lists(st.tuples(contents, contents), min_size=1, max_size=3))
    system = [{"role": "system", "content": draw(contents)}] if draw(st.booleans()) else []
    return [
        *system,
        *(
            {"role": role, "content": output}
            for turn in turns
            for role, output in zip(("user", "assistant"), turn, strict=True)
        ),
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = template
    return tokenizer


def stored(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """As a file of prepared rows holds them."""
    return [
        {**each, "tool_calls": json.dumps(each["tool_calls"])} if "tool_calls" in each else each for each in messages
    ]


@pytest.mark.parametrize("template", ["chatml", "hermes", "own system"])
@given(messages=conversations())
def test_labels_are_those_of_the_plainest_way(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, object]]
) -> None:
    (row,) = token_rows([{"row_id": "a", "messages": messages}], with_template(tokenizer, TEMPLATES[template]))
    ids, labels = plain_labels(tokenizer, messages)
    assert row.columns == {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("template", TEMPLATES)
@given(rows=st.lists(conversations(), min_size=2, max_size=4))
def test_a_learned_form_gives_the_borders_that_each_row_would_prove(
    tokenizer: PreTrainedTokenizerBase, template: str, rows: list[list[dict[str, object]]]
) -> None:
    learning = Renderer.of(with_template(tokenizer, TEMPLATES[template]))
    for messages in rows:
        assert learning.turns(messages, None, "a") == Renderer.of(tokenizer).turns(messages, None, "a")


@pytest.mark.parametrize("template", TEMPLATES)
@given(messages=conversations())
def test_a_token_is_trained_if_it_ends_within_a_turn(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, object]]
) -> None:
    (row,) = token_rows([{"row_id": "a", "messages": messages}], with_template(tokenizer, TEMPLATES[template]))
    (turns,) = Renderer.of(tokenizer).turns(messages, None, "a")
    plain = tokenizer(turns.text, add_special_tokens=False, return_offsets_mapping=True)
    within = [any(start < end <= stop for start, stop in turns.spans) for _, end in plain["offset_mapping"]]
    assert row.columns["input_ids"] == plain["input_ids"]
    assert [label != IGNORED for label in row.columns["labels"]] == within


def test_turns_that_a_template_rewrites_when_others_follow_are_texts_of_their_own(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    renderer = Renderer.of(with_template(tokenizer, FORGETTING))
    turn = [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "adds"}]
    thought = [turn[0], {"role": "assistant", "content": "hm</think>adds"}]
    assert len(renderer.turns([*turn, *turn], None, "plain")) == 1
    assert len(renderer.turns([*turn, *thought], None, "last")) == 1
    first, second = renderer.turns([*thought, *turn], None, "first")
    question = "<|im_start|>user\nsum<|im_end|>"
    assert first.text == f"{question}<|im_start|>assistant\nhm</think>adds<|im_end|>"
    assert second.text == f"{question}<|im_start|>assistant\nadds<|im_end|>" * 2
    assert [part.text[slice(*part.spans[0])] for part in (first, second)] == [
        "hm</think>adds<|im_end|>",
        "adds<|im_end|>",
    ]
    assert [len(part.spans) for part in (first, second)] == [1, 1]


def test_answers_behind_another_text_than_their_prompt_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    other = CHATML.replace("'\\n<|im_start|>assistant\\n' }}", "'\\nassistant:' }}")
    assert other != CHATML
    with pytest.raises(
        ConfigError, match=r"after the prompt that it generates them from: on row c0 .*correct the templat"
    ):
        token_rows(tiny.conversation_rows(1), with_template(tokenizer, other))
    # As Mistral's of version 3: the system's words stand in prompts alone.
    prompts_alone = "{% set said = messages[0].content + ' ' if messages[0].role == 'system' else '' %}" + (
        "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + (said if loop.last and m.role == 'user' "
        "else '') + m.content + '<|im_end|>' }}{% endfor %}"
    )
    system, *turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    renderer = Renderer.of(with_template(tokenizer, prompts_alone))
    assert renderer.turns(turns, None, "a")
    with pytest.raises(ConfigError, match="put what the system says into the user's turn, correct the template"):
        renderer.turns([system, *turns], None, "a")


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ messages[0].meta.name }}", "UndefinedError"),
    ],
)
def test_a_template_that_fails_is_not_the_rows_fault(
    tokenizer: PreTrainedTokenizerBase, template: str, fault: str
) -> None:
    with pytest.raises(ConfigError, match=f"chat template fails on row c0: {fault}: .*correct the template"):
        token_rows(tiny.conversation_rows(1), with_template(tokenizer, template))


def test_several_templates_and_none_for_all_are_refused_where_one_is_needed(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path))
    tokenizer.chat_template = {"tool_use": HERMES, "rag": CHATML}
    with pytest.raises(ConfigError, match=r"several chat templates.*\['rag', 'tool_use'\].*name it default"):
        token_rows(tiny.conversation_rows(1), tokenizer)
    assert token_rows(tiny.text_rows(1), tokenizer)


def test_the_date_of_a_template_is_the_same_on_every_day(tokenizer: PreTrainedTokenizerBase) -> None:
    # As Llama 3 has it.
    dated = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ '<|im_start|>Today Date: ' + date_string + '\n' }}" + CHATML
    )
    turn = tiny.conversation_rows(1)[0]["messages"]
    (turns,) = Renderer.of(with_template(tokenizer, dated)).turns(turn, None, "a")
    assert turns.text.startswith(f"<|im_start|>Today Date: {DATE}\n")
    # As gpt-oss has it.
    (turns,) = Renderer.of(with_template(tokenizer, "{{ strftime_now('%Y-%m-%d') }}" + CHATML)).turns(turn, None, "a")
    assert turns.text.startswith("2024-07-26<|im_start|>")
    with pytest.raises(ConfigError, match=r"writes today's date .*names the form of the date"):
        Renderer.of(with_template(tokenizer, "{{ strftime_now(form) }}" + CHATML))


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "sum"}], []])
def test_a_row_in_which_the_assistant_says_nothing_is_refused(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, object]]
) -> None:
    with_template(tokenizer, CHATML)
    with pytest.raises(DataError, match=r"row a: the assistant says nothing in its messages; .*add the answer"):
        token_rows([{"row_id": "a", "messages": messages}], tokenizer)
    answered = [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "adds"}]
    pair = {"row_id": "a", "prompt": [*answered, answered[0]], "chosen": answered[1:], "rejected": messages}
    with pytest.raises(DataError, match="row a: the assistant says nothing in its rejected; "):
        token_rows([pair], tokenizer)


def test_an_answer_to_nothing_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "assistant", "content": "adds"}, {"role": "user", "content": "sum"}]
    with pytest.raises(DataError, match="row a: its first message is of the assistant"):
        token_rows([{"row_id": "a", "messages": messages}], with_template(tokenizer, CHATML))


def test_hermes_renders_tools_calls_and_results(tokenizer: PreTrainedTokenizerBase) -> None:
    with_template(tokenizer, HERMES)
    row = {"row_id": "a", "messages": stored(WITH_TOOLS), "tools": json.dumps([WEATHER])}
    (tokens,) = token_rows([row], tokenizer)
    assert (tokens.columns["input_ids"], tokens.columns["labels"]) == plain_labels(tokenizer, WITH_TOOLS, [WEATHER])
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    trained = [label for label in tokens.columns["labels"] if label != IGNORED]
    assert tokenizer.decode(trained) == f"{call}\n{call}<|im_end|>both<|im_end|>"
    text = tokenizer.decode(tokens.columns["input_ids"])
    assert text.startswith("<|im_start|>system\nbe short\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    responses = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert f"<|im_end|>\n<|im_start|>user\n{responses}<|im_end|>\n<|im_start|>assistant\nboth" in text


def test_without_tools_hermes_is_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    for messages in (WITH_TOOLS[:2], WITH_TOOLS[1:2]):
        texts = [Renderer.of(with_template(tokenizer, each)).text(messages, prompt=True) for each in (CHATML, HERMES)]
        assert texts[0] == texts[1]


SYSTEM = {"role": "system", "content": " be short "}
TURN = [{"role": "user", "content": "sum?"}, {"role": "assistant", "content": " adds"}]
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
NUMBERS = {"type": "function", "function": {"name": "get_weather", "arguments": {"days": [3], "wet": True}}}


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


def test_the_template_with_tools_is_taken_for_rows_with_tools(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path))
    tokenizer.chat_template = {"default": CHATML, "tool_use": HERMES}
    renderer = Renderer.of(tokenizer)
    assert "<tools>" in renderer.turns(WITH_TOOLS, [WEATHER], "a")[0].text
    assert renderer.turns(tiny.conversation_rows(1)[0]["messages"], None, "a") == Renderer.of(
        with_template(tokenizer, CHATML)
    ).turns(tiny.conversation_rows(1)[0]["messages"], None, "a")


def test_a_form_is_looked_at_once(tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = Renderer.of(with_template(tokenizer, hermes_without("for tool in tools", "for tool in tools[:1]")))
    renderer.turns(TURN, [WEATHER], "one tool")
    with pytest.raises(ConfigError, match="the tool get_time on row two"):
        renderer.turns(TURN, [WEATHER, TIME], "two")

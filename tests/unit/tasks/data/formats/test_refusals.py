"""What every format refuses, in the words that users read."""

import pickle

import pytest

from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.known import BY_NAME
from tasks.data.formats.row_checks import check_group

Row = dict[str, object]
Q: Row = {"role": "user", "content": "q"}
A: Row = {"role": "assistant", "content": "a"}
S: Row = {"role": "system", "content": "s"}
CALLING: Row = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
TWO_CALLS: Row = {"role": "assistant", "tool_calls": [{"id": each, "name": "f", "arguments": {}} for each in "xy"]}
RESULT: Row = {"role": "tool", "content": "r"}


def call(**function: object) -> Row:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}


def human(value: object) -> Row:
    return {"from": "human", "value": value}


def gpt(value: object) -> Row:
    return {"from": "gpt", "value": value}


RAW = '{"text": "..."}'
CHAT = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
COMPLETION = '{"prompt": "...", "completion": "..."}, each a string or a list of messages'
ALPACA = '{"instruction": "...", "input": "...", "output": "..."}'
HISTORY = '[["question", "answer"], ...]'
SHAREGPT = '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'
REASONING = '{"problem": "...", "thinking": "...", "solution": "..."}'
XLAM = '{"query": "...", "tools": [{"name": ...}], "answers": [{"name": ..., "arguments": {...}}]}'
PAIR = '{"prompt": "...", "chosen": "...", "rejected": "..."}, each a string or a list of messages'
IMPLICIT = '{"chosen": "...", "rejected": "..."}, both strings or both lists of messages, that begin alike'
HH = "\n\nHuman: q\n\nAssistant: "
TRANSCRIPTS = (
    r'{"chosen": "\n\nHuman: ...\n\nAssistant: ...", "rejected": "\n\nHuman: ...\n\nAssistant: ..."} with one '
    "beginning and two last answers"
)
RANKING = (
    '{"conversations": [{"from": "human", "value": "..."}], "chosen": {"from": "gpt", "value": "..."}, '
    '"rejected": {"from": "gpt", "value": "..."}}'
)
OPENAI = (
    '{"input": {"messages": [...]}, "preferred_output": [{"role": "assistant", "content": "..."}], '
    '"non_preferred_output": [{"role": "assistant", "content": "..."}]}'
)
OUMI = (
    '{"messages": [{"role": "user", "content": "..."}], "chosen": {"messages": [{"role": "assistant", '
    '"content": "..."}]}, "rejected": {"messages": [{"role": "assistant", "content": "..."}]}}'
)
UNPAIRED = '{"prompt": "...", "completion": "...", "label": true}, the texts strings or lists of messages'
JUDGED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "label": true}'
PROMPTS = '{"prompt": "..."}, a string or a list of messages'
TOOLS = 'a list of {"type": "function", "function": {"name": ..., "parameters": ...}}, or that as JSON text'
CALLS = 'a list of {"name": ..., "arguments": {...}}, bare or as "function" of {"type": "function"}'
ROLES = (
    "system, user, assistant, tool, developer, function, human, prompter, gpt, chatgpt, bing, bard, model, ai, bot, "
    "observation, function_response, function_call"
)
RENAME = "add {0!r} or rename the field that holds it"
STRING, FILL, LIST, ORDER = (
    "write a string",
    "fill it or remove the row",
    "write a list of messages",
    "put the turns in order or remove the row",
)
CASES: dict[str, list[tuple[Row, str, str, str, str]]] = {  # row, found, accepted, mend, reason
    "text": [
        ({"body": "a", "id": 1}, "no field 'text' (fields: body, id)", RAW, RENAME.format("text"), "missing field"),
        ({"text": None}, "text is null", RAW, STRING, "no text"),
        ({"text": ["a"]}, "text is a list", RAW, STRING, "not text"),
        ({"text": " \n"}, "text is empty", RAW, FILL, "no text"),
        ({"text": 7}, "text is the number 7", RAW, STRING, "not text"),
        (
            {"text": "ab\ud83d"}, "text has half a surrogate pair at character 2", "text", "write the whole character",
            "half a surrogate pair",
        ),
        ({}, "no field 'text' (fields: none)", RAW, RENAME.format("text"), "missing field"),
    ],
    "messages": [
        ({"text": "a"}, "no field 'messages' (fields: text)", CHAT, RENAME.format("messages"), "missing field"),
        ({"messages": []}, "messages is empty", CHAT, LIST, "no answer"),
        ({"messages": None}, "messages is null", CHAT, LIST, "no answer"),
        ({"messages": "a"}, "messages is the text 'a'", CHAT, LIST, "no messages"),
        (
            {"messages": ["a"]}, "messages[0] is the text 'a'", CHAT, 'write {"role": ..., "content": ...}',
            "not of the format",
        ),
        (
            {"messages": [{"from": "user", "content": "q"}]}, "messages[0] has no 'role' (it has: content, from)", CHAT,
            "add 'role'", "unknown role",
        ),
        (
            {"messages": [Q, {"role": "critic", "content": "a"}]}, "messages[1] has the role 'critic'", ROLES,
            "rename the role or remove the row", "unknown role",
        ),
        (
            {"messages": [{"role": None, "content": "a"}]}, "messages[0] has the role null", ROLES,
            "rename the role or remove the row", "unknown role",
        ),
        (
            {"messages": [Q, {"role": "assistant"}]}, "messages[1] has no 'content' (it has: role)", CHAT,
            "add 'content'", "no answer",
        ),
        ({"messages": [Q, {**A, "content": " "}]}, "messages[1] content is empty", CHAT, FILL, "no answer"),
        ({"messages": [Q, {**A, "content": "\u200b"}]}, "messages[1] content is empty", CHAT, FILL, "no answer"),
        ({"messages": [Q, {**A, "content": "\ufeff \u200b"}]}, "messages[1] content is empty", CHAT, FILL, "no answer"),
        ({"messages": [Q, {**A, "content": None}]}, "messages[1] content is null", CHAT, STRING, "no answer"),
        (
            {"messages": [Q, {**A, "content": True}]}, "messages[1] content is the boolean true", CHAT, STRING,
            "not text",
        ),
        ({"messages": [{**Q, "content": ""}, A]}, "messages[0] content is empty", CHAT, FILL, "empty prompt"),
        (
            {"messages": [{**Q, "content": "\ud83d"}, A]},
            "messages[0] content has half a surrogate pair at character 0", "text", "write the whole character",
            "half a surrogate pair",
        ),
        (
            {"messages": [Q]}, "messages has no assistant turn", CHAT,
            "add the answer to learn from, or remove the row", "no answer",
        ),
        (
            {"messages": [Q, {**A, "reasoning_content": "t"}]}, "messages[1] has reasoning_content",
            "a role, a content, tool calls and names alone", "remove it or the row", "unknown field",
        ),
        (
            {"messages": [Q, {**A, "weight": 0}]}, "messages[1] has weight",
            "a role, a content, tool calls and names alone", "remove it or the row", "unknown field",
        ),
        (
            {"messages": [{**Q, "tool_calls": [1]}, A]}, "messages[0] has tool_calls",
            "a role, a content, tool calls and names alone", "remove it or the row", "unknown field",
        ),
        ({"messages": [{**Q, "name": 3}, A]}, "messages[0] name is the number 3", "a string", STRING, "not text"),
        (
            {"messages": [A]}, "messages[0] has the role 'assistant' at the beginning", "system or user there", ORDER,
            "wrong role order",
        ),
        (
            {"messages": [Q, Q, A]}, "messages[1] has the role 'user' after 'user'", "assistant there", ORDER,
            "wrong role order",
        ),
        (
            {"messages": [Q, A, A]}, "messages[2] has the role 'assistant' after 'assistant'", "user there", ORDER,
            "wrong role order",
        ),
        (
            {"messages": [Q, A, S]}, "messages[2] has the role 'system' after 'assistant'", "user there", ORDER,
            "wrong role order",
        ),
        (
            {"messages": [S, S, Q, A]}, "messages[1] has the role 'system' after 'system'", "user there", ORDER,
            "wrong role order",
        ),
        (
            {"messages": [Q, RESULT, A]}, "messages[1] has the role 'tool' after 'user'", "assistant there", ORDER,
            "wrong role order",
        ),
        (
            {"messages": [S, A]}, "messages[1] has the role 'assistant' after 'system'", "user there", ORDER,
            "wrong role order",
        ),
        (
            {"messages": [Q, CALLING, Q, A]}, "messages[2] has the role 'user' after a tool call that no tool answered",
            "tool there", "add the tool's answer or remove the row", "unclosed tool call",
        ),
        (
            {"messages": [Q, CALLING, A]},
            "messages[2] has the role 'assistant' after a tool call that no tool answered", "tool there",
            "add the tool's answer or remove the row", "unclosed tool call",
        ),
        (
            {"messages": [Q, {**A, "content": "<tool_call>{}"}]},
            "messages[1] content has <tool_call> without </tool_call>", "calls that begin and end",
            "close the call or remove the row", "unclosed tool call",
        ),
        (
            {"messages": [Q, call(arguments="[1")]},
            "messages[1] tool_calls[0] arguments is not JSON: Expecting ',' delimiter: line 1 column 3 (char 2)",
            "JSON", "mend or remove the row", "unclosed tool call",
        ),
        (
            {"messages": [Q, call(arguments="[1]")]}, "messages[1] tool_calls[0] arguments is a list",
            'an object, such as {"city": "Paris"}', "name each argument", "tool call that cannot be read",
        ),
        (
            {"messages": [Q, TWO_CALLS, {**RESULT, "tool_call_id": "x"}, A]},
            "messages[1] calls 'y', which no tool answered", "a tool turn for each call",
            "add the tool's answer or remove the row", "unclosed tool call",
        ),
        (
            {"messages": [Q, call(parameters={"a": 1})]}, "messages[1] tool_calls[0] has parameters", CALLS,
            "rename or remove it", "unknown field",
        ),
        (
            {"messages": [Q, A], "tools": [{"function": {"name": "f"}, "parameters": {"a": 1}}]},
            "tools[0] has parameters", TOOLS, "rename or remove it", "unknown field",
        ),
        (
            {"messages": [Q, CALLING, {"role": "tool", "content": None}]}, "messages[2] content is null", CHAT, STRING,
            "no tool result",
        ),
        (
            {"messages": [Q, call(arguments=3)]}, "messages[1] tool_calls[0] arguments is the number 3",
            'an object, such as {"city": "Paris"}', "name each argument", "tool call that cannot be read",
        ),
        (
            {'messages': [Q, call(arguments='{"a": NaN}')]},
            "messages[1] tool_calls[0] arguments is not JSON: NaN is no number of JSON", "JSON",
            "mend or remove the row", "unclosed tool call",
        ),
        (
            {"messages": [Q, {"role": "assistant", "tool_calls": [{"type": "web"}]}]},
            "messages[1] tool_calls[0] type is the text 'web'", CALLS, "only functions are read",
            "tool call that cannot be read",
        ),
        (
            {"messages": [Q, {"role": "assistant", "tool_calls": [3]}]}, "messages[1] tool_calls[0] is the number 3",
            CALLS, "write an object", "tool call that cannot be read",
        ),
        (
            {"messages": [Q, {"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}]},
            "messages[1] tool_calls[0] id is the number 1", "a string", STRING, "tool call that cannot be read",
        ),
        (
            {"messages": [Q, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[1] tool_calls[0] names no function", CALLS, "name it", "tool call that cannot be read",
        ),
        (
            {"messages": [Q, CALLING, {"role": "tool", "content": {"a": 1}}]}, "messages[2] content is an object", CHAT,
            STRING, "not text",
        ),
        (
            {"messages": [Q, A], "tools": "{"},
            "tools is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)", "JSON",
            "mend or remove the row", "tools that cannot be read",
        ),
        ({"messages": [Q, A], "tools": 3}, "tools is the number 3", TOOLS, "write a list", "tools that cannot be read"),
        (
            {"messages": [Q, A], "tools": [{"description": "d"}]}, "tools[0] names no function", TOOLS, "name it",
            "tools that cannot be read",
        ),
        (
            {"messages": [Q, A], "tools": ["f"]}, "tools[0] is the text 'f'", TOOLS, "write an object",
            "tools that cannot be read",
        ),
        (
            {"messages": [{**Q, "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, A]},
            "messages[0] content[0] is of type 'image_url'", "text: images, audio and video are not read",
            "remove the row, or train it elsewhere", "images are not read",
        ),
        (
            {"messages": [{**Q, "content": [{"type": "odd"}]}, A]}, "messages[0] content[0] is of type 'odd'",
            'a string, or a list of {"type": "text", "text": "..."}', "write text", "not text",
        ),
        (
            {"messages": [{**Q, "content": [3]}, A]}, "messages[0] content[0] is the number 3",
            'a string, or a list of {"type": "text", "text": "..."}', "write text", "not text",
        ),
        (
            {"messages": [{**Q, "content": [{"type": "text", "text": None}]}, A]},
            "messages[0] content[0] is without text", 'a string, or a list of {"type": "text", "text": "..."}',
            "write text", "not text",
        ),
    ],
    "prompt_completion": [
        (
            {"prompt": "q"}, "no field 'completion' (fields: prompt)", COMPLETION, RENAME.format("completion"),
            "no answer",
        ),
        ({"prompt": "q", "completion": ""}, "completion is empty", COMPLETION, FILL, "no answer"),
        ({"prompt": " ", "completion": "a"}, "prompt is empty", COMPLETION, FILL, "empty prompt"),
        (
            {"prompt": "q", "completion": "a", "response": "b"}, "completion and response are both there", COMPLETION,
            "rename or remove one", "not of the format",
        ),
        (
            {"prompt": [Q, A], "completion": "a"}, "prompt ends with the role 'assistant'",
            "a prompt that ends with a user message", "end it where the assistant is to answer", "wrong role order",
        ),
        ({"prompt": "q", "completion": 42}, "completion is the number 42", COMPLETION, STRING, "not text"),
    ],
    "alpaca": [
        ({"instruction": "q", "output": 42}, "output is the number 42", ALPACA, STRING, "not text"),
        (
            {"instruction": "q", "input": ""}, "no field 'output' (fields: input, instruction)", ALPACA,
            RENAME.format("output"), "no answer",
        ),
        ({"instruction": "q", "output": None}, "output is null", ALPACA, STRING, "no answer"),
        ({"instruction": "", "input": "", "output": "a"}, "instruction is empty", ALPACA, FILL, "empty prompt"),
        ({"instruction": "q", "input": 1, "output": "a"}, "input is the number 1", ALPACA, STRING, "not text"),
        (
            {"instruction": "q", "output": "a", "history": [["q"]]}, "history[0] is a list of 1", HISTORY,
            "write a question and its answer", "not of the format",
        ),
        (
            {"instruction": "q", "output": "a", "history": "h"}, "history is the text 'h'", HISTORY,
            "write a list of pairs", "not of the format",
        ),
        (
            {"instruction": "q", "output": "a", "history": [["q", None]]}, "history[0][1] is null", HISTORY, STRING,
            "no answer",
        ),
        ({"instruction": "q", "output": "a", "system": 1}, "system is the number 1", ALPACA, STRING, "not text"),
    ],
    "sharegpt": [
        (
            {"conversations": [human("q"), {"from": "narrator", "value": "a"}]},
            "conversations[1] has the role 'narrator'",
            ROLES,
            "rename the role or remove the row", "unknown role",
        ),
        ({"conversations": [human("q"), gpt(None)]}, "conversations[1] value is null", SHAREGPT, STRING, "no answer"),
        (
            {"conversations": [gpt("a"), human("q")]}, "conversations[0] has the role 'assistant' at the beginning",
            "system or user there", ORDER, "wrong role order",
        ),
        (
            {"conversations": [human("q"), {"from": "function_call", "value": "f()"}]},
            "conversations[1] value is not JSON: Expecting value: line 1 column 1 (char 0)", "JSON",
            "mend or remove the row", "unclosed tool call",
        ),
        (
            {'conversations': [human('q'), {'from': 'function_call', 'value': '{"arguments": {}}'}]},
            "conversations[1] value[0] names no function", CALLS, "name it", "tool call that cannot be read",
        ),
        (
            {'conversations': [human('q'), {'from': 'function_call', 'value': '{"name":"f"}'}, gpt('a')]},
            "conversations[2] has the role 'assistant' after a tool call that no tool answered", "tool there",
            "add the tool's answer or remove the row", "unclosed tool call",
        ),
        (
            {"conversations": [{"from": "system", "value": "s"}, human("q"), gpt("a")], "system": "t"},
            "conversations[1] has the role 'system' after 'system'", "user there", ORDER, "wrong role order",
        ),
        (
            {"conversations": [human("q"), "a"]}, "conversations[1] is the text 'a'", SHAREGPT,
            'write {"from": ..., "value": ...}', "not of the format",
        ),
    ],
    "reasoning": [
        ({"problem": "q", "thinking": " ", "solution": "a"}, "thinking is empty", REASONING, FILL, "no thinking"),
        (
            {"problem": "q", "thinking": "t"}, "no field 'solution' (fields: problem, thinking)", REASONING,
            RENAME.format("solution"), "no answer",
        ),
        (
            {"problem": "q", "thinking": "<think>t</think>", "solution": "a"},
            "the thinking or the solution has a <think> of its own", "plain text", "take the marks off",
            "not of the format",
        ),
    ],
    "function_calling": [
        (
            {"query": "q", "tools": "[]", "answers": "[]"}, "answers is empty", CALLS, "add the call or remove the row",
            "no answer",
        ),
        ({"query": "q", "answers": "[]"}, "answers is empty", CALLS, "add the call or remove the row", "no answer"),
        (
            {"query": "q", "tools": "[]", "answers": "["},
            "answers is not JSON: Expecting value: line 1 column 2 (char 1)", "JSON", "mend or remove the row",
            "unclosed tool call",
        ),
    ],
    "preference": [
        (
            {"prompt": "q", "chosen": "a"}, "no field 'rejected' (fields: chosen, prompt)", PAIR,
            RENAME.format("rejected"), "no answer",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same", PAIR,
            "there is nothing to prefer: remove the row", "nothing to prefer",
        ),
        (
            {"prompt": "q", "chosen": [Q, A], "rejected": "b"}, "chosen has messages of user, assistant",
            "one assistant message", "move what precedes it to prompt", "wrong role order",
        ),
        (
            {"prompt": [Q, A], "chosen": "a", "rejected": "b"}, "prompt ends with the role 'assistant'",
            "a prompt that ends with a user message", "end it where the assistant is to answer", "wrong role order",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "kind": 3}, "kind is the number 3", "a string or null",
            "it names what is wrong with the rejected answer", "not text",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "kind": "\ud83d"},
            "kind has half a surrogate pair at character 0", "text", "write the whole character",
            "half a surrogate pair",
        ),
        ({"prompt": "q", "chosen": [], "rejected": "b"}, "chosen is empty", PAIR, LIST, "no answer"),
        (
            {"prompt": "another", "chosen": [Q, A], "rejected": [Q, {**A, "content": "b"}]},
            "chosen has messages of user, assistant", "one assistant message", "move what precedes it to prompt",
            "wrong role order",
        ),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "chosen is null", PAIR, STRING, "no answer"),
    ],
    "implicit_preference": [
        (
            {"chosen": [Q, A], "rejected": [{**Q, "content": "other"}, A]},
            "chosen and rejected have no common beginning, and there is no prompt", IMPLICIT,
            "add the prompt, or mend what both answer", "empty prompt",
        ),
        (
            {"chosen": [Q, A], "rejected": [Q, A]}, "chosen and rejected are the same", IMPLICIT,
            "there is nothing to prefer: remove the row", "nothing to prefer",
        ),
        ({"chosen": "q a", "rejected": None}, "rejected is null", IMPLICIT, "write both alike", "no answer"),
        (
            {"chosen": "q a", "rejected": [Q, A]}, "chosen is the text 'q a'", IMPLICIT, "write both alike",
            "not of the format",
        ),
        (
            {"chosen": "", "rejected": ""}, "chosen and rejected have no common beginning, and there is no prompt",
            IMPLICIT, "add the prompt, or mend what both answer", "empty prompt",
        ),
        ({"chosen": "q a"}, "no field 'rejected' (fields: chosen)", IMPLICIT, RENAME.format("rejected"), "no answer"),
    ],
    "transcript_preference": [
        (
            {"chosen": f"{HH}a", "rejected": "\n\nHuman: other\n\nAssistant: b"},
            "chosen and rejected differ from turn 1 on, before their last answers (chosen has 2 turns, rejected 2)",
            TRANSCRIPTS, "cut both after the first answer in which they differ, or remove the row", "another beginning",
        ),
        (
            {"chosen": f"{HH}a", "rejected": f"{HH}a\n\nHuman: why?\n\nAssistant: b"},
            "chosen and rejected differ from turn 2 on, before their last answers (chosen has 2 turns, rejected 4)",
            TRANSCRIPTS, "cut both after the first answer in which they differ, or remove the row", "another beginning",
        ),
        (
            {"chosen": f"{HH}a", "rejected": "b"}, "rejected does not begin with 'Human:'", TRANSCRIPTS,
            "write the whole transcript, or remove the row", "no transcript",
        ),
        (
            {"chosen": f"{HH}a\n\nHuman: and?", "rejected": f"{HH}b"}, "chosen ends with a turn of the user",
            TRANSCRIPTS, "end it with the answer, or remove the row", "wrong role order",
        ),
        (
            {"chosen": f"{HH}a", "rejected": HH}, "rejected[0] content is empty", TRANSCRIPTS, FILL, "no answer",
        ),
        (
            {"chosen": f"{HH}a", "rejected": f"{HH}a"}, "chosen and rejected are the same", TRANSCRIPTS,
            "there is nothing to prefer: remove the row", "nothing to prefer",
        ),
        (
            {"prompt": HH, "chosen": "a\n\nHuman: and?", "rejected": "b"}, "chosen is followed by a turn of the user",
            "one answer", "cut it there, or remove the row", "wrong role order",
        ),
        (
            {"prompt": "other", "chosen": f"{HH}a", "rejected": f"{HH}b"},
            "prompt is not what chosen and rejected begin with", TRANSCRIPTS, "remove the column or mend it",
            "another beginning",
        ),
    ],
    "sharegpt_ranking": [
        (
            {"conversations": [human("q")], "chosen": gpt("a")}, "no field 'rejected' (fields: chosen, conversations)",
            RANKING, RENAME.format("rejected"), "no answer",
        ),
        (
            {"conversations": [human("q"), gpt("a")], "chosen": gpt("a"), "rejected": gpt("b")},
            "conversations ends with the role 'assistant'", "a prompt that ends with a user message",
            "end it where the assistant is to answer", "wrong role order",
        ),
        (
            {"conversations": [human("q")], "chosen": human("a"), "rejected": gpt("b")}, "chosen has messages of user",
            "one assistant message", "move what precedes it to prompt", "wrong role order",
        ),
    ],
    "openai_preference": [
        (
            {"input": {}, "preferred_output": [A], "non_preferred_output": [A]}, "no field 'messages' (fields: none)",
            OPENAI, RENAME.format("messages"), "empty prompt",
        ),
        (
            {"input": "q", "preferred_output": [A], "non_preferred_output": [A]}, "input is the text 'q'", OPENAI,
            "write an object with messages", "not of the format",
        ),
        (
            {"input": {"messages": [Q]}, "preferred_output": [A]},
            "no field 'non_preferred_output' (fields: input, preferred_output)", OPENAI,
            RENAME.format("non_preferred_output"), "no answer",
        ),
    ],
    "oumi_preference": [
        (
            {"messages": [Q], "chosen": [Q, A], "rejected": {"messages": [A]}},
            "chosen has messages of user, assistant",
            "one assistant message", "move what precedes it to prompt", "wrong role order",
        ),
        (
            {"messages": [Q], "chosen": {}, "rejected": {"messages": [A]}}, "no field 'messages' (fields: none)", OUMI,
            RENAME.format("messages"), "no answer",
        ),
    ],
    "unpaired": [
        (
            {"prompt": "q", "completion": "a", "label": "sports"}, "label is the text 'sports'",
            "true or false, 1 or 0",
            "write one of these; if it is no judgement of the answer, set format=prompt_completion", "no label",
        ),
        (
            {"prompt": "q", "completion": "a", "label": None}, "label is null", "true or false, 1 or 0",
            "write one of these; if it is no judgement of the answer, set format=prompt_completion", "no label",
        ),
        (
            {"prompt": "q", "completion": "a"}, "no field 'label' (fields: completion, prompt)", UNPAIRED,
            RENAME.format("label"), "no label",
        ),
        (
            {"prompt": "q", "completion": "a", "label": 2}, "label is the number 2", "true or false, 1 or 0",
            "write one of these; if it is no judgement of the answer, set format=prompt_completion", "no label",
        ),
    ],
    "messages_label": [
        (
            {"messages": [Q, A]}, "label is null", "true or false, 1 or 0",
            "write one of these; if it is no judgement of the answer, set format=messages", "no label",
        ),
        (
            {"messages": [Q, A, Q], "label": True}, "messages ends with the role 'user'",
            "an answer at the end, which the label judges", "add the answer or remove the row", "no answer",
        ),
        ({"messages": [], "label": True}, "messages is empty", JUDGED, LIST, "no answer"),
    ],
    "prompts": [
        ({"prompt": ""}, "prompt is empty", PROMPTS, FILL, "empty prompt"),
        *(
            (
                {"prompt": "q", name: [1]}, f"the column {name} is reserved",
                "columns of other names, which reward functions get as arguments", "rename or remove it",
                "reserved column",
            )
            for name in ("prompt_ids", "completions", "trainer_state")
        ),
        ({"answer": "a"}, "no field 'prompt' (fields: answer)", PROMPTS, RENAME.format("prompt"), "empty prompt"),
        (
            {"prompt": [Q, A]}, "prompt ends with the role 'assistant'", "a prompt that ends with a user message",
            "end it where the assistant is to answer", "wrong role order",
        ),
        (
            {"prompt": "q", "x": float("nan")},
            "one of x is no JSON value: Out of range float values are not JSON compliant", "JSON values",
            "write it as a string", "not of the format",
        ),
        (
            {"prompt": "q", "x": b"1"}, "one of x is no JSON value: Object of type bytes is not JSON serializable",
            "JSON values", "write it as a string", "not of the format",
        ),
    ],
}  # fmt: skip
ALL = [(name, *case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("name", "row", "found", "accepted", "mend", "reason"), ALL, ids=range(len(ALL)))
def test_a_bad_row_is_refused_with_what_is_accepted_and_what_to_do(
    name: str, row: Row, found: str, accepted: str, mend: str, reason: str
) -> None:
    with pytest.raises(BadRowError) as refusal:
        BY_NAME[name].convert(row)
    assert str(refusal.value) == f"{found}; accepted: {accepted}; {mend}"
    assert refusal.value.reason == reason
    copied = pickle.loads(pickle.dumps(refusal.value))
    assert (str(copied), copied.reason) == (str(refusal.value), reason)


def test_a_message_can_be_written_whatever_it_quotes() -> None:
    with pytest.raises(BadRowError) as refusal:
        BY_NAME["text"].convert({"\ud83d": 1})
    assert "\\ud83d" in str(refusal.value).encode().decode()


def test_a_group_is_a_name() -> None:
    assert check_group({"group": "g"}) == "g"
    assert check_group({}) is None
    assert check_group({"group": ""}) is None, "the cell of a table may be empty"
    with pytest.raises(BadRowError) as refusal:
        check_group({"group": 1})
    assert str(refusal.value) == (
        "group is the number 1; accepted: a string or null; rows of one group are held out together"
    )


@pytest.mark.parametrize("ids", [("x", "y"), ("y", "x"), (None, None)])
def test_calls_that_are_all_answered_are_read(ids: tuple[str | None, ...]) -> None:
    results = [{**RESULT, "tool_call_id": each} for each in ids]
    made = BY_NAME["messages"].convert({"messages": [Q, TWO_CALLS, *results, A]})
    assert len(made["messages"]) == 5  # type: ignore[arg-type]

"""Chat templates: rendering within limits, stop tokens and thinking blocks.

A template is a program that came with a model. On Linux its time and memory are limited, in the process that renders,
on every conversation. CPU time is that of the thread: a busy machine refuses nothing. An operation of C code, such as a
huge power, cannot be interrupted; SIGVTALRM ends its process.
"""

import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.kinds import Message

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Thinking = Literal["keep", "drop"]
OPEN, CLOSE = "<think>", "</think>"
FIELD = "reasoning_content"  # transformers gives it to templates under the other names that they ask for, too
_THOUGHT = re.compile(rf"\s*(?:{OPEN})?(.*?){CLOSE}\s*", re.DOTALL)


def split(message: Message) -> tuple[str, Message]:
    """The thinking of a message, in its content or in a field, and the message without it; empty: there is none."""
    if FIELD in message:
        return str(message[FIELD]), {name: value for name, value in message.items() if name != FIELD}
    content = str(message.get("content") or "")
    found = _THOUGHT.match(content) if message["role"] == "assistant" and CLOSE in content else None
    if found is None:
        return "", message
    return found[1].strip(), {**message, "content": content[found.end() :]}


def without(messages: Sequence[Message]) -> list[Message]:
    """Messages without what the assistant thinks."""
    return [split(message)[1] for message in messages]


def in_field(messages: Sequence[Message]) -> list[Message]:
    """Thinking in a field of its own, as some templates take it."""
    parts = [split(message) for message in messages]
    return [{**rest, FIELD: thought} if thought else rest for thought, rest in parts]


def answer_after(prompt: str, answer: str, thought: str) -> str:
    """A prompt and its answer, with the thinking that belongs between them.

    The prompt may have opened the thinking. Where the answer neither has a thought nor closes that, an empty thought
    is closed before it: so the answer follows the very prompt that generation starts from.

    Args:
        answer: what the template writes behind the place up to which it and the prompt agree.
    """
    is_open = prompt.rstrip().endswith(OPEN)
    closing = re.match(rf"\s*{CLOSE}\s*", answer)
    if not thought:
        return prompt + (f"\n{CLOSE}\n\n" if is_open and not closing else "") + answer
    rest = answer[closing.end() :] if closing else answer
    opening = "" if is_open else f"{OPEN}\n"
    return f"{prompt}{opening}{thought}\n{CLOSE}\n\n{rest}"


logger = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, object]]
DATE = "26 Jul 2024"  # the date that templates of Llama 3 write without strftime_now
_DAY = datetime(2024, 7, 26)
_WORD = "zq0qz"  # not written by any template
_REFUSED: dict[tuple[str, str], str] = {}  # templates that exceeded their limits -> the message


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template with the tokens that it names. Can be pickled.

    Args:
        name: of the model that it came with, for messages.
        plain, with_tools: for a conversation without and with tools; models may have one for each.
        in_blocks: it takes contents as lists of ``{"type": "text", "text": ...}``, as those of vision models do.
    """

    plain: str
    with_tools: str
    special_tokens: Mapping[str, object]
    in_blocks: bool = False
    name: str = ""

    @staticmethod
    def of(tokenizer: "PreTrainedTokenizerBase") -> "Template":
        """The template of a tokenizer that has one.

        Raises:
            ConfigError: it has several, and none is the default.
        """
        try:
            plain, with_tools = tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}])
        except ValueError as error:
            raise ConfigError(
                f"the model has several chat templates and none of them is named default ({error}); one for all "
                "conversations is accepted; name it default, or set chat_template=chatml on the sft stage"
            ) from error
        template = Template(
            plain=_on_one_day(plain),
            with_tools=_on_one_day(with_tools),
            special_tokens=dict(tokenizer.special_tokens_map),
            name=tokenizer.name_or_path,
        )
        blocks = replace(template, in_blocks=True)
        return blocks if blocks.writes() and not template.writes() else template

    def writes(self) -> bool:
        """Whether it writes the content of a user's message."""
        try:
            return _WORD in self.render([[{"role": "user", "content": _WORD}]], None, "")[0]
        except PipelineError:
            return False

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        tools: Tools | None,
        row_id: str,
        *,
        prompt: bool = False,
        thinks: bool = False,
    ) -> list[str]:
        """Conversations as texts.

        Args:
            row_id: of their row, for messages.
            prompt: up to where the assistant begins to speak.
            thinks: the assistant will think; some templates take it as an argument.
        Raises:
            DataError: the template refuses the messages.
            ConfigError: the template itself is wrong, or takes more time or memory than it may.
        """
        from jinja2 import TemplateError

        if (self.plain, self.with_tools) in _REFUSED:  # not tried again
            raise ConfigError(_REFUSED[self.plain, self.with_tools])
        if self.in_blocks:
            conversations = [
                [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
                for messages in conversations
            ]
        try:
            with Limited():
                try:
                    return self._texts(conversations, tools, prompt=prompt, thinks=thinks)
                except TypeError:  # a few, such as DeepSeek's, take the arguments of calls as JSON text alone
                    texts = [[_with_json_arguments(message) for message in messages] for messages in conversations]
                    return self._texts(texts, tools, prompt=prompt, thinks=thinks)
        except (OverTimeError, MemoryError) as error:
            seconds, memory = f"{SECONDS} s of CPU time", f"{MEMORY_BYTES // 2**20} MiB"
            limit = seconds if isinstance(error, OverTimeError) else memory
            refusal = (
                f"the chat template of {self.name or 'the model'} takes more than {limit} for one conversation"
                f"{f' (row {row_id})' if row_id else ''}, and was stopped; one that takes less is accepted; correct "
                "the template, or set chat_template=chatml on the sft stage"
            )
            _REFUSED[self.plain, self.with_tools] = refusal
            raise ConfigError(refusal) from error
        except Exception as error:  # a template is a program: it can raise whatever Python can
            if type(error) is TemplateError:  # its `raise_exception`
                raise DataError(
                    f"row {row_id}: the model's chat template refuses its messages: {error}; correct the row's roles "
                    "and their order"
                ) from error
            raise ConfigError(
                f"the model's chat template fails on row {row_id}: {type(error).__name__}: {error}; one that renders "
                "every row, or says itself which it refuses, is accepted; correct the template, or set "
                "chat_template=chatml on the sft stage"
            ) from error

    def _texts(
        self, conversations: Sequence[Sequence[Message]], tools: Tools | None, *, prompt: bool, thinks: bool
    ) -> list[str]:
        # What `apply_chat_template` calls, without its repeated checks, which would double the time.
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.plain if tools is None else self.with_tools
        variables: dict[str, object] = {"date_string": DATE} if "date_string" in template else {}
        variables |= {"enable_thinking": True} if thinks else {}
        texts: list[str] = render_jinja_template(
            conversations=conversations, tools=tools, chat_template=template, add_generation_prompt=prompt,
            **{**self.special_tokens, **variables},
        )[0]  # fmt: skip
        return texts


def _on_one_day(template: str) -> str:
    """A template that always writes ``DATE`` where it would write today's date.

    Raises:
        ConfigError: it is unknown how it writes the date.
    """
    if "strftime_now" not in template:
        return template
    logger.info("chat_template=writes_a_date date=%r: the same in every run", DATE)
    dated = re.sub(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", lambda call: repr(_DAY.strftime(call[2])), template)
    if "strftime_now(" in dated and "date_string" not in template:
        raise ConfigError(
            "the model's chat template writes today's date (strftime_now): the same rows would be other tokens "
            "tomorrow; one that names the form of the date, such as strftime_now('%d %b %Y'), or that takes it from "
            "date_string is accepted; correct the template, or set chat_template=chatml on the sft stage"
        )
    return dated


def _with_json_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    functions = [{**call["function"], "arguments": text} for call, text in zip(calls, texts, strict=True)]
    return {**message, "tool_calls": [{**call, "function": each} for call, each in zip(calls, functions, strict=True)]}


_PROBE = "\ue002"  # content that no template writes by itself


def stop_at(generation: "GenerationConfig", tokens: Iterable[int]) -> None:
    """Lets generation stop at these tokens too."""
    ends = generation.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    more = [token for token in tokens if token not in ends]
    if more:
        generation.eos_token_id = [*more, *ends]


@dataclass(kw_only=True)
class StopTokens:
    """Finds the end of assistant turns in the text of a template. Can be pickled.

    Args:
        special: special tokens of the tokenizer, as text.
        added: all tokens that it never takes apart: the special ones, and marks such as ``</tool_call>``.
        ids: of the latter.
    """

    special: Sequence[str]
    added: Sequence[str]
    ids: frozenset[int]
    _known: dict[tuple[bool, tuple[str, ...]], str] = field(default_factory=dict)

    @staticmethod
    def of(tokenizer: "PreTrainedTokenizerBase") -> "StopTokens":
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        texts = special | {token.content for token in added}
        ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(texts)))
        return StopTokens(special=_longest_first(special), added=_longest_first(texts), ids=ids)

    def ended(
        self, template: Template, text: str, start: int, messages: Sequence[Message], tools: Tools | None, row_id: str
    ) -> str:
        """A rendered conversation up to the stop token of its last turn, which is appended where the template writes
        it as the beginning of the next turn.

        Args:
            start: where the last turn begins in the text.
            messages: what the text says, the last one of the assistant.
        Raises:
            ConfigError: the turn ends in no token of its own.
        """
        body, ends = _tail(text[start:], self.special)
        key = (bool(messages[-1].get("tool_calls")), tuple(ends))
        if key not in self._known:
            plain = [*messages[:-1], split(messages[-1])[1]]
            self._known[key] = self._stop(template, ends, plain, tools, row_id)
        stop = self._known[key]
        if not stop:
            body, ends = _tail(text[start:], self.added)
            stop = "".join(ends).rstrip()
        if not stop:
            raise ConfigError(
                f"the model's chat template ends the assistant's turn on row {row_id} in no token of its own "
                f"(...{text[-40:]!r}), so the model would never learn to stop; a template that writes a special token "
                "of the tokenizer, such as its eos_token, after each answer is accepted; add it to the template, or "
                "set chat_template=chatml on the sft stage"
            )
        return text[:start] + body + stop

    def _stop(
        self, template: Template, ends: Sequence[str], messages: Sequence[Message], tools: Tools | None, row_id: str
    ) -> str:
        """The end of a turn after its last word, up to the stop token; empty: no special token is known."""
        calls = bool(messages[-1].get("tool_calls"))
        within = calls and len(ends) == 1 and self._ends_each_call(template, ends[0].strip(), messages, tools, row_id)
        if len(ends) == 1 and not within:
            return ends[0].rstrip()
        follows: Message = {"role": "tool" if calls else "user", "content": _PROBE}
        try:
            whole, history = template.render([messages, [*messages, follows]], tools, row_id)
        except PipelineError:  # it refuses what follows: nothing more is known
            return "".join(ends[:1]).rstrip()
        if ends and not within:
            # Some templates write an end of the whole behind that of the turn, which history lacks.
            past = history.rpartition(_PROBE)[0]
            counts = (n for n in range(len(ends), 1, -1) if "".join(ends[:n]).rstrip() in past)
            return "".join(ends[: next(counts, 1)]).rstrip()
        special = "|".join(map(re.escape, self.special)) or "(?!)"
        found = re.match(rf"\s*(?:{special})", history[len(whole) :]) if history.startswith(whole) else None
        return "".join(ends) + found[0] if found else ""

    def _ends_each_call(
        self, template: Template, end: str, messages: Sequence[Message], tools: Tools | None, row_id: str
    ) -> bool:
        """Whether a token ends each call in a turn, rather than the turn."""
        *before, last = messages
        calls = last["tool_calls"]
        assert isinstance(calls, list)
        try:
            once, twice = template.render(
                [[*before, {**last, "tool_calls": calls[:1] * number}] for number in (1, 2)], tools, row_id
            )
        except PipelineError:  # it accepts only one call
            return False
        return twice.count(end) > once.count(end)


def _longest_first(tokens: Iterable[str]) -> list[str]:
    return sorted(filter(None, tokens), key=lambda token: (-len(token), token))


def _tail(text: str, tokens: Sequence[str]) -> tuple[str, list[str]]:
    """A text without the tokens that end it; and those tokens, each with the blanks after it."""
    ends: list[str] = []
    while True:
        bare = text.rstrip()
        token = next((token for token in tokens if bare.endswith(token)), None)
        if not token:
            return text, ends
        ends.insert(0, text[len(bare) - len(token) :])
        text = bare[: -len(token)]


SECONDS, MEMORY_BYTES = 10, 2**30
_PROCESS_SECONDS = 60  # of user time
_POLL_SECONDS = 0.25
_LIMITS, _PAGE_BYTES = resource.getrlimit(resource.RLIMIT_DATA), resource.getpagesize()
_PROC = "/proc/self/statm" if sys.platform == "linux" else os.devnull


class OverTimeError(Exception):
    """A rendering took more CPU time than it may."""


class Limited:
    """A block that is stopped when it uses more than ``SECONDS`` (OverTimeError) or ``MEMORY_BYTES`` (MemoryError).

    It costs a few microseconds.
    """

    def __enter__(self) -> None:
        if usage := os.pread(_statm, 200, 0):
            limit, (soft, hard) = int(usage.split()[5]) * _PAGE_BYTES + MEMORY_BYTES, _LIMITS
            limit = limit if soft == resource.RLIM_INFINITY else min(limit, soft)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
            signal.setitimer(signal.ITIMER_VIRTUAL, _PROCESS_SECONDS)
            with _lock:
                _deadlines[threading.get_ident()] = time.thread_time() + SECONDS
                if not _watches:
                    _watches.append(threading.Thread(target=_watch, daemon=True, name="chat-template-limits"))
                    _watches[0].start()

    def __exit__(self, *raised: object) -> None:
        with _lock:
            if _deadlines.pop(threading.get_ident(), None) is None:
                _raise_in(threading.get_ident(), None)  # cancels an error that was not raised yet
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, _LIMITS)


def _watch() -> None:
    while True:
        time.sleep(_POLL_SECONDS)
        with _lock:  # so that a thread with a deadline does not end meanwhile
            for thread, deadline in list(_deadlines.items()):
                if time.clock_gettime(time.pthread_getcpuclockid(thread)) > deadline:
                    del _deadlines[thread]
                    _raise_in(thread, OverTimeError)


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    what = error and ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _begin() -> None:
    """Resets the state of a new process; a forked one has no threads, and may have a held lock."""
    global _deadlines, _watches, _lock, _statm
    _deadlines, _watches, _lock, _statm = {}, [], threading.Lock(), os.open(_PROC, os.O_RDONLY)


_deadlines: dict[int, float]  # of threads that render, in their CPU seconds
_watches: list[threading.Thread]  # one, once something was rendered
_lock: threading.Lock
_statm: int
_begin()
os.register_at_fork(after_in_child=_begin)

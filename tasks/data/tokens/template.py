"""What a chat template may do, and what it leaves out: limits of its time and memory, and marks that it must write.

A template is a program that came with a model. On Linux its time and memory are limited, in the process that renders,
on every conversation. CPU time is that of the thread: a busy machine refuses nothing. An operation of C code, such as a
huge power, cannot be interrupted; SIGVTALRM ends its process.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lineage.errors import PipelineError
from tasks.data.kinds import Message

Thinking = Literal["keep", "drop"]
Tools = Sequence[Mapping[str, object]]


_SAID = {"system": "what the system message says", "tool": "what a tool answers"}
_FIRST_NUMBER = 7_000_000_001  # such as no template writes by itself


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Words and numbers that no template writes by itself, takes apart or escapes.

    Args:
        stands_for: mark -> what stands in its place.
    """

    stands_for: dict[str, str] = field(default_factory=dict)

    def word(self, stands_for: str) -> str:
        mark = f"zq{len(self.stands_for)}qz"
        self.stands_for[mark] = stands_for
        return mark

    def number(self, stands_for: str) -> int:
        mark = _FIRST_NUMBER + len(self.stands_for)
        self.stands_for[str(mark)] = stands_for
        return mark

    def lost(self, text: str) -> str | None:
        """The first thing whose mark a text lacks."""
        return next((stands_for for mark, stands_for in self.stands_for.items() if mark not in text), None)


def form_of(messages: Sequence[Message], tools: Tools | None) -> tuple[object, ...]:
    """What decides which parts of a conversation a template reads: roles, calls, and empty turns."""
    turns = (
        (str(each["role"]), bool(each["content"]), tuple(bool(call["function"]["arguments"]) for call in _calls(each)))
        for each in messages
    )
    return (tools and len(tools), *turns)


def lost(render: Callable[..., list[str]], messages: Sequence[Message], tools: Tools | None, row_id: str) -> str | None:
    """Something that conversations of this form say, and the template does not; None: it says everything."""
    marks = Marks()
    marked = [_message(message, marks) for message in messages]
    marked_tools = None if tools is None else [_tool(tool, marks) for tool in tools]
    try:
        (text,) = render([marked], marked_tools, row_id)
    except PipelineError:  # it takes the row and not our words: nothing is known
        return None
    return marks.lost(text)


def _calls(message: Message) -> list[dict[str, dict[str, object]]]:
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return calls


def _message(message: Message, marks: Marks) -> Message:
    marked, calls = dict(message), _calls(message)
    if message["content"] or not calls:
        phrase = _SAID.get(str(message["role"]), f"what the {message['role']} says")
        marked["content"] = marks.word(f"{phrase} beside a call" if calls else phrase)
    if calls:
        marked["tool_calls"] = [{**call, "function": _function(call["function"], marks)} for call in calls]
    return marked


def _function(called: Mapping[str, object], marks: Marks) -> dict[str, object]:
    name = marks.word(f"the call of {called['name']}")
    arguments = _argument(called["arguments"], f"an argument of the call of {called['name']}", marks)
    return {**called, "name": name, "arguments": arguments}


def _argument(value: object, stands_for: str, marks: Marks) -> object:
    match value:
        case str():
            return marks.word(stands_for)
        case int() if not isinstance(value, bool):
            return marks.number(stands_for)
        case list():
            return [_argument(each, stands_for, marks) for each in value]
        case dict():
            return {name: _argument(each, stands_for, marks) for name, each in value.items()}
        case _:
            return value


def _tool(tool: Mapping[str, object], marks: Marks) -> Mapping[str, object]:
    function = tool["function"]
    assert isinstance(function, Mapping)
    return {**tool, "function": {**function, "name": marks.word(f"the tool {function['name']}")}}


SECONDS, MEMORY_BYTES = 10, 2**30
_PROCESS_SECONDS = 60  # of user time
_POLL_SECONDS = 0.25
_LIMITS, _PAGE_BYTES = resource.getrlimit(resource.RLIMIT_DATA), resource.getpagesize()
_PROC = "/proc/self/statm" if sys.platform == "linux" else os.devnull


class OverTimeError(Exception):
    """A rendering took more CPU time than it may."""


def limit_of(error: Exception) -> str:
    """The limit that a rendering exceeded, for messages."""
    return f"{SECONDS} s of CPU time" if isinstance(error, OverTimeError) else f"{MEMORY_BYTES // 2**20} MiB"


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
        try:
            with _lock:
                is_late = _deadlines.pop(threading.get_ident(), None) is None
            # Raised here if it was not yet. Cancelled by PyThreadState_SetAsyncExc(NULL), it would stay announced: each
            # call of a function would look for it, and with a trace function never end.
            for _ in range(1000 if is_late else 0):
                pass
        except OverTimeError:
            pass  # the block has ended all the same
        finally:
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


def _raise_in(thread: int, error: type[Exception]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


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

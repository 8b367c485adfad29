"""Limits of time and memory for a chat template, which is a program that came with a model. On Linux alone.

They hold in the process that renders, on every conversation. CPU time is that of the thread: a busy machine refuses
nothing. An operation of C code, such as a huge power, cannot be interrupted; SIGVTALRM ends its process.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time

SECONDS, MEMORY_BYTES = 10, 2**30
_PROCESS_SECONDS = 60  # of user time
_POLL_SECONDS = 0.25
_LIMITS, _PAGE_BYTES = resource.getrlimit(resource.RLIMIT_DATA), resource.getpagesize()
_PROC = "/proc/self/statm" if sys.platform == "linux" else os.devnull


class OverTimeError(Exception):
    """A rendering took more CPU time than it may."""


class Limited:
    """A block that is stopped where it uses more than ``SECONDS`` (OverTimeError) or ``MEMORY_BYTES`` (MemoryError).

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
                _raise_in(threading.get_ident(), None)  # what was not raised yet comes too late
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_DATA, _LIMITS)


def _watch() -> None:
    while True:
        time.sleep(_POLL_SECONDS)
        with _lock:  # a thread with a deadline is alive
            for thread, deadline in list(_deadlines.items()):
                if time.clock_gettime(time.pthread_getcpuclockid(thread)) > deadline:
                    del _deadlines[thread]
                    _raise_in(thread, OverTimeError)


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    what = error and ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _begin() -> None:
    """Of a process, also of one that was forked: threads are not, and a lock may be held."""
    global _deadlines, _watches, _lock, _statm
    _deadlines, _watches, _lock, _statm = {}, [], threading.Lock(), os.open(_PROC, os.O_RDONLY)


_deadlines: dict[int, float]  # of threads that render, in their CPU seconds
_watches: list[threading.Thread]  # one, once something was rendered
_lock: threading.Lock
_statm: int
_begin()
os.register_at_fork(after_in_child=_begin)

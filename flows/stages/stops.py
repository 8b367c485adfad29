"""Stopping a command: by Ctrl-C, by SIGTERM, by closing its terminal."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from lineage.filesystem.owner import host

# An exception in these places leaves a lock locked, and every later import would wait for it.
_UNINTERRUPTIBLE = ("<frozen importlib.", "/logging/__init__.py")
_AGAIN_SECONDS = 0.05
_PATIENCE_SECONDS = 10.0  # longer imports are interrupted: after 30 s we would be killed
_KILL_SECONDS = 30.0  # that a process manager gives
_REPEATED = signal.SIGURG  # differs from signals that users send; ignored by default

# A stop applies to this process and all its runs.
hurried = threading.Event()  # a second stop was requested: do not wait for stages that save
ended: list[str] = []  # where each stopped stage resumes: ``sft saved at step 9``
_asked: list[float] = []  # when the first stop was requested


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turns the first Ctrl-C, SIGTERM or closed terminal into a ``KeyboardInterrupt``, whatever libraries do.

    It is raised at once, but not inside an import; and raised again if it was swallowed, as by a finalizer. A second
    Ctrl-C only ends the wait for stages that save.
    """
    ended.clear()
    hurried.clear()
    _asked.clear()
    stop = _Stop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` sets it
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, stop.asked) for number in numbers}
    handlers[_REPEATED] = signal.signal(_REPEATED, stop.again)
    sys.unraisablehook = stop.swallowed
    thread = threading.Thread(target=stop.repeat, args=(threading.get_ident(),), daemon=True, name="stops")
    thread.start()
    try:
        yield
    except BaseException as error:
        if stop.error or isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(stop.description()) from error
        raise
    finally:
        stop.over.set()
        thread.join()
        sys.unraisablehook = stop.hook
        for number, handler in handlers.items():
            signal.signal(number, handler)


def seconds_left() -> float:
    """What a stop may still take before a process manager kills us; 0: none was requested, or the user hurries it."""
    if not _asked or hurried.is_set():
        return 0.0
    return max(0.0, _KILL_SECONDS - (time.monotonic() - _asked[0]))


@contextlib.contextmanager
def handling_sigterm() -> Iterator[None]:
    """Restores our handler for SIGTERM inside a flow run, where Prefect has replaced it."""
    prefects = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, prefects)


class _Stop:
    """A requested stop, from the signal to the exception.

    Attributes:
        error: the raised exception; None: not raised yet.
        hook: the previous ``sys.unraisablehook``, for all other errors.
        over: nothing is raised any more.
    """

    def __init__(self) -> None:
        self.error: KeyboardInterrupt | None = None
        self.hook = sys.unraisablehook
        self.over = threading.Event()
        self._number: int = signal.SIGTERM  # at the start and end of a flow run Prefect handles it
        self._asked_at: float | None = None

    def asked(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        if not self.error:
            self._number, self._asked_at = number, self._asked_at or time.monotonic()
            _asked.append(self._asked_at)
            self.again(number, frame)
        elif number == signal.SIGINT:
            hurried.set()

    def again(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal that repeats them."""
        if self._asked_at is None or self.error or self.over.is_set():
            return
        if _is_interruptible(frame) or time.monotonic() - self._asked_at > _PATIENCE_SECONDS:
            self.error = KeyboardInterrupt()
            raise self.error

    def repeat(self, main: int) -> None:
        """Repeats a signal that arrived at a moment when it could not be raised, or whose exception was swallowed."""
        while not self.over.wait(_AGAIN_SECONDS):
            if self._asked_at is not None and not self.error:
                signal.pthread_kill(main, _REPEATED)

    def swallowed(self, found: "sys.UnraisableHookArgs") -> None:
        """A ``sys.unraisablehook`` that notices when our exception was swallowed, as in a finalizer."""
        if self.error and found.exc_value is self.error:
            self.error = None
        else:
            self.hook(found)

    def description(self) -> str:
        """``by SIGTERM on gpu-07: sft saved at step 9``"""
        stages = f": {', '.join(ended)}" if ended else ""
        return f"by {signal.Signals(self._number).name} on {host()}{stages}"


def _is_interruptible(frame: FrameType | None) -> bool:
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in _UNINTERRUPTIBLE):
            return False
        frame = frame.f_back
    return True

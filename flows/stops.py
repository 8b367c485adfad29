"""Who asks a command to end: by Ctrl-C, by SIGTERM, by closing its terminal."""

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from lineage.owner import host

# An exception there leaves a lock that is never released, and every later import waits for it.
_NOT_TO_BE_LEFT = ("<frozen importlib.", "/logging/__init__.py")
_AGAIN_SECONDS = 0.05
_PATIENCE_SECONDS = 10.0  # an import that takes longer is interrupted: the process that stops us gives 30 s
_REPEATED = signal.SIGURG  # differs from signals that users send; ignored by default

# A stop is of this process, and so of all its runs.
hurried = threading.Event()  # it was asked for again: stages that save are not waited for
ended: list[str] = []  # of each stage that it ended, where it resumes: ``sft saved at step 9``


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Makes a first Ctrl-C, SIGTERM or closed terminal a ``KeyboardInterrupt``, whatever libraries make of it.

    It is raised at once, but not inside of an import; and again where it was swallowed, as by a finalizer. A second
    Ctrl-C only ends the wait for stages that save.

    Raises:
        KeyboardInterrupt: says by which signal, where, and what the stages that it ended go on from.
    """
    stop = _Stop()
    ended.clear()
    hurried.clear()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` sets it
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, stop.asked) for number in numbers}
    handlers[_REPEATED] = signal.signal(_REPEATED, stop.again)
    sys.unraisablehook = stop.swallowed
    try:
        with stop.repeating():
            yield
    except BaseException as error:
        if stop.error or isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(stop.words()) from error
        raise
    finally:
        sys.unraisablehook = stop.hook
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def hearing_sigterm() -> Iterator[None]:
    """Inside a flow run, where Prefect has put a handler in the place of ours that raises wherever it is: as Ctrl-C."""
    prefects = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, prefects)


class _Stop:
    """One wish to end, from the signal that says it to the exception that does it.

    Attributes:
        error: what was raised for it; None: nothing yet.
        hook: for all other errors without a caller.
    """

    def __init__(self) -> None:
        self.error: KeyboardInterrupt | None = None
        self.hook = sys.unraisablehook
        self._number: int = signal.SIGTERM  # Prefect handles it in our place, where a flow run starts and ends
        self._asked_at: float | None = None
        # Its put may be called where a signal interrupted another one; a lock or a new thread may not.
        self._again: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_over = False

    def asked(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        if not self.error:
            self._number = number
            self._asked_at = self._asked_at or time.monotonic()
            self.again(number, frame)
        elif number == signal.SIGINT:
            hurried.set()

    def again(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal that repeats them."""
        if self.error or self._is_over or self._asked_at is None:
            return
        if _may_be_left(frame) or time.monotonic() - self._asked_at > _PATIENCE_SECONDS:
            self.error = KeyboardInterrupt()
            raise self.error
        self._again.put(True)

    def words(self) -> str:
        """``by SIGTERM on gpu-07: sft saved at step 9``"""
        stages = f": {', '.join(ended)}" if ended else ""
        return f"by {signal.Signals(self._number).name} on {host()}{stages}"

    def swallowed(self, found: "sys.UnraisableHookArgs") -> None:
        """For ``sys.unraisablehook``: errors in what Python itself runs have no caller."""
        if self.error and found.exc_value is self.error:
            self.error = None
            self._again.put(True)
        else:
            self.hook(found)

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Has the signal come again, where it came at a wrong moment."""
        thread = threading.Thread(target=self._repeat, args=(threading.get_ident(),), daemon=True, name="stops")
        thread.start()
        try:
            yield
        finally:
            self._is_over = True
            self._again.put(False)
            thread.join()

    def _repeat(self, main: int) -> None:
        while self._again.get():
            while not (self.error or self._is_over):  # one that a library ignores for a moment is no answer
                time.sleep(_AGAIN_SECONDS)
                signal.pthread_kill(main, _REPEATED)


def _may_be_left(frame: FrameType | None) -> bool:
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in _NOT_TO_BE_LEFT):
            return False
        frame = frame.f_back
    return True

"""Runs the command and interrupts it at a stated event: ``python -m tests.chaos.events EVENT SIGNAL run ...``.

It says so on stderr; an event that does not come interrupts nothing.
"""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path

# Event -> module, class and method of the driver, whether the signal comes before or after its call, and which call.
CALLS = {
    "the MLflow run of a stage was created": ("lineage.mlflow.executions", "Executions", "create", "after", 2),
    "an output is about to be committed": ("lineage.store", "Entry", "commit", "before", 1),
    "an output was committed": ("lineage.store", "Entry", "commit", "after", 1),
    "the MLflow run of a stage is about to close": ("lineage.mlflow.sync", "Mirror", "_complete", "before", 1),
}
CHECKPOINT = "a checkpoint was committed"
EVENTS = (*CALLS, CHECKPOINT)
INTERRUPTED = "interrupted by the test"


def main() -> int:
    event, name, *cli_args = sys.argv[1:]

    def interrupt() -> None:
        os.write(2, f"{INTERRUPTED}\n".encode())
        os.kill(os.getpid(), signal.Signals[name])

    if event == CHECKPOINT:
        threading.Thread(target=_when_checkpoint, args=(interrupt,), daemon=True).start()
    else:
        _when_called(event, interrupt)
    from flows.__main__ import main as posttrain

    return posttrain(cli_args)


def _when_called(event: str, interrupt: Callable[[], None]) -> None:
    module, owner, name, when, number = CALLS[event]
    cls = getattr(importlib.import_module(module), owner)
    original, calls = getattr(cls, name), 0

    @wraps(original)
    def called(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if when == "before" and calls == number:
            interrupt()
        result = original(*args, **kwargs)
        if when == "after" and calls == number:
            interrupt()
        return result

    setattr(cls, name, called)


def _when_checkpoint(interrupt: Callable[[], None]) -> None:
    """A checkpoint that was not there when the command began."""
    before = set(Path("artifacts").glob("*/*/checkpoints/step-*"))
    while not set(Path("artifacts").glob("*/*/checkpoints/step-*")) - before:
        time.sleep(0.01)
    interrupt()


if __name__ == "__main__":
    sys.exit(main())

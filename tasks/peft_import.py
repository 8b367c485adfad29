"""Imports PEFT without bitsandbytes, which it would import to know it by sight: a second of every start."""

import sys

_PACKAGE = "bitsandbytes"

if _PACKAGE in sys.modules:
    import peft
else:
    sys.modules[_PACKAGE] = None  # type: ignore[assignment]  # what Python documents for a module that is not to be had
    import peft  # noqa: F401

    del sys.modules[_PACKAGE]  # importable again

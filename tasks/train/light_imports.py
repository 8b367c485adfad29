"""Imports PEFT and TRL without bitsandbytes and MLflow, which they import just to have them: seconds of every start."""

import sys
from importlib.util import find_spec
from unittest import mock

_PACKAGE = "bitsandbytes"

if _PACKAGE in sys.modules:
    import peft
else:
    sys.modules[_PACKAGE] = None  # type: ignore[assignment]  # Python's way to say that a module cannot be imported
    import peft  # noqa: F401

    del sys.modules[_PACKAGE]  # importable again

if not find_spec("vllm"):  # vLLM is what TRL would need them for
    with (
        mock.patch("transformers.is_bitsandbytes_available", return_value=False),
        mock.patch("transformers.integrations.is_mlflow_available", return_value=False),
    ):
        import trl.generation.vllm_generation  # noqa: F401

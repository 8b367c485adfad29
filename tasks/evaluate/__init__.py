"""Measures policies on held-out rows. Modules that need a model's libraries are imported at run time."""

from tasks.evaluate.evaluate import Evaluate

__all__ = ["Evaluate"]

"""Measures policies on held-out rows. What only runs with a model is imported when it runs."""

from tasks.evaluate.evaluate import Evaluate

__all__ = ["Evaluate"]

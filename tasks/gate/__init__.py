"""Judges a model by the reports on it."""

from tasks.gate.gate import Gate

__all__ = ["Gate"]

"""The Python SDK of ``posttrain steps serve``: sessions whose steps a program calls (docs/steps.md)."""

from flows.steps.client import AsyncClient, AsyncSession, CallError, Client, Session
from tasks.steps import Row

__all__ = ["AsyncClient", "AsyncSession", "CallError", "Client", "Row", "Session"]

"""The Python SDK of ``posttrain steps serve``: sessions whose steps a program calls (docs/steps.md)."""

from flows.steps.client import AsyncClient, AsyncSession, CallError, Client, Session
from tasks.steps import Row
from tasks.train.steps.renderers import Conversation, Rollout, merged

__all__ = ["AsyncClient", "AsyncSession", "CallError", "Client", "Conversation", "Rollout", "Row", "Session", "merged"]

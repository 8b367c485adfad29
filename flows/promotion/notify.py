"""Tells people how a run ended, through a notification block of Prefect."""

import inspect
import sys

import httpx
from prefect.blocks import notifications
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.blocks.notifications import AppriseNotificationBlock
from prefect.exceptions import ObjectNotFound

from flows.declare.pipeline import nearest
from lineage.errors import ConfigError

# A webhook without a configured body sends nothing.
_PAYLOADS = {"custom-webhook": ["json_data={'text': '{{subject}}: {{body}}'}"]}


def require_block(name: str) -> None:
    """That there is such a block to notify, before anything runs.

    Raises:
        ConfigError: there is none, with the command that makes one.
    """
    try:
        block = Block.load(name)
    except Exception as error:  # Prefect's, pydantic's, and those of blocks themselves: no common base
        if isinstance(error.__cause__, ObjectNotFound):
            raise ConfigError(f"notify={name}: Prefect has no such block; {_how_to_make(name)}") from error
        raise ConfigError(
            f"notify={name}: Prefect does not load that block ({_cause(error)}); mend it in Prefect, or notify=null"
        ) from error
    if not isinstance(block, NotificationBlock):
        raise ConfigError(
            f"notify={name}: is a block that notifies nobody; accepted are: {', '.join(sorted(_types()))}"
        )


def notify(name: str, subject: str, body: str) -> None:
    """Sends a message; a failure costs one line on stderr."""
    try:
        block = Block.load(name)
        block.notify(body, subject)
    except Exception as error:  # whatever it is, the run is over, and nothing of it is worse for it
        print(f"posttrain: notify={name}: nobody was told: {_cause(error)}", file=sys.stderr)


def _cause(error: Exception) -> str:
    """What went wrong in one line; no address, which for most services is the secret."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answered {error.response.status_code}"
    if isinstance(error, httpx.TransportError):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def _how_to_make(name: str) -> str:
    slug, _, document = name.partition("/")
    types = _types()
    if slug not in types:
        return f"nor a type of blocks {slug}; types are: {', '.join(sorted(types))}{nearest(slug, list(types))}"
    cls = types[slug]
    required = [f"{key}='...'" for key, field in cls.model_fields.items() if field.is_required()]
    given = ", ".join([*required, *_PAYLOADS.get(slug, [])])
    statement = f"from prefect.blocks.notifications import {cls.__name__}; {cls.__name__}({given}).save('{document}')"
    return f'make it with: python -c "{statement}"'


def _types() -> dict[str, type[Block]]:
    """Slug -> the notification blocks that come with Prefect."""
    found = [each for _, each in inspect.getmembers(notifications, inspect.isclass)]
    senders: list[type[Block]] = [
        each for each in found if issubclass(each, NotificationBlock) and not inspect.isabstract(each)
    ]
    # A base class of theirs, whose type says nothing of where it sends.
    return {str(each.get_block_type_slug()): each for each in senders if each is not AppriseNotificationBlock}

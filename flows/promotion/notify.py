"""Notifications on the outcome of runs, through a notification block of Prefect."""

import inspect
import sys

import httpx
from prefect.blocks import notifications
from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.blocks.notifications import AppriseNotificationBlock
from prefect.exceptions import ObjectNotFound

from flows.declare.pipeline import listed
from lineage.errors import ConfigError

# A webhook without a configured body sends nothing.
_PAYLOADS = {"custom-webhook": ["json_data={'text': '{{subject}}: {{body}}'}"]}


def require_block(name: str) -> None:
    """Checks before a run that the notification block exists.

    Raises:
        ConfigError: it does not exist; the message has the command that creates one.
    """
    try:
        block = Block.load(name)
    except Exception as error:  # errors of Prefect, pydantic and blocks have no common base
        if isinstance(error.__cause__, ObjectNotFound):
            raise ConfigError(f"notify={name}: Prefect has no such block; {_creation_hint(name)}") from error
        raise ConfigError(
            f"notify={name}: Prefect does not load that block ({_cause(error)}); fix it in Prefect, or notify=null"
        ) from error
    if not isinstance(block, NotificationBlock):
        raise ConfigError(f"notify={name}: is not a notification block; accepted are: {', '.join(sorted(_types()))}")


def notify(name: str, subject: str, body: str) -> None:
    """Sends a message; a failure is only printed to stderr."""
    try:
        block = Block.load(name)
        block.notify(body, subject)
    except Exception as error:  # must not fail a finished run
        print(f"posttrain: notify={name}: not sent: {_cause(error)}", file=sys.stderr)


def _cause(error: Exception) -> str:
    """The error in one line, without the URL, which contains the secret of most services."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answered {error.response.status_code}"
    if isinstance(error, httpx.TransportError):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def _creation_hint(name: str) -> str:
    slug, _, document = name.partition("/")
    types = _types()
    if slug not in types:
        return f"nor a type of blocks {slug}; types are: {listed(slug, sorted(types))}"
    cls = types[slug]
    required = [f"{key}='...'" for key, field in cls.model_fields.items() if field.is_required()]
    arguments = ", ".join([*required, *_PAYLOADS.get(slug, [])])
    statement = (
        f"from prefect.blocks.notifications import {cls.__name__}; {cls.__name__}({arguments}).save('{document}')"
    )
    return f'create it with: PREFECT_SERVER_ANALYTICS_ENABLED=false python -c "{statement}"'


def _types() -> dict[str, type[Block]]:
    """Slug -> notification block class of Prefect."""
    found = [each for _, each in inspect.getmembers(notifications, inspect.isclass)]
    senders: list[type[Block]] = [
        each for each in found if issubclass(each, NotificationBlock) and not inspect.isabstract(each)
    ]
    # The base class has no destination of its own.
    return {str(each.get_block_type_slug()): each for each in senders if each is not AppriseNotificationBlock}

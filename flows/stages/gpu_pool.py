"""GPU pools that several machines share: slots of Prefect's global concurrency limits.

A slot is held by a lease: it is given back at the end, and comes back by itself when its owner dies.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

import httpx
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound, PrefectException

from flows.prefect_address import configured_api_url
from lineage.errors import ConfigError, PipelineError

_LEASE_SECONDS = 60.0  # the least that Prefect takes
_POLL_SECONDS = 1.0

logger = logging.getLogger(__name__)


def require_pools(wanted: Mapping[str, int]) -> None:
    """Refuses, before anything starts, what would wait for ever.

    Args:
        wanted: pool -> the most slots of it that one stage takes.

    Raises:
        ConfigError: there is no such pool, or it is too small.
    """
    for pool, slots in wanted.items():
        if configured_api_url() is None:
            raise ConfigError(
                f"resources.gpu_pool={pool}: a pool is counted by a Prefect server, and none is set; set "
                "PREFECT_API_URL, or gpu_pool=null"
            )
        with get_client(sync_client=True) as client:
            try:
                limit = client.read_global_concurrency_limit_by_name(pool).limit
            except ObjectNotFound as error:
                raise _unknown(pool, slots) from error
        if limit < slots:
            raise ConfigError(
                f"resources.gpu_pool={pool}: a stage takes {slots} of its slots, and it has {limit}; use fewer GPUs, "
                f"or: prefect gcl update {pool} --limit {slots}"
            )


@contextlib.contextmanager
def pool_slots(pool: str, slots: int, waiting: Callable[[], None]) -> Iterator[None]:
    """Waits until the pool has room, then holds it.

    Args:
        waiting: called at every look that was in vain; may raise, to end the wait.
    """
    held = contextlib.ExitStack()
    while not _take(held, pool, slots):
        waiting()
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        try:
            held.close()
        except (PrefectException, httpx.HTTPError) as error:  # the lease ends by itself, and the stage is finished
            logger.warning("pool=%s slots=%s state=not_given_back: %s", pool, slots, error)


def _take(held: contextlib.ExitStack, pool: str, slots: int) -> bool:
    # A server that cannot be asked for a while ends no training, nor a wait: the slots may then be given twice.
    lease = concurrency(
        pool, slots, strict=True, max_retries=0, lease_duration=_LEASE_SECONDS, raise_on_lease_renewal_failure=False
    )
    try:
        held.enter_context(lease)
    except ConcurrencySlotAcquisitionError as error:
        cause = error.__cause__
        if isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == httpx.codes.LOCKED:
            return False
        if isinstance(cause, httpx.TransportError):
            return False
        if cause is None:  # it was deleted since
            raise _unknown(pool, slots) from error
        raise PipelineError(f"the GPU pool {pool}: {error}; see prefect gcl inspect {pool}") from error
    return True


def _unknown(pool: str, slots: int) -> ConfigError:
    return ConfigError(
        f"resources.gpu_pool={pool}: Prefect has no such global concurrency limit; make it with as many slots as the "
        f"pool has GPUs: prefect gcl create {pool} --limit {max(slots, 8)}"
    )

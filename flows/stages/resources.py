"""CPUs and GPUs for a stage: slots of this machine, of a GPU pool of several, and what a Ray cluster has.

A slot of this machine is a file lock, so that it is free again the moment its owner dies. Requests are served in the
order in which they come, GPUs apart from CPUs, so that a stage which waits for a GPU delays none that needs no GPU. A
slot of a pool is one of Prefect's global concurrency limits, held by a lease: it is given back at the end, and comes
back by itself when its owner dies.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from traceback import format_exception

from filelock import FileLock, Timeout

from flows.prefect.address import configured_api_url
from flows.stages.process_settings import stage_environment
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.remote_files import private_folder
from lineage.record.environment import list_gpus

_LEASE_SECONDS = 60.0  # the shortest that Prefect accepts

logger = logging.getLogger(__name__)

Waiting = Callable[[], None]  # called after every unsuccessful poll; may raise to end the wait


@contextlib.contextmanager
def admitted(cpus: int, gpus: int, waiting: Waiting) -> Iterator[tuple[str, ...]]:
    """Waits until the machine has capacity, then holds it.

    Args:
        cpus: a request for more than the machine has is served with all of them.
        gpus: not more than ``require_gpus`` has let pass.

    Yields:
        The GPUs, as ``CUDA_VISIBLE_DEVICES`` names them.
    """
    cores = [str(index) for index in range(count_cpus())]
    with _hold("gpu", gpus, visible_gpus(), waiting) as devices, _hold("cpu", min(cpus, len(cores)), cores, waiting):
        yield devices


def require_gpus(stage: str, gpus: int) -> None:
    """Refuses, before anything starts, a stage that would wait forever.

    Raises:
        ConfigError: there are fewer GPUs than asked.
    """
    if gpus and gpus > len(visible_gpus()):
        raise ConfigError(
            f"stages.{stage}.resources asks for {gpus} GPUs, this machine shows {len(visible_gpus())}; "
            "use resources=local for a run without, or launcher=cluster and RAY_ADDRESS for a cluster that has them"
        )


def count_cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use: those the user or a scheduler has named, else all."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device for device in named.split(",") if device and device != "-1"]
    return [str(index) for index in range(len(list_gpus("name")))]


@contextlib.contextmanager
def _hold(kind: str, wanted: int, slots: list[str], waiting: Waiting) -> Iterator[tuple[str, ...]]:
    held: list[str] = []
    with contextlib.ExitStack() as stack:
        if wanted:
            folder = private_folder() / "slots"
            folder.mkdir(exist_ok=True)
            with contextlib.ExitStack() as queue:
                _poll(lambda: _take(folder / f"{kind}.turn", queue), waiting)

                def take() -> bool:
                    for slot in slots:
                        if len(held) < wanted and slot not in held and _take(folder / f"{kind}-{slot}", stack):
                            held.append(slot)
                    return len(held) == wanted

                _poll(take, waiting)
        yield tuple(held)


def _take(path: Path, stack: contextlib.ExitStack) -> bool:
    """Acquires a lock if it is free; the stack releases it."""
    lock = FileLock(path, thread_local=False)
    with contextlib.suppress(Timeout):
        stack.enter_context(lock.acquire(blocking=False))
        return True
    return False


def _poll(done: Callable[[], bool], waiting: Waiting, seconds: float = 0.05) -> None:
    while not done():
        waiting()
        time.sleep(seconds)


# --- a pool of GPUs that several machines share


def require_pools(wanted: Mapping[str, int]) -> None:
    """Refuses, before anything starts, a stage that would wait forever.

    Args:
        wanted: pool -> the most slots of it that one stage takes.

    Raises:
        ConfigError: there is no such pool, or it is too small.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

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
                raise ConfigError(
                    f"resources.gpu_pool={pool}: Prefect has no such global concurrency limit; make it with as many "
                    f"slots as the pool has GPUs: prefect gcl create {pool} --limit {max(slots, 8)}"
                ) from error
        if limit < slots:
            raise ConfigError(
                f"resources.gpu_pool={pool}: a stage takes {slots} of its slots, and it has {limit}; use fewer GPUs, "
                f"or: prefect gcl update {pool} --limit {slots}"
            )


@contextlib.contextmanager
def pool_slots(pool: str, slots: int, waiting: Waiting) -> Iterator[None]:
    """Waits until the pool has capacity, then holds it."""
    import httpx
    from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
    from prefect.concurrency.sync import concurrency
    from prefect.exceptions import PrefectException

    held = contextlib.ExitStack()

    def take() -> bool:
        # A server that is away for a while ends neither a training nor a wait: slots may then be assigned twice.
        options = {"max_retries": 0, "lease_duration": _LEASE_SECONDS, "raise_on_lease_renewal_failure": False}
        try:
            held.enter_context(concurrency(pool, slots, strict=True, **options))
        except ConcurrencySlotAcquisitionError as error:
            cause = error.__cause__
            is_full = isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == httpx.codes.LOCKED
            if is_full or isinstance(cause, httpx.TransportError):
                return False
            raise PipelineError(f"the GPU pool {pool}: {error}; see prefect gcl inspect {pool}") from error
        return True

    _poll(take, waiting, seconds=1.0)
    try:
        yield
    finally:
        try:
            held.close()
        except (PrefectException, httpx.HTTPError) as error:  # the lease ends by itself, and the stage is finished
            logger.warning("pool=%s slots=%s state=not_given_back: %s", pool, slots, error)


# --- the Ray cluster at RAY_ADDRESS, asked in a process that leaves it again


def ask_cluster(seconds: float) -> tuple[float, float]:
    """CPUs and GPUs of the cluster.

    Args:
        seconds: to wait for its answer.

    Raises:
        ConfigError: there is none; why, in one line.
    """
    command = [sys.executable, "-P", "-m", "flows.stages.resources"]
    environment = {**stage_environment(), **os.environ}
    try:
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=True
        ).stdout
        held = json.loads(answer.splitlines()[-1])
        return float(held["CPU"]), float(held["GPU"])
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"no answer within {seconds:g} s") from error
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, KeyError) as error:
        output = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        raise ConfigError([type(error).__name__, *(output or "").strip().splitlines()][-1]) from error


def main() -> int:
    """Prints what the cluster has as one JSON object, or on stderr what is wrong."""
    import ray

    try:
        join(log_to_driver=False, configure_logging=False)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    held = ray.cluster_resources()
    print(json.dumps({"CPU": held.get("CPU", 0.0), "GPU": held.get("GPU", 0.0)}))
    return 0


def join(**options: object) -> str:
    """Joins the cluster as ``ray.init`` does; returns the address of its dashboard, or nothing.

    Raises:
        ConfigError: there is none, or it does not let us in.
    """
    import ray
    from ray.exceptions import AuthenticationError

    address = os.environ["RAY_ADDRESS"]
    try:
        return str(ray.init(address=address, **options).dashboard_url or "")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        # Ray passes it on as text, in an error below this one.
        if AuthenticationError.__name__ in "".join(format_exception(error)):
            raise ConfigError(
                f"RAY_ADDRESS={address}: the cluster wants a token and was given none, or another; "
                "set RAY_AUTH_MODE=token and put the token of its head node (`ray get-auth-token`) in RAY_AUTH_TOKEN "
                "or ~/.ray/auth_token"
            ) from error
        cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ConfigError(
            f"RAY_ADDRESS={address}: cannot be joined ({cause}); start the cluster, correct the address, "
            "or unset it for a cluster of our own"
        ) from error


if __name__ == "__main__":
    sys.exit(main())

"""CPUs and GPUs for a stage: slots of this machine, of a GPU pool of several, and what a Ray cluster has.

A slot of this machine is a file lock, so that it is free again the moment its owner dies. Requests are served in the
order in which they come, GPUs apart from CPUs, so that a stage which waits for a GPU delays none that needs no GPU. A
slot of a pool is one of Prefect's global concurrency limits, held by a lease: it is released at the end, and comes
back by itself when its owner dies.
"""

import contextlib
import importlib
import json
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, cast

from filelock import FileLock, Timeout

from flows.prefect.address import configured_api_url
from flows.progress.run_record import dashboard_file
from flows.reports.wording import counted
from flows.stages.job import Job
from flows.stages.process_settings import stage_environment, worker_environment
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.owner import Owner
from lineage.filesystem.remote_files import private_folder
from lineage.record.environment import list_gpus, run_answering
from lineage.secrets import first_line
from posttrain import PACKAGES
from tasks.context import Launcher, Resources
from tasks.data.kinds import ELSEWHERE, ONE_THREAD
from tasks.train.evaluation import asked_beside

if TYPE_CHECKING:
    import pyarrow as pa
    from ray import ObjectRef

_LEASE_SECONDS = 60.0  # the shortest that Prefect accepts
_GPU_NAME = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")  # as Ray reads it
_PROBE_SECONDS = 2.0
_ASK_SECONDS = 120.0  # joining a cluster takes seconds
_LONGEST_PARENT = 38  # of the 107 characters of a socket's path; the rest is /ray/SESSION/sockets/plasma_store
_USER = ".user"  # ending of the file beside a slot's lock that says who has it
_ACCELERATOR = "accelerator_type:"  # prefix of a node's resource in Ray

logger = logging.getLogger(__name__)

Waiting = Callable[[], None]  # called after every unsuccessful poll; may raise to end the wait


@contextlib.contextmanager
def admitted(cpus: int, gpus: int, waiting: Waiting, user: str) -> Iterator[tuple[str, ...]]:
    """Waits until the machine has capacity, then holds it.

    Args:
        cpus: a request for more than the machine has is served with all of them.
        gpus: not more than ``require_gpus`` has let pass.
        user: what they are for, such as a stage of a run: other runs name it while they wait.

    Yields:
        The GPUs, as ``CUDA_VISIBLE_DEVICES`` names them.
    """
    cores = [str(index) for index in range(count_cpus())]
    with (
        _hold("gpu", gpus, visible_gpus(), waiting, user) as devices,
        _hold("cpu", min(cpus, len(cores)), cores, waiting, user),
    ):
        yield devices


def used_by_others() -> str:
    """What other processes use this machine's slots for: ``; sft of run 7 (process 41) has them``; empty: nothing."""
    found = []
    for path in sorted((private_folder() / "slots").glob(f"*{_USER}")):
        with contextlib.suppress(OSError, ValueError):  # just released, or being written
            used = json.loads(path.read_text())
            owner = Owner(**used["owner"])
            if owner.pid != os.getpid() and owner.is_here() and not owner.is_gone():
                found.append(f"{used['user']} (process {owner.pid})")
    names = list(dict.fromkeys(found))
    return (
        f"; {' and '.join(names)} {'has' if len(names) == 1 else 'have'} them; it then starts by itself"
        if names
        else ""
    )


def require_gpus(stage: str, gpus: int, model: str | None = None, beside: int = 0) -> None:
    """Refuses, before anything starts, a stage that would wait forever.

    Args:
        model: accelerator type that the GPUs must be of; None: any.
        beside: how many of the GPUs are for what scores its checkpoints.

    Raises:
        ConfigError: there are fewer GPUs than asked, or they are of another type.
    """
    elsewhere = "or launcher=cluster and RAY_ADDRESS for a cluster that has them"
    if gpus and gpus > len(visible_gpus()):
        of = f" ({beside} of them by method.evaluation.gpus)" if beside else ""
        raise ConfigError(
            f"stages.{stage}.resources asks for {counted(gpus, 'GPU')}{of}, this machine shows {len(visible_gpus())}; "
            f"use {'evaluation.gpus=0, ' if beside else ''}resources=local for a run without, {elsewhere}"
        )
    if gpus and model and (other := {accelerator_type(name) for name in list_gpus("name")} - {model}):
        raise ConfigError(
            f"stages.{stage}.resources.gpu={model}: this machine has {', '.join(sorted(other))}; set gpu=null for any "
            f"type, {elsewhere}"
        )


def accelerator_type(name: str) -> str:
    """The accelerator type that Ray gives to a GPU of this name: H100 to NVIDIA H100 80GB HBM3."""
    found = _GPU_NAME.match(name)
    return (found[1] if found else name.removeprefix("NVIDIA").strip()).replace(" ", "-")


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
def _hold(kind: str, wanted: int, slots: list[str], waiting: Waiting, user: str) -> Iterator[tuple[str, ...]]:
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
                            named = folder / f"{kind}-{slot}{_USER}"
                            named.write_text(json.dumps({"user": user, "owner": asdict(Owner.here())}))
                            stack.callback(named.unlink, missing_ok=True)
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


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of a Ray cluster: all that it has, in use or not.

    Args:
        node: its address and id, as ``node_label`` has them.
        gpu_types: accelerator types, as Ray names them.
    """

    host: str
    node: str
    cpus: float = 0.0
    gpus: float = 0.0
    gpu_types: tuple[str, ...] = ()

    def capacity(self, resources: Resources) -> int:
        """How many workers it holds."""
        if resources.gpu and resources.gpu not in self.gpu_types:
            return 0
        gpus = [self.gpus // resources.gpus_per_worker] if resources.gpus_per_worker else []
        return int(min([self.cpus // resources.cpus_per_worker, *gpus]))

    def __str__(self) -> str:
        gpus = f", {counted(round(self.gpus), 'GPU')} {', '.join(self.gpu_types)}".rstrip() if self.gpus else ""
        return f"{self.host} ({self.node}) with {counted(round(self.cpus), 'CPU')}{gpus}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes of a Ray cluster that are alive.

    Args:
        grows: an autoscaler may add nodes.
    """

    nodes: tuple[Node, ...]
    grows: bool = False

    def holds(self, resources: Resources) -> bool:
        """Whether as many nodes as asked hold their share of the workers, once nothing else uses them."""
        share = resources.num_workers // resources.num_nodes
        return sum(node.capacity(resources) >= share for node in self.nodes) >= resources.num_nodes

    def reduced(self, resources: Resources, global_batch_size: int | None, islands: int = 1) -> Resources | None:
        """The same with the most workers, not below ``min_workers``, that it holds and that divide the global batch.

        Args:
            global_batch_size: None: of a stage without steps.
            islands: of ``method.diloco``, over which the workers divide.

        Returns:
            None: there are none.
        """
        least = resources.min_workers or resources.num_workers
        if resources.sharding != "none" and resources.num_workers > 1:
            least = max(2 * islands, least)  # one worker has nothing to divide
        fewest = 1 if resources.min_workers else resources.num_nodes
        for workers in range(resources.num_workers, least - 1, -1):
            for nodes in range(min(workers, resources.num_nodes), fewest - 1, -1):
                fewer = replace(resources, num_workers=workers, num_nodes=nodes, launcher=Launcher.CLUSTER)
                divides = global_batch_size is None or fewer.divides(global_batch_size)
                if workers % nodes == 0 and workers % islands == 0 and divides and self.holds(fewer):
                    return fewer
        return None

    def __str__(self) -> str:
        return f"{counted(len(self.nodes), 'node')}: {'; '.join(map(str, self.nodes))}"


def describe_workers(resources: Resources) -> str:
    """What a stage asks of a cluster: ``4 workers with 1 CPU and 1 H100 each, on 2 nodes``."""
    gpus = f" and {resources.gpus_per_worker} {resources.gpu or 'GPU'}" if resources.gpus_per_worker else ""
    each = f"{counted(resources.cpus_per_worker, 'CPU')}{gpus} each"
    return f"{counted(resources.num_workers, 'worker')} with {each}, on {counted(resources.num_nodes, 'node')}"


def require_cluster(
    stage: str, resources: Resources, global_batch_size: int | None, cluster: Cluster, islands: int = 1
) -> None:
    """Refuses, before anything starts, a stage for which the cluster has too little also when it is idle."""
    if cluster.grows or cluster.reduced(resources, global_batch_size, islands):
        return
    has, setting = f"the cluster has {cluster}", f"stages.{stage}.resources"
    if resources.gpu and not any(resources.gpu in node.gpu_types for node in cluster.nodes):
        raise ConfigError(
            f"{setting}.gpu={resources.gpu}: no node has one; {has}; set gpu to a type that it has, or null"
        )
    if resources.num_nodes > len(cluster.nodes):
        raise ConfigError(
            f"{setting}.num_nodes={resources.num_nodes}: {has}; call `ray start --address=...` on more machines, or "
            f"set num_nodes={len(cluster.nodes)}"
        )
    raise ConfigError(
        f"{setting} asks for {describe_workers(resources)}, in equal shares, and they do not fit: {has}; change "
        "num_workers or num_nodes, which do not change the model, or add nodes"
    )


def require_beside(stage: str, resources: Resources, beside: tuple[int, int], cluster: Cluster) -> None:
    """Refuses what scores checkpoints where a cluster has no CPU or GPU for it beside the workers."""
    workers = resources.min_workers or resources.num_workers
    cpus = sum(node.cpus for node in cluster.nodes) - workers * resources.cpus_per_worker
    gpus = sum(node.gpus for node in cluster.nodes) - workers * resources.gpus_per_worker
    if any(beside) and not cluster.grows and (cpus < beside[0] or gpus < beside[1]):
        raise ConfigError(
            f"stages.{stage}.method.evaluation asks for {counted(beside[0], 'CPU')} and {counted(beside[1], 'GPU')} "
            f"beside the workers, and they do not fit: the cluster has {cluster}; set evaluation.gpus=0, or fewer "
            f"workers in stages.{stage}.resources"
        )


def ask_cluster(seconds: float = _ASK_SECONDS) -> Cluster:
    """The nodes of the cluster at RAY_ADDRESS.

    Args:
        seconds: to wait for its answer.

    Raises:
        ConfigError: there is none; why, in one line.
    """
    command = [sys.executable, "-P", "-m", "flows.stages.resources"]
    environment = {**stage_environment(), **os.environ}
    try:
        done = run_answering(command, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        address = os.environ.get("RAY_ADDRESS")
        raise ConfigError(f"RAY_ADDRESS={address}: no answer within {seconds:g} s; is it reachable?") from error
    if not done.stdout:
        raise ConfigError([f"exit code {done.returncode}", *done.stderr.strip().splitlines()][-1])
    found = json.loads(done.stdout)
    if isinstance(found, str):
        raise ConfigError(found)
    nodes = [Node(**{**each, "gpu_types": tuple(each["gpu_types"])}) for each in found["nodes"]]
    return Cluster(nodes=tuple(nodes), grows=found["grows"])


def joined_cluster() -> Cluster:
    """The nodes of the cluster that this process has joined; Ray notices only after many seconds that one is gone."""
    import ray
    from ray._private.state import state

    nodes = [each for each in ray.nodes() if each["Alive"]]
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):  # from outside, its nodes may not be reached
        return Cluster(nodes=tuple(map(_node, nodes)), grows=True)
    nodes = [each for each in nodes if _accepts(each["NodeManagerAddress"], each["NodeManagerPort"])]
    return Cluster(nodes=tuple(map(_node, nodes)), grows=bool(state.get_max_resources_from_cluster_config()))


def _accepts(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_PROBE_SECONDS):
        return True
    return False


def _node(found: Mapping[str, object]) -> Node:
    """A node of ``ray.nodes()``."""
    held = cast(Mapping[str, float], found["Resources"])
    return Node(
        host=str(found["NodeManagerHostname"]),
        node=node_label(str(found["NodeManagerAddress"]), str(found["NodeID"])),
        cpus=held.get("CPU", 0.0), gpus=held.get("GPU", 0.0),
        gpu_types=tuple(sorted(name.removeprefix(_ACCELERATOR) for name in held if name.startswith(_ACCELERATOR))),
    )  # fmt: skip


def node_label(address: str, node_id: str) -> str:
    """What names a node: several may share a host, and an address."""
    return f"{address}, node {node_id[:8]}"


def main() -> int:
    """Answers with what the cluster has as a JSON object, or with a text that says what is wrong."""
    found: object
    try:
        join(log_to_driver=False, configure_logging=False)
        found = asdict(joined_cluster())
    except ConfigError as error:
        found = str(error)
    with os.fdopen(int(sys.argv[1]), "w") as answer:
        json.dump(found, answer)
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
        cause = first_line(error)
        raise ConfigError(
            f"RAY_ADDRESS={address}: cannot be joined ({cause}); start the cluster, correct the address, "
            "or unset it for a cluster of our own"
        ) from error


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """Keeps what SIGTERM means to us, which ``ray.init`` replaces.

    The processes that it starts do not receive it at all: a machine that is to go down sends it to every process,
    and the workers must still save. They end with us.
    """
    handler = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def connect(job: Job) -> None:
    """Joins the cluster at RAY_ADDRESS, or starts one on this machine that ends with this process."""
    import ray

    resources, beside = job.resources, asked_beside(job.method)
    environment = {
        "py_modules": _packages(job),
        "worker_process_setup_hook": "posttrain.hold",  # Ray puts the current folder before all others
        "env_vars": {**worker_environment(), "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"},
    }
    if os.environ.get("RAY_ADDRESS"):
        address = join(runtime_env=environment, log_to_driver=True)
        if address:
            dashboard_file(job.directory).write_text(address)
        return
    ray.init(
        address="local",  # a cluster of our own, whatever else runs here
        # One CPU more, for Ray Train's own controller: the workers have theirs to themselves.
        num_cpus=resources.num_workers * resources.cpus_per_worker + 1 + beside[0],
        num_gpus=resources.num_workers * resources.gpus_per_worker + beside[1],
        include_dashboard=False,
        runtime_env=environment,
        log_to_driver=True,
        _temp_dir=str(_session_parent()),
    )


def _session_parent() -> Path:
    """The directory of Ray's session, inside one that no other account can enter: Ray gives the session mode 0777."""
    folder = private_folder(os.environ.get("RAY_TMPDIR"))
    if len(str(folder)) > _LONGEST_PARENT:
        folder = private_folder("/tmp")
    return folder / "ray"


def _packages(job: Job) -> list[str]:
    """The package directories that the workers need: ours, and that of the user's own method.

    Raises:
        ConfigError: the method is a single file, which does not travel.
    """
    own = type(job.method).__module__.partition(".")[0]
    modules = [importlib.import_module(name) for name in sorted({"posttrain", *PACKAGES, own})]
    if not all(hasattr(module, "__path__") for module in modules):
        raise ConfigError(
            f"stages.{job.stage}.method: {own}.py is a single file and code travels to a cluster as packages; "
            f"make it {own}/__init__.py, or a module of a package"
        )
    return [next(iter(module.__path__)) for module in modules]


def last_line(error: Exception) -> str:
    """An error's type, and its most specific line: the first lines of Ray's errors are all the same."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__


# --- rows on Ray Data

_AHEAD_BYTES = 2**24  # of rows per process that are handed to Ray at once; the next are read when their results are
_ROW_RETRIES = 3  # of rows whose process was killed, or whose node is gone; Ray Data itself never stops trying
_map_rows: dict["ObjectRef[bytes]", Callable[[object], object]] = {}  # of a process of Ray's, which maps many batches


@contextlib.contextmanager
def rows_mapped(job: Job) -> Iterator[None]:
    """Within it, Ray Data maps what is more than the rows of a moment, if ``resources.rows`` asks for it.

    A worker of Ray Train maps rows itself: those that it reads were tokenized before, and its group has the CPUs.
    """
    on_ray = job.resources.rows_on_ray and not job.resources.on_cluster
    with contextlib.ExitStack() as connected:
        token = ELSEWHERE.set(partial(_mapped_on_ray, job, connected) if on_ray else None)
        try:
            yield
        finally:
            ELSEWHERE.reset(token)


def _mapped_on_ray(
    job: Job, connected: contextlib.ExitStack, function: Callable[[object], object], items: Iterator[object]
) -> Iterator[object]:
    """Maps items in order on the cluster, some MB at a time: they are read here, since sources may be here alone.

    Raises:
        PipelineError: processes died again and again, or the cluster has no CPU for ``wait_minutes``.
    """
    import ray
    from ray.data.exceptions import ExecutionTimeoutError
    from ray.exceptions import RayError

    used = job.resources.num_workers * job.resources.cpus_per_worker
    if not ray.is_initialized():
        with own_sigterm():
            connect(job)
        connected.callback(ray.shutdown)
    processes = max(used, job.row_processes) if os.environ.get("RAY_ADDRESS") else used
    logger.info("stage=%s rows=ray processes=%d", job.stage, processes)
    try:
        sent = ray.put(pickle.dumps(function))
        while batch := list(_up_to(processes * _AHEAD_BYTES, items)):
            for result, error in _mapped_batch(job, sent, batch, processes):
                if error is not None:
                    raise error
                yield result
    except ExecutionTimeoutError as error:
        raise PipelineError(
            f"Ray Data mapped no rows for {job.resources.wait_minutes:g} minutes (resources.wait_minutes): no CPU of "
            "the cluster is free; wait for other stages, add nodes, or set resources.rows=local"
        ) from error
    except RayError as error:
        raise PipelineError(
            f"processes of Ray that work on rows died {_ROW_RETRIES + 1} times ({last_line(error)}); out of memory? "
            "Free some, or set fewer cpus_per_worker or num_workers: each CPU is one process"
        ) from error
    finally:
        if job.method.trains:  # the training needs no cluster, which may end before it does
            connected.close()


def _up_to(most: int, items: Iterator[object]) -> Iterator[bytes]:
    """The next items, pickled, until they have this many bytes."""
    size = 0
    while size < most and (item := next(items, items)) is not items:
        raw = pickle.dumps(item)
        size += len(raw)
        yield raw


def _mapped_batch(
    job: Job, sent: "ObjectRef[bytes]", items: Sequence[bytes], processes: int
) -> Iterator[tuple[object, Exception | None]]:
    """The results of some items in order; after the first error there are none."""
    from ray import data

    context = data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_no_progress_timeout_s = 60 * job.resources.wait_minutes
    # ``from_arrow`` has a task describe the blocks, and waits for a CPU without a limit.
    rows = data.from_items([{"item": item} for item in items], override_num_blocks=len(items))
    mapped = rows.map_batches(
        partial(_map_block, sent), batch_size=None, batch_format="pyarrow", num_cpus=1,
        compute=data.TaskPoolStrategy(size=processes), max_retries=_ROW_RETRIES,
    )  # fmt: skip
    for block in mapped.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield from map(pickle.loads, block["result"].to_pylist())


def _map_block(sent: "ObjectRef[bytes]", block: "pa.Table") -> "pa.Table":
    """Maps the item of a block, in a process of Ray's; an error of the function is its result."""
    import pyarrow as pa
    import ray

    if sent not in _map_rows:
        os.environ.update(ONE_THREAD)
        _map_rows.clear()
        _map_rows[sent] = pickle.loads(ray.get(sent))
    results: list[tuple[object, Exception | None]] = []
    for item in block["item"].to_pylist():
        try:
            results.append((_map_rows[sent](pickle.loads(item)), None))
        except Exception as error:
            results.append((None, error))
    return pa.table({"result": pa.array(list(map(pickle.dumps, results)), pa.large_binary())})


if __name__ == "__main__":
    sys.exit(main())

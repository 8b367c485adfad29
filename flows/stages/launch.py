"""The process of a stage: the run starts it, waits for its answer and can stop it; inside, it runs the method.

Ray Train is around a training: local mode for one worker, a cluster for more.
"""

import atexit
import contextlib
import gc
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypedDict, cast

import psutil

from flows.reports.wording import counted
from flows.stages.exit_reasons import (
    HangWatch,
    asked,
    cluster_lost,
    death,
    failed,
    left,
    lost,
    memory_hint,
    memory_kills,
    no_capacity,
    waited_for,
)
from flows.stages.job import Job
from flows.stages.process_settings import set_environment, stage_environment
from flows.stages.resources import (
    connect,
    describe_workers,
    joined_cluster,
    last_line,
    node_label,
    own_sigterm,
    rows_mapped,
)
from flows.stages.stops import ended, hurried
from lineage.errors import ArtifactError, LostError, PipelineError, StageError, StoppedError, TakenOverError
from lineage.filesystem.disk import explain_full_disk
from lineage.filesystem.files import append_jsonl
from lineage.record.environment import hardware
from lineage.record.metrics_file import Part, write_part
from lineage.secrets import first_line
from lineage.store import COMPILED
from posttrain import hold
from tasks.context import Launcher, Metrics, Resources, TrainContext
from tasks.judgement.check_rows import POLICY
from tasks.judgement.disk_need import require_disk
from tasks.method import Method, Training
from tasks.model.adapter_files import base_and_adapters
from tasks.train.loop.heartbeat import HeartbeatFile, Phase, heartbeats

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from tasks.train.loop.evaluation import Job as ScoringJob
    from tasks.train.loop.evaluation import Request, Scorer, Scores

Answer = Metrics | StageError | StoppedError
Work = Callable[[int, int, str], Metrics]  # of one worker: its rank, the number of workers, and its node

_RAY = ("ray.train.torch", "ray.train.v2._internal.exceptions")  # what `train` and the functions below it import
FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def saving_first(job: Job) -> Iterator[None]:
    """Around a stage; where it trains in this very process, a signal that asks us to end first asks it to save.

    The signal takes effect when the stage ends: in its last step, after which nothing is saved, once its output is
    committed. A second Ctrl-C takes effect at once.
    """
    asked: list[int] = []
    handlers = {number: signal.getsignal(number) for number in FOR_US}
    trains_here = job.method.trains and job.resources.launcher == Launcher.FOREGROUND
    changed = [number for number in FOR_US if trains_here and handlers[number] != signal.SIG_IGN]

    def ask_it(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        job.ask_to_stop()
        signal.signal(signal.SIGINT, handlers[signal.SIGINT])

    for number in changed:
        signal.signal(number, ask_it)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, handlers[number])
        if asked:
            signal.raise_signal(asked[0])


def kill(process: BaseProcess) -> None:
    """Kills a stage and everything that it has started."""
    assert process.pid is not None
    kill_session(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(process.pid, signal.SIGKILL)  # the stage made its pid its group
        except ProcessLookupError:
            if process.is_alive():  # it is starting, and does not lead a group yet
                os.kill(process.pid, signal.SIGKILL)


def end_fork_server() -> None:
    """It ends by itself when we do, but first finishes its imports."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                child.kill()


def shares_imports(method: Method, resources: Resources, *, is_first: bool) -> bool:
    """Whether a stage starts from the fork server: else it need not wait for what that imports.

    transformers imports torchao where it is installed, and torchao initializes CUDA, which no forked process can then
    use: there a stage with a GPU imports everything itself.

    Args:
        is_first: it reads sources alone, and so starts during the imports.
    """
    if resources.gpus_per_worker and find_spec("torchao"):
        return False
    return method.trains or bool(method.preload and not is_first)


def modules_of(methods: Sequence[type[Method]]) -> list[str]:
    """The modules of these methods and of what runs them, without duplicates; none if there are no methods."""
    own = [module for method in methods for module in method.preload]
    around = ["flows.stages.launch", *_RAY] if any(method.trains for method in methods) else []
    return list(dict.fromkeys(["flows.stages.imports_begin", *own, *around])) if methods else []


_GRACE_SECONDS = 5.0  # for a process that has answered
_PART_SECONDS = 1.0  # between notes of how far a stage is between two reports
_POLL_SECONDS = 0.1
_WHOLE_SECONDS = 2.0  # until it is known whether the run, not just one stage, was asked to end
_SAVE_SECONDS = 20.0  # for a training that saves first; the process that stops us gives 30 s in all


class StageProcesses:
    """The stages' processes of one run.

    A fork server that has imported torch, transformers, trl and ray starts each training stage in
    milliseconds; stages that only read and write rows start in a fresh interpreter beside it.
    """

    def __init__(self) -> None:
        self._running: dict[Path, tuple[Job, BaseProcess]] = {}  # by the stage's directory
        self._unwanted: dict[Path, PipelineError] = {}  # directory -> why
        self._starting = threading.Lock()
        self._stopped = threading.Event()

    def warm_up(self, modules: Sequence[str]) -> None:
        """Starts the fork server's imports, without waiting for them."""
        from multiprocessing.forkserver import ensure_running
        from multiprocessing.resource_tracker import ensure_running as ensure_tracker

        multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
        set_environment()
        # A signal to our process group is for us: without the fork server its stages could not be waited for. It
        # starts with these blocked, and ignores them from its first import on; one that comes now waits for us.
        before, is_safe = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_US), "PYTHONSAFEPATH" in os.environ
        try:
            ensure_tracker()  # which unblocks what it has blocked
            signal.pthread_sigmask(signal.SIG_BLOCK, FOR_US)
            os.environ["PYTHONSAFEPATH"] = "1"  # it imports by name, and the current folder would come first
            ensure_running()
        finally:
            if not is_safe:
                os.environ.pop("PYTHONSAFEPATH", None)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        atexit.unregister(end_fork_server)
        atexit.register(end_fork_server)  # until then the next run of this process finds its imports done

    def raise_if_ended(self, directory: Path) -> None:
        """For callers that wait with one stage.

        Raises:
            StoppedError: the run is being stopped.
            PipelineError: the ``why`` of ``end``; once.
        """
        if self._stopped.is_set():
            raise StoppedError("the run was stopped")
        if (why := self._unwanted.pop(directory, None)) is not None:
            raise why

    def run(self, job: Job) -> Metrics:
        """Runs a job to its end.

        Raises:
            StageError: the stage raised, or its process died.
            StoppedError: the run is being stopped.
            PipelineError: this stage was ended: the ``why`` of ``end``.
        """
        self.raise_if_ended(job.directory)
        set_environment()
        if job.resources.launcher == Launcher.FOREGROUND:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
                reply = answer(job)
            if isinstance(reply, StoppedError):
                ended.append(left(job))
        else:
            reply = self._in_process(job)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _in_process(self, job: Job) -> Answer:
        kills = memory_kills()
        process, reader = self._start(job)
        try:
            reply = self._answer(job, process, reader)
        except KeyboardInterrupt:  # it is waited for in the command's own thread, as by `posttrain stage`
            self.stop()
            reply = None
        finally:
            process.join(_GRACE_SECONDS)
            kill(process)  # what the stage started and left behind, or the stage itself
            process.join()
            self._running.pop(job.directory, None)
        if isinstance(reply, StoppedError | LostError | None):
            if process.exitcode != -signal.SIGKILL:  # it may be that the whole run was asked to end
                self._stopped.wait(_WHOLE_SECONDS)
            if self._stopped.is_set():
                ended.append(left(job))
            self.raise_if_ended(job.directory)
        if isinstance(reply, StoppedError):
            return asked(job, reply)
        return death(job, process.exitcode, kills) if reply is None else reply

    def _start(self, job: Job) -> tuple[BaseProcess, Connection]:
        reader, writer = multiprocessing.Pipe(duplex=False)
        is_first = all(each.planned.source is not None for each in job.inputs.values())
        shares = shares_imports(job.method, job.resources, is_first=is_first)
        context = multiprocessing.get_context("forkserver") if shares else multiprocessing.get_context("spawn")
        # The fork server itself has the environment of the run that started it.
        process = context.Process(target=stage_main, args=(job, writer, dict(os.environ)), name=job.stage)
        try:
            with self._starting:
                process.start()
        except (OSError, EOFError):
            self.raise_if_ended(job.directory)  # a stop has taken the fork server away
            raise
        self._running[job.directory] = job, process
        writer.close()
        if self._stopped.is_set() or job.directory in self._unwanted:  # since it was asked above
            kill(process)
        return process, reader

    def _answer(self, job: Job, process: BaseProcess, reader: Connection) -> Answer | None:
        """Waits for the answer; None: the process died, or was ended."""
        watch = HangWatch(job)
        while not wait([reader, process.sentinel], watch.pause_seconds):
            if hung := watch.hung():
                self.end(job.directory, hung)
                return None
        try:
            return cast(Answer, reader.recv()) if reader.poll() else None
        except EOFError:
            return None

    def stop(self) -> None:
        """Stops the run: ends every stage that runs, and the fork server, for whose imports one may be waiting."""
        self.end_all()
        end_fork_server()

    def end_all(self) -> None:
        """Ends every running stage with all that it has started: a training saves first, unless that takes too long."""
        self._stopped.set()
        running = list(self._running.values())
        for job, process in running:
            if job.method.trains:
                job.ask_to_stop()
            else:
                kill(process)
        deadline = time.monotonic() + _SAVE_SECONDS
        for _, process in running:
            while process.is_alive() and time.monotonic() < deadline and not hurried.is_set():
                process.join(_POLL_SECONDS)
            kill(process)

    def end(self, directory: Path, why: PipelineError | None) -> None:
        """Kills one stage with all that it has started, now or when it would start.

        Args:
            why: raised to callers that wait; None: none is raised, and the stage is lost as by a machine that fails.
        """
        if why is not None:
            self._unwanted[directory] = why
        if running := self._running.get(directory):
            kill(running[1])


# --- inside the process


def stage_main(job: Job, connection: Connection, environment: dict[str, str]) -> None:
    """Entry point of the process.

    Args:
        environment: of the run; a process that a fork server started has that of an earlier one.
    """
    hold()
    gc.freeze()  # a collection would touch, and so copy, everything that the fork server imported
    gc.enable()
    os.environ.clear()
    os.environ.update(environment)
    if job.visible_gpus:
        seen = job.visible_gpus if job.resources.on_cluster else job.gpus[0]  # a cluster assigns them itself
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen)
    os.setsid()  # a session and a group of its own: whatever the stage starts can be ended with it
    threading.Thread(target=_die_with_parent, daemon=True, name="die-with-parent").start()
    _log_to(job)
    # A scheduler that ends a machine asks every process of it: save first, as if our driver had asked. The fork server
    # ignores the signal, and so do the processes that it starts.
    signal.signal(signal.SIGTERM, (lambda *_: job.ask_to_stop()) if job.method.trains else signal.SIG_DFL)
    reply = answer(job)
    with contextlib.suppress(OSError):  # the log is on a full disk
        sys.stdout.flush()
    connection.send(reply)
    connection.close()


def answer(job: Job) -> Answer:
    """Runs a job; every way to fail becomes one error that names the stage, the cause and the log."""
    try:
        if job.method.trains or job.resources.on_cluster:
            return finite(train(job, partial(run_worker, job)))
        return finite(run_worker(job))
    except StoppedError as error:
        logger.info("stage=%s state=stopped: %s", job.stage, error)
        return error
    except (Exception, SystemExit) as error:  # a method's `sys.exit()` ends it, not us
        with contextlib.suppress(OSError):  # the log is on a full disk, as the answer says
            traceback.print_exc()
        if isinstance(error, StageError):  # it already names the worker
            return error
        return failed(job, None if job.resources.on_cluster else 0, error)


def finite(metrics: Metrics) -> dict[str, float]:
    """The metrics that JSON can represent; one that it cannot must not cost a trained model."""
    kept = {name: value for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)}
    for name in metrics.keys() - kept.keys():
        logger.warning("metric=%s value=%r is no finite number and is left out", name, metrics[name])
    return kept


def kill_session(leader: int) -> None:
    """Kills every process of a session except this one, including Ray's workers, which lead their own groups."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    kill_session(os.getpid())
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _log_to(job: Job) -> None:
    log = os.open(job.entry.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )


def run_worker(job: Job, rank: int = 0, world_size: int = 1, node: str = "") -> Metrics:
    """Runs a job's method as one of ``world_size`` workers.

    Args:
        node: as in ``Heartbeat``.

    Raises:
        ArtifactError: this worker does not see the store.
        PipelineError: the method's own, or the disk is full.
    """
    require_store(job, node)
    pin_threads(job.resources.cpus_per_worker)
    keep_compiled(job.cache / COMPILED)
    start = time.perf_counter()
    with explain_full_disk(job.directory), contextlib.ExitStack() as stack:
        heartbeat = None
        if job.method.trains or job.resources.on_cluster:
            minutes = job.resources.hang_minutes if job.method.trains else None
            gpu = hardware().get("gpu", "") if job.resources.gpus_per_worker else ""
            heartbeat = HeartbeatFile(job.entry.work, rank, 60 * minutes if minutes else None, node, gpu)
            stack.callback(heartbeat.end)
        context = context_of(job, rank, world_size, heartbeat)
        context.mark(None, Phase.FETCHING)
        inputs = job.resolve_inputs()
        context.mark(None, Phase.LOADING)
        if isinstance(job.method, Training) and POLICY in inputs and rank == 0:
            model, _ = base_and_adapters(inputs[POLICY].path)
            require_disk(job.stage, job.method, job.resources, model, job.entry)
        stack.enter_context(rows_mapped(job))
        metrics = job.method.run(inputs, context)
    logger.info("stage=%s rank=%s state=done seconds=%.1f", job.stage, rank, time.perf_counter() - start)
    return metrics


def require_store(job: Job, node: str) -> None:
    """Requires that a worker sees the store: a directory of the same name on a disk of its own lacks the stage's lock.

    Raises:
        ArtifactError: it does not.
    """
    with contextlib.suppress(TakenOverError):
        if job.directory.is_dir():
            job.require_lease()
            return
    where = f"{socket.gethostname()} ({node})" if node else socket.gethostname()
    raise ArtifactError(
        f"{where} does not see {job.directory} as the driver does: the workers of a cluster write to the store "
        "themselves; give a `store` that every node mounts"
    )


def keep_compiled(folder: Path) -> None:
    """Keeps what torch and Triton compile beside the store's other caches, unless the user has set a folder."""
    ours = stage_environment()["TORCHINDUCTOR_CACHE_DIR"]
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", ours) == ours:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    for each in folder.glob("*"):
        os.utime(each)  # `gc` reads it as the time of last use


def context_of(job: Job, rank: int = 0, world_size: int = 1, heartbeat: HeartbeatFile | None = None) -> TrainContext:
    """The method's view of the job."""

    last_step, shown = 0, 0.0

    def part(what: str, done: int, of: int) -> None:
        nonlocal shown
        if rank == 0 and time.monotonic() - shown > _PART_SECONDS:
            shown = time.monotonic()
            with contextlib.suppress(OSError):  # it is for the screen alone
                write_part(entry.work, Part(step=last_step, what=what, done=done, of=of))

    def report(step: int, metrics: Metrics) -> None:
        """Appends a line to ``metrics.jsonl``; also where a worker ends that outlived its driver and its lock."""
        nonlocal last_step
        last_step = step
        if heartbeat:
            heartbeat.mark(step, Phase.BETWEEN)
        if rank == 0:
            job.require_lease()
            if isinstance(job.method, Training):
                job.require_loaded()
            record = {"step": step, "time": time.time(), "metrics": dict(metrics)}
            append_jsonl(job.entry.metrics, record, flush=False)

    entry = job.entry
    context = TrainContext(
        output_dir=entry.output, work_dir=entry.work, resources=job.resources, rank=rank, world_size=world_size,
        report=report, part=part, cache_dir=job.cache, checkpoint_dir=entry.checkpoints.directory,
        require_lease=job.require_lease, resume_from=job.resume_from, should_stop=job.is_asked_to_stop,
        loaded=job.require_loaded, changed_models=job.changed_models, scorer=_scorer(job), most_rows=job.most_rows,
    )  # fmt: skip
    return replace(context, mark=heartbeat.mark) if heartbeat else context


def _scorer(job: Job) -> "Callable[[ScoringJob], Scorer] | None":
    """What scores the checkpoints of a training; None: nothing does."""
    if not isinstance(job.method, Training) or job.method.evaluation is None:
        return None
    if job.resources.on_cluster:
        return partial(ScoringTask, job.resources.wait_minutes)
    from tasks.train.loop.evaluation import ScoringProcess

    return partial(ScoringProcess, gpus=job.gpus[1] or None)


def pin_threads(count: int) -> None:
    """Fixes the threads of every library: sums over other splits differ in their last bits."""
    os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(count)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"
    if "torch" in sys.modules:  # else it will read the variables: a stage that only reads rows needs no torch
        import torch

        torch.set_num_threads(count)


# --- Ray Train around a training

_PEER_SECONDS = 5.0
_NODE_SECONDS = 3.0  # from the death of a node's first process to that of its raylet
_NODE_GONE = ": its node is gone"
_POLL_NODES_SECONDS = 1.0
# Torch's own limit of a wait for others comes last: `HangWatch` finds who hangs, and a save takes as long as it takes.
_WAIT_SECONDS = 7 * 24 * 3600


def train(job: Job, work: Work) -> Metrics:
    """Runs a job's work through ``TorchTrainer`` and returns rank 0's metrics."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    if job.resources.on_cluster:
        return _train_on_cluster(job, work)
    # Ray Train's local mode: in this process, without a cluster or actors.
    trainer = TorchTrainer(lambda: work(0, 1, ""), scaling_config=ScalingConfig(num_workers=0))
    return cast(Metrics, trainer.fit().return_value)


def _train_on_cluster(job: Job, work: Work) -> Metrics:
    import ray
    from ray.exceptions import RayError
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    resources, kills = job.resources, memory_kills()
    joins = bool(os.environ.get("RAY_ADDRESS"))
    # Of a wait for the nodes of a cluster, which has ended before unless another stage was faster.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(60 * resources.wait_minutes)
    try:
        with own_sigterm():
            connect(job)
        nodes = _reserve(job) if joins else []
        trainer = TorchTrainer(
            _worker_loop,
            train_loop_config={"work": work, "joins": joins},
            torch_config=TorchConfig(
                timeout_s=round(60 * resources.timeout_minutes) if resources.timeout_minutes else _WAIT_SECONDS
            ),
            scaling_config=ScalingConfig(
                num_workers=resources.num_workers,
                use_gpu=resources.gpus_per_worker > 0,
                accelerator_type=resources.gpu,
                resources_per_worker=_needs(resources),
                label_selector=[{"ray.io/node-id": node} for node in nodes] or None,
                placement_strategy="PACK",
            ),
            # The store is the only place of checkpoints; what Ray keeps of its own is scratch.
            # It retries nothing: the driver does, which knows the newest checkpoint.
            run_config=RunConfig(
                name="ray",
                storage_path=str(job.entry.work),
                failure_config=FailureConfig(max_failures=0, max_preemption_failures=0, controller_failure_limit=0),
            ),
        )
        return cast(Metrics, trainer.fit().return_value)
    except (TrainingFailedError, RayError) as error:
        raise failure_of(job, error, kills) from error
    finally:
        ray.shutdown()


class _Scores:
    """Ray's actor of ``ScoringTask``."""

    def answer(self, job: "ScoringJob", request: "Request") -> "Scores":
        from tasks.evaluate.beside import answer

        return answer(job, request)


class ScoringTask:
    """Scores checkpoints in a task of the cluster with CPUs and a GPU of its own, in another where it has died.

    It ends with the worker that starts it. Ray Train's ``ValidationConfig`` would not do: see docs/training.md.
    """

    def __init__(self, wait_minutes: float, job: "ScoringJob") -> None:
        self.job, self.minutes = job, wait_minutes
        self._actor: ActorHandle[_Scores] | None = None
        self._deadline = time.monotonic() + 60 * wait_minutes

    def score(self, request: "Request") -> "Scores":
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        from tasks.train.loop.evaluation import Scores

        setting = self.job.setting
        if self._actor is None:
            self._actor = ray.remote(_Scores).options(num_cpus=setting.cpus, num_gpus=setting.gpus).remote()
        try:
            ray.get(self._actor.__ray_ready__.remote(), timeout=max(1.0, self._deadline - time.monotonic()))
            return cast("Scores", ray.get(self._actor.answer.remote(self.job, request)))
        except GetTimeoutError:
            asked = f"{counted(setting.cpus, 'CPU')} and {counted(setting.gpus, 'GPU')}"
            why = f"the cluster had no {asked} for it within {self.minutes:g} minutes (resources.wait_minutes)"
        except RayActorError as error:
            self._actor, why = None, f"its process ended: {first_line(error)}"
        return Scores(step=request.step, digest=request.digest, error=why)

    def end(self) -> None:
        import ray

        if self._actor:
            ray.kill(self._actor)


def _needs(resources: Resources, workers: int = 1) -> dict[str, float]:
    """What workers take of a node, by Ray's names."""
    needs = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    return {name: float(workers * each) for name, each in needs.items() if each}


def _reserve(job: Job) -> list[str]:
    """Waits until ``num_nodes`` nodes have capacity for equal shares of the workers; returns each worker's node id.

    Ray's strategies place workers as they fit, or each on a node of its own. A group with a bundle for each node is
    placed as asked, and an autoscaler sees it. It is released at once, and the workers take its place by label.

    Raises:
        StageError: there are no such nodes within ``wait_minutes``; says what the cluster has.
        StoppedError: the stage is asked to stop.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    resources = job.resources
    share = resources.num_workers // resources.num_nodes
    gpu = {f"accelerator_type:{resources.gpu}": 0.001} if resources.gpu else {}
    group = placement_group([{**_needs(resources, share), **gpu}] * resources.num_nodes, strategy="STRICT_SPREAD")
    deadline = time.monotonic() + 60 * resources.wait_minutes
    try:
        while not group.wait(_POLL_NODES_SECONDS):
            if job.is_asked_to_stop():
                raise StoppedError(f"stopped while it waited for {describe_workers(resources)}")
            if time.monotonic() > deadline:
                raise no_capacity(job, joined_cluster())
        placed = placement_group_table(group)["bundles_to_node_id"]
        return [placed[index] for index in sorted(placed) for _ in range(share)]
    finally:
        remove_placement_group(group)


class _Config(TypedDict):
    """The settings of a worker.

    Args:
        joins: it is on a cluster of others, where a host alone may not name a node.
    """

    work: Work
    joins: bool


def _worker_loop(config: _Config) -> dict[str, float]:
    from ray import get_runtime_context
    from ray.train import get_context
    from ray.train.torch import get_device
    from ray.util import get_node_ip_address
    from torch import cuda

    context = get_context()
    if (device := get_device()).type == "cuda":  # a worker sees all GPUs of its node's workers
        cuda.set_device(device)
    node = node_label(get_node_ip_address(), get_runtime_context().get_node_id()) if config["joins"] else ""
    try:
        return dict(config["work"](context.get_world_rank(), context.get_world_size(), node))
    except Exception as error:
        if lost_its_peer(error):
            time.sleep(_PEER_SECONDS)  # Ray reports the first failure that it sees: that should be the peer's
        raise


# What gloo and NCCL say of a peer that is gone: it follows from what ended the peer, and is no cause.
_PEER_GONE = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process exited",
    "read timeout", "connection refused",
)  # fmt: skip
_TIMED_OUT = "timed out waiting"  # what gloo says when ``timeout_minutes`` are over


def lost_its_peer(error: BaseException) -> bool:
    """Whether a worker raised the error because another worker is gone, or does not come."""
    text = str(error).lower()
    is_distributed = isinstance(error, RuntimeError | ConnectionError) and not isinstance(error, PipelineError)
    return is_distributed and any(pattern in text for pattern in (*_PEER_GONE, _TIMED_OUT))


def failure_of(job: Job, error: Exception, memory_kills_before: int | None) -> PipelineError:
    """The error of a stage: a dead worker rather than an error, an error rather than its consequences.

    Args:
        error: a ``TrainingFailedError`` or ``RayError``, as ``fit`` raised it.
        memory_kills_before: on this host, when the workers started.
    """
    from ray.train import ControllerError, WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError

    if isinstance(error, WorkerGroupError):
        return _of_workers(job, error.worker_failures, memory_kills_before)
    if not isinstance(error, ControllerError):
        return cluster_lost(job, last_line(error))
    if isinstance(error.controller_failure, WorkerGroupStartupTimeoutError):
        return no_capacity(job, joined_cluster())
    if isinstance(error.controller_failure, WorkerGroupStartupFailedError):
        return LostError(job.stage, f"a worker was lost while it started: {last_line(error)}", str(job.entry.log))
    return StageError(job.stage, f"Ray Train: {last_line(error)}", str(job.entry.log))


def _of_workers(job: Job, failures: Mapping[int, Exception], memory_kills_before: int | None) -> PipelineError:
    raised = {rank: _root(error) for rank, error in sorted(failures.items())}
    dead = {rank: why for rank in raised if (why := _death(failures[rank])) is not None}
    if dead:
        why = next(iter(dead.values()))
        if not why and (gone := ranks_of_lost_nodes(job)):
            return lost(job, gone, "died", _NODE_GONE)
        ranks = [rank for rank in dead if dead[rank] == why]
        return lost(job, ranks, "died", f": {why}" if why else memory_hint(memory_kills_before))
    for rank, error in raised.items():
        if not isinstance(error, StoppedError) and not lost_its_peer(error):
            return failed(job, rank, error)
    for error in raised.values():
        if isinstance(error, StoppedError):
            return error
    if gone := ranks_of_lost_nodes(job):
        return lost(job, gone, "died", _NODE_GONE)
    if waiting := [rank for rank, error in raised.items() if _TIMED_OUT in str(error).lower()]:
        return waited_for(job, waiting)
    rank, error = next(iter(raised.items()))
    return lost(job, [rank], "lost its connection to another worker", f": {first_line(error)}")


def ranks_of_lost_nodes(job: Job) -> list[int]:
    """The ranks whose node has left the cluster: Ray reports their workers, or what others miss, before the node."""
    import ray

    beats = heartbeats(job.entry.work)
    if not ray.is_initialized() or len({beat.node for beat in beats.values()}) < 2:
        return []
    deadline = time.monotonic() + _NODE_SECONDS
    while True:
        alive = {each.node for each in joined_cluster().nodes}
        gone = sorted(rank for rank, beat in beats.items() if beat.node not in alive)
        if gone or time.monotonic() > deadline:
            return gone
        time.sleep(_POLL_NODES_SECONDS)


def _death(error: Exception) -> str | None:
    """Why a worker is gone, empty where Ray does not know; None: it is there, and raised an error."""
    from ray.exceptions import OutOfMemoryError, RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckTimeoutError

    cause, text = _root(error), str(error)
    if isinstance(error, WorkerHealthCheckTimeoutError):
        return "it no longer answers Ray"
    if isinstance(cause, OutOfMemoryError) or "running low on memory" in text:
        return "its node was out of memory, and Ray killed it"
    if not isinstance(cause, RayActorError):
        return None
    if cause.preempted:
        return "its node was preempted"
    return "its node is gone" if "node has died" in text else ""


def _root(error: Exception) -> Exception:
    """The error that the worker raised, without Ray's wrapper, so that its type is kept."""
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    if isinstance(error, WorkerHealthCheckFailedError):
        return _root(error.health_check_failure)
    is_wrapper = type(error).__module__.startswith("ray.") and not isinstance(error, RayActorError)
    return error.__cause__ if is_wrapper and isinstance(error.__cause__, Exception) else error

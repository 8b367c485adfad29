"""The workers of a session that has several: processes of this machine, each with its part of the session.

They start from the fork server of stages. Ray Train, which is around a training, runs one function to its end.

A call goes to all of them. One that fails in another way than by refusing the call ends all: the session is then loaded
again from its log.
"""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from flows.stages.launch import StageProcesses
from lineage.errors import PipelineError
from tasks.context import TrainContext

if TYPE_CHECKING:
    from tasks.context import Resources
    from tasks.recipe import Input
    from tasks.steps import Steps
    from tasks.train.steps.session import Bases, Session

Result = TypeVar("Result")
_PRELOADED = ["flows.stages.imports_begin", "tasks.train.steps.session"]


class Here:
    """A session of one worker, in this process."""

    def __init__(self, method: "Steps", policy: "Input", ctx: "TrainContext", bases: "Bases | None" = None) -> None:
        from tasks.train.steps.session import Session

        self.session = Session(method, policy, ctx, bases)

    def apply(self, function: "Callable[[Session], Result]") -> Result:
        """What a function gives of the session."""
        return function(self.session)

    def close(self) -> None:
        """Nothing has to end."""


class Group:
    """A session of several workers.

    Raises:
        PipelineError: a worker refused the session, or ended.
    """

    def __init__(self, method: "Steps", policy: "Input", ctx: "TrainContext", threads: int) -> None:
        resources = ctx.resources
        self._limit = 60 * (resources.timeout_minutes or resources.hang_minutes or 30.0)
        StageProcesses().warm_up(_PRELOADED)
        context = multiprocessing.get_context("forkserver")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._ends, self._processes = list[Connection](), []
        for rank in range(resources.num_workers):
            ours, theirs = context.Pipe()
            own = (rank, resources, ctx.output_dir, ctx.work_dir)
            process = context.Process(target=_serve, args=(theirs, port, threads, method, policy, own), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        try:
            self._answer()
        except PipelineError:
            self.close()
            raise

    def apply(self, function: "Callable[[Session], Result]") -> Result:
        """What a function gives of the session on the first worker; all of them call it.

        Raises:
            PipelineError: as the function raises it; or a worker ended, or did not answer in time.
        """
        for end in self._ends:
            end.send(function)
        return cast("Result", self._answer())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for end in self._ends:
            end.close()

    def _answer(self) -> object:
        """The first worker's answer, once all have answered."""
        answers: dict[int, object] = {}
        deadline = time.monotonic() + self._limit
        while len(answers) < len(self._ends):
            waiting = {end: rank for rank, end in enumerate(self._ends) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"worker {min(waiting.values())} did not answer for {self._limit:g} s")
            for end in cast("list[Connection]", ready):
                try:
                    answer = end.recv()
                except (EOFError, ConnectionError):
                    self._fail(f"worker {waiting[end]} ended")
                if isinstance(answer, str):
                    self._fail(f"worker {waiting[end]}: {answer}")
                answers[waiting[end]] = answer
        found = answers[0]
        if len({isinstance(each, PipelineError) for each in answers.values()}) > 1:
            self._fail("workers differ in whether they refuse the call")
        if isinstance(found, PipelineError):
            raise found
        [value] = cast("tuple[object]", found)
        return value

    def _fail(self, reason: str) -> None:
        self.close()
        raise WorkerError(reason)


class WorkerError(Exception):
    """Workers of a session are gone."""


def session_of(
    method: "Steps", policy: "Input", ctx: "TrainContext", bases: "Bases | None" = None
) -> Here | Group:  # fmt: skip
    """A session on as many workers as its resources have."""
    if ctx.resources.num_workers == 1:
        return Here(method, policy, ctx, bases)
    return Group(method, policy, ctx, threads_of(ctx.resources))


def threads_of(resources: "Resources") -> int:
    """Threads that a worker computes with."""
    return max(1, min(resources.cpus_per_worker, (os.cpu_count() or 1) // resources.num_workers))


def _serve(
    end: Connection, port: int, threads: int, method: "Steps", policy: "Input",
    own: "tuple[int, Resources, Path, Path]",
) -> None:  # fmt: skip
    """A worker: makes its part of the session, and applies what comes to it, until its server is gone."""
    import torch

    from tasks.train.steps.session import Session

    rank, resources, output, work = own
    ctx = TrainContext(
        output_dir=output, work_dir=work, resources=resources, rank=rank, world_size=resources.num_workers
    )
    os.environ |= {
        "RANK": str(ctx.rank), "LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size),
        "LOCAL_WORLD_SIZE": str(ctx.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the server, which ends its workers
    torch.set_num_threads(threads)
    on_gpu = resources.gpus_per_worker > 0
    session: Session | None = None
    while True:
        try:
            if session is None:
                if on_gpu:
                    torch.cuda.set_device(ctx.rank)
                torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
                session = Session(method, policy, ctx)
                answer: object = (None,)
            else:
                answer = (end.recv()(session),)
        except (EOFError, ConnectionError):
            return
        except PipelineError as error:
            answer = error
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        end.send(answer if not ctx.rank or not isinstance(answer, tuple) else (None,))
        if session is None:
            return

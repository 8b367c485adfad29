"""Runs a sweep: worker threads execute trials; a stage that several trials share runs once."""

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flows.declare.compose import field_of
from flows.open_run import Trials, check_machine, open_run, prepare_run
from flows.planning.plan import PlannedStage
from flows.prefect.server import embedded_server
from flows.progress.screen import Screen
from flows.reports.sweep import sweep_dict, sweep_summary, union_text
from flows.stages.execute import Result, execute
from flows.stages.launch import StageProcesses
from flows.stages.resources import ask_cluster, count_cpus, visible_gpus
from flows.stages.run import Run
from flows.stops import stoppable
from flows.sweep.folder import SweepFiles, TrialResult, TrialState, overrides, sweep_folder, trial_results
from flows.sweep.plan import Key, SweepPlan, Trial, key_of, objective_values, read_sweep
from flows.sweep.space import fixed_overrides
from lineage.errors import ArtifactError, ConfigError, PipelineError, PrunedError, StoppedError
from lineage.manifest import Manifest
from lineage.metrics_file import ReportFile
from lineage.store import create_store
from lineage.tracker import Tracker, TrialEnd

if TYPE_CHECKING:
    from prefect.states import State

AsTask = Callable[[str, Callable[[], None]], None]  # runs the work on a stage of this title, in the calling thread

_ASK_SECONDS = 120.0  # timeout for a cluster's answer
_POLL_SECONDS = 0.2  # interval of reading reports for pruning
_KEPT = (".csv", ".yaml", ".html", ".md")  # of the sweep's folder: artifacts of its run in MLflow


class _TrialsFailedError(PipelineError):
    """Some trials failed; each reported why."""


class Proposer(Protocol):
    """Proposes the trials of a sweep one after another, given the results so far."""

    def owning(self) -> AbstractContextManager[None]:
        """A context for the whole sweep, in which the proposed trials belong to this process."""

    def ask(self) -> tuple[int, Mapping[str, str]] | None:
        """Number and parameters of the next trial; None: there is none."""

    def report(self, number: int, step: int, metrics: Mapping[str, float]) -> bool:
        """Reports the metrics of the pruning stage at a step; returns whether to prune the trial."""

    def tell(self, result: TrialResult) -> str | None:
        """Reports the result of a trial; returns a progress line, or None."""


def run_sweep(arguments: Sequence[str], config_dir: Path | None, cli_args: Sequence[str], *, as_json: bool) -> int:
    """Runs the unfinished trials and reports; progress goes to stderr, the result to stdout.

    Args:
        arguments: the overrides.
        cli_args: arguments of the command, for the record.

    Raises:
        ConfigError: the sweep or one of its trials is refused, before anything starts.
        PipelineError: trials failed; all others were completed.
        KeyboardInterrupt: it was stopped; nothing is left running, and the same command resumes it.
    """
    sweep = read_sweep(arguments, config_dir)
    done = conduct(sweep, config_dir, cli_args, partial(_study, sweep), partial(_judge, sweep))
    report = json.dumps(sweep_dict(sweep, done.files, done.seconds, done.execution_id), indent=2)
    print(report if as_json else sweep_summary(sweep, done.files, done.seconds), flush=True)
    done.require_success()
    return 0


@dataclass(frozen=True, kw_only=True)
class Conducted:
    """A completed sweep.

    Args:
        execution_id: its id in the tracker; None: there was nothing to do.
        failure: message on failed trials; None: none failed.
    """

    files: SweepFiles
    seconds: float
    execution_id: str | None
    failure: str | None

    def require_success(self) -> None:
        """Raises a ``PipelineError`` that names the trials that failed."""
        if self.failure:
            raise _TrialsFailedError(self.failure)


def conduct(
    sweep: SweepPlan, config_dir: Path | None, cli_args: Sequence[str],
    proposer_in: Callable[[Path], Proposer | None],
    judge: Callable[[Sequence[TrialResult], Path], tuple[list[int], str]], *, command: str = "run",
    failing_is_a_result: bool = False,
) -> Conducted:  # fmt: skip
    """Runs the unfinished trials; progress goes to stderr.

    Args:
        proposer_in: creates the proposer of trials for the folder of the sweep; returns None if the trials are fixed.
        judge: as in ``SweepFiles``.
        command: name of the ``posttrain`` command, for the record.
        failing_is_a_result: failed trials do not fail the sweep if another trial is complete.
    """
    start = time.perf_counter()
    check_machine(sweep.stale)
    num_workers = _num_workers(sweep)
    plan = sweep.plan
    create_store(plan.pipeline.store)
    prepare_run(plan)
    folder = sweep_folder(plan.pipeline.store, plan.pipeline.name, sweep.sweep, sweep.params, sweep.stages)
    shared = [word for word in sweep.overrides if field_of(word).split(".")[0] != "sweep"]
    files = SweepFiles(folder, sweep.sweep, [*shared, *fixed_overrides(sweep.sweep)], config_dir, judge)
    proposer = proposer_in(folder)
    # The longest titles, which set the width of the screen's columns.
    titles = [sweep.title(planned.name, (sweep.num_trials or 1) - 1) for planned in plan.stages]
    owning = proposer.owning() if proposer else contextlib.nullcontext()
    with stoppable(), owning, Screen(sys.stderr, titles) as screen:
        engine = Engine(
            sweep=sweep, study=proposer, files=files, num_workers=num_workers, failing_is_a_result=failing_is_a_result
        )
        execution_id = None
        if engine.has_work():
            with contextlib.suppress(_TrialsFailedError):  # it marks the record as failed
                _run_recorded(engine, cli_args, screen, command)
            execution_id = engine.run.tracker.execution_id()
        else:  # only reads the results
            engine.drive(Run(plan=plan, processes=StageProcesses(), emit=screen.on, tracker=Tracker()))
    seconds = time.perf_counter() - start
    return Conducted(files=files, seconds=seconds, execution_id=execution_id, failure=engine.failure())


def _judge(sweep: SweepPlan, results: Sequence[TrialResult], folder: Path) -> tuple[list[int], str]:
    from flows.sweep.study import best_and_plots  # imports optuna

    return best_and_plots(sweep.sweep, sweep.space, results, folder)


def _study(sweep: SweepPlan, folder: Path) -> Proposer | None:
    if sweep.sweep.sampler is None:
        return None
    from flows.sweep.study import Study  # imports optuna

    return Study(sweep.sweep, sweep.space, folder)


def _num_workers(sweep: SweepPlan) -> int:
    """Number of concurrent trials: ``sweep.parallel``, or as many as CPUs and GPUs allow.

    Raises:
        ConfigError: there is no cluster at ``RAY_ADDRESS``.
    """
    if sweep.sweep.parallel is not None:
        return sweep.sweep.parallel
    own = [planned for planned in sweep.plan.stages if planned.name in sweep.own]
    remote = [planned for planned in own if planned.runs_elsewhere]
    if not remote:
        here = count_cpus(), len(visible_gpus())
        return max((_num_fitting(planned, here) for planned in own), default=1)
    try:
        there = ask_cluster(_ASK_SECONDS)
    except ConfigError as error:
        raise ConfigError(
            f"the cluster does not report its capacity ({error}); or set sweep.parallel, the number of trials at once"
        ) from error
    return min(_num_fitting(planned, there) for planned in remote)


def _num_fitting(planned: PlannedStage, capacity: tuple[float, float]) -> int:
    """How many such stages fit on the CPUs and GPUs at once; at least one."""
    counts = [int(total // asked) for total, asked in zip(capacity, planned.asks, strict=True) if asked]
    return max(1, min(counts, default=1))


def _run_recorded(engine: "Engine", cli_args: Sequence[str], screen: Screen, command: str) -> None:
    """Runs a sweep as one Prefect flow run, with a task run per stage.

    Raises:
        _TrialsFailedError: trials failed.
    """
    sweep, plan, folder = engine.sweep, engine.sweep.plan, engine.files.folder
    count = None if sweep.known is None else len(sweep.known)
    trials = Trials(folder=folder, own=sweep.own, count=sweep.sweep.num_trials if count is None else count)
    recorded = open_run(plan, cli_args, screen.on, sweep.stale, trials, command=command)
    with recorded as run, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # stderr is closed
            print(union_text(sweep), file=sys.stderr, flush=True)
        server = stack.enter_context(embedded_server(plan.pipeline.store / "logs" / "prefect-server.log"))
        from prefect.states import Failed  # beside the server's start

        from flows.prefect.flow import as_task, in_flow

        if server:
            server.wait_until_ready()

        def body() -> "State[None] | None":
            engine.drive(run, as_task)
            failure = engine.failure()
            return Failed(message=failure) if failure else None

        in_flow(run, body, server, name=f"{plan.pipeline.name}-sweep", flow_run_name=folder.name)
        run.tracker.keep([path for path in sorted(folder.iterdir()) if path.suffix in _KEPT])
        if failure := engine.failure():
            raise _TrialsFailedError(failure)


@dataclass(eq=False, kw_only=True)
class _Node:
    """A stage that one or more trials share, and that runs once.

    Args:
        metrics: file of its reports.
        trials: numbers of the trials that need it.
        is_unwanted: it was stopped, since only pruned trials needed it; a later trial runs it again.
    """

    title: str
    directory: Path
    metrics: Path
    trials: set[int] = field(default_factory=set)
    future: Future[None] = field(default_factory=Future)
    has_started: bool = False
    is_unwanted: bool = False


class Engine:
    """One execution of a sweep; calls the study and the files from one thread at a time.

    Args:
        study: proposes the trials; None: they are fixed.
        num_workers: number of concurrent trials.
        failing_is_a_result: as in ``conduct``.
    """

    def __init__(
        self, *, sweep: SweepPlan, study: Proposer | None, files: SweepFiles, num_workers: int,
        failing_is_a_result: bool = False,
    ) -> None:  # fmt: skip
        self.sweep, self.files, self._failing_is_a_result = sweep, files, failing_is_a_result
        self._study, self._num_workers = study, num_workers
        self._lock = threading.RLock()
        self._nodes: dict[Key, _Node] = {}
        self._is_over = False  # no further trial is started
        self._first = study.ask() if study else None
        self._known = iter(sweep.known or ())

    def has_work(self) -> bool:
        """Whether a stage of any trial has to run."""
        return bool(self._first) if self._study else bool(self.sweep.stale)

    def drive(self, run: Run, as_task: AsTask = lambda _, work: work()) -> None:
        """Runs all trials.

        Raises:
            KeyboardInterrupt: it was stopped; no stage is left running.
        """
        self.run, self._as_task = run, as_task
        run.claim([trial.plan for trial in self.sweep.known or ()])
        num_stages = self._num_workers * len(self.sweep.plan.stages)
        with ThreadPoolExecutor(num_stages) as self._pool, ThreadPoolExecutor(self._num_workers) as workers:
            try:
                work = [workers.submit(copy_context().run, self._work) for _ in range(self._num_workers)]
                for each in wait(work, return_when=FIRST_EXCEPTION).done:
                    each.result()
            except BaseException:
                self._is_over = True
                run.processes.stop()  # forwards the stop to the stages, and waits for them
                raise

    def failure(self) -> str | None:
        """Message on the trials that failed in this run of the sweep or before; None: none failed."""
        results = trial_results(self.files.folder)
        failed = [str(each.number) for each in results if each.state == "failed"]
        is_result = self._failing_is_a_result and len(failed) < len(results)
        if not failed or is_result:
            return None
        once = ", each once more at most" if self._study else ""
        return (
            f"{len(failed)} of {len(results)} trials failed: {', '.join(failed)}; each reported why when it failed; "
            f"the same command again tries these, and only these{once}"
        )

    def _work(self) -> None:
        """The loop of a worker thread."""
        while trial := self._next():
            with self._lock:
                self.run.tracker.trial_begins(trial.number, trial.params)
                nodes = self._submit(trial)
            state, cause = self._follow(trial, nodes)
            self._end(trial, nodes, state, cause)

    def _next(self) -> Trial | None:
        with self._lock:
            while not self._is_over:
                if self._study is None:
                    return next(self._known, None)
                proposed, self._first = self._first or self._study.ask(), None
                if proposed is None:
                    self._is_over = True
                    break
                number, params = proposed
                try:
                    trial = self.sweep.planner.plan(number, params)
                    check_machine(trial.plan.stale)
                    self.run.claim([trial.plan])
                except ConfigError as error:  # a sampler may propose what a method refuses
                    self.run.tracker.trial_begins(number, params)
                    self._record(TrialResult(number=number, params=params, state="failed", cause=str(error)), {})
                else:
                    return trial
        return None

    def _submit(self, trial: Trial) -> dict[str, _Node]:
        """Submits the stages that a trial has to run, and returns them by name; stages of earlier trials are shared."""
        nodes: dict[str, _Node] = {}
        for planned in trial.plan.stale:
            known = self._nodes.get(key_of(planned))
            if known is None or known.is_unwanted:
                before = [nodes[name].future for name in trial.plan.waits(planned) if name in nodes]
                entry = trial.plan.entry(planned)
                title = self.sweep.title(planned.name, trial.number)
                node = _Node(title=title, directory=entry.path, metrics=entry.metrics)
                run = replace(self.run, plan=trial.plan, titles={planned.name: title})
                context = copy_context()
                node.trials.add(trial.number)
                node.future = self._pool.submit(context.run, self._run_stage, node, run, planned, before, known)
                self._nodes[key_of(planned)] = node
            nodes[planned.name] = self._nodes[key_of(planned)]
            nodes[planned.name].trials.add(trial.number)
        return nodes

    def _run_stage(
        self, node: _Node, run: Run, planned: PlannedStage, before: Sequence[Future[None]], unwanted: _Node | None
    ) -> None:
        """Runs one stage, in its own thread, after those that it depends on."""
        if unwanted:
            wait([unwanted.future])
        for each in before:
            each.result()
        with self._lock:
            if not node.trials:
                raise PrunedError(f"stage {node.title}: every trial that needs it was pruned")
            node.has_started = True
        results: list[Result] = []
        try:
            self._as_task(node.title, lambda: results.append(execute(run, planned)))
        except Exception as error:
            if not results:
                if isinstance(error, PipelineError):
                    raise
                raise PipelineError(f"stage {node.title}: {error!r}") from error
        if not results:
            raise PipelineError(f"stage {node.title}: Prefect ended it before it began")

    def _follow(self, trial: Trial, nodes: Mapping[str, _Node]) -> tuple[TrialState, str]:
        """Waits for the stages of a trial, and prunes it if the study asks for it."""
        pruning = self.sweep.sweep.pruning
        watched = nodes.get(pruning.stage) if pruning else None
        reports = ReportFile(watched.metrics) if watched else None
        if watched and reports and not watched.has_started:
            reports.read()  # skip reports of an earlier attempt; the stage rewrites the file when it starts
        pending = {node.future for node in nodes.values()}
        while pending:
            pending = wait(pending, _POLL_SECONDS if reports else None, FIRST_COMPLETED).not_done
            for report in reports.read() if watched and reports else ():
                with self._lock:
                    if self._study and self._study.report(trial.number, report.step, report.metrics):
                        cause = f"pruned at step {report.step} of {watched.title if watched else ''}"
                        self._prune(trial, nodes, cause)
                        return "pruned", cause
        for name, node in nodes.items():  # in order of execution: readers of a failed stage fail with the same error
            error = node.future.exception()
            if isinstance(error, StoppedError) or (error and not isinstance(error, PipelineError)):
                raise error
            if error:
                if name not in self.sweep.own and self._study:
                    self._is_over = True  # every further trial would fail too
                return "failed", str(error)
        return "complete", ""

    def _prune(self, trial: Trial, nodes: Mapping[str, _Node], cause: str) -> None:
        """Stops the stages that no other running trial needs."""
        for node in nodes.values():
            node.trials.discard(trial.number)
            if not node.trials and not node.future.done():
                node.is_unwanted = True
                if node.has_started:
                    self.run.processes.end(node.directory, PrunedError(cause))

    def _end(self, trial: Trial, nodes: Mapping[str, _Node], state: TrialState, cause: str) -> None:
        manifests: dict[str, Manifest] = {}
        for planned in trial.plan.stages:
            node = nodes.get(planned.name)
            if node is None or (node.future.done() and not node.future.exception()):
                manifest = trial.plan.entry(planned).manifest()
                if manifest:
                    manifests[planned.name] = manifest
        values: dict[str, float] = {}
        if state == "complete":
            try:
                values = objective_values(self.sweep.sweep, manifests)
            except ArtifactError as error:
                state, cause = "failed", str(error)
        times = [manifests[name].provenance for name in manifests if name in self.sweep.own]
        metrics = {
            f"{stage}/{name}": value
            for stage, each in manifests.items()
            for name, value in each.metrics.items()
            if math.isfinite(value)
        }
        result = TrialResult(
            number=trial.number, params=dict(trial.params), state=state, cause=cause, values=values,
            seconds=sum((each.end - each.start for each in times), start=0.0), metrics=metrics,
            fingerprints={name: each.fingerprint for name, each in manifests.items()},
        )  # fmt: skip
        with self._lock:
            self._record(result, manifests)

    def _record(self, result: TrialResult, manifests: Mapping[str, Manifest]) -> None:
        """Records the result of a trial, first in the files, which a resumed sweep reads."""
        self.files.add(result)
        if result.state != "complete":
            cause = result.cause.strip().partition("\n")[0]
            words = " ".join(overrides(result.params))
            self.run.announce(f"trial {result.number} {result.state}: {words}: {cause}")
        own = {name: value for name, value in result.metrics.items() if name.partition("/")[0] in self.sweep.own}
        end = TrialEnd(state=result.state, manifests=manifests, metrics=own | dict(result.values), cause=result.cause)
        self.run.tracker.trial_ends(result.number, end)
        if self._study and (line := self._study.tell(result)):
            self.run.announce(line)

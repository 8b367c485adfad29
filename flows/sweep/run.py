"""Runs a sweep: worker threads execute trials; a stage that several trials share runs once."""

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from flows.planning.plan import PlannedStage
from flows.prefect.server import embedded_server
from flows.progress.screen import Screen
from flows.reports.sweep import sweep_dict, sweep_summary, union_text, write_pages
from flows.run import Trials, check_machine, open_run, prepare_run
from flows.stages.execute import Result, execute
from flows.stages.launch import StageProcesses
from flows.stages.resources import Cluster, count_cpus, visible_gpus
from flows.stages.run import Run
from flows.stages.stops import stoppable
from flows.sweep.files import SweepFiles
from flows.sweep.folder import TrialResult, TrialState, overrides, sweep_folder, trial_results
from flows.sweep.plan import Key, SweepPlan, Trial, key_of, metrics_of, objective_values, read_sweep, union
from lineage.errors import ArtifactError, ConfigError, PipelineError, PrunedError, StoppedError
from lineage.record.metrics_file import ReportFile, StageReport, file_with
from lineage.record.tracker import Tracker, TrialEnd
from lineage.store import Manifest, create_store

_POLL_SECONDS = 0.2  # interval of reading reports for pruning
_KEPT = (".csv", ".yaml", ".html", ".md")  # of the sweep's folder: artifacts of its run in MLflow


class TrialsFailedError(PipelineError):
    """Some trials failed; each reported why."""


class Proposer(Protocol):
    """Proposes the trials of a sweep one after another, given the results so far."""

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

    def proposer(folder: Path) -> Proposer | None:
        if sweep.known is not None:
            return None
        from flows.sweep.study import Study  # imports optuna

        return Study(sweep.sweep, sweep.space, folder)

    done = conduct(sweep, cli_args, proposer)
    report = json.dumps(sweep_dict(sweep, done.files, done.seconds, done.execution_id), indent=2)
    print(report if as_json else sweep_summary(sweep, done.files, done.seconds), flush=True)
    done.require_success()
    return 0


def conduct(
    sweep: SweepPlan, cli_args: Sequence[str], proposer_in: Callable[[Path], Proposer | None], *,
    command: str = "run", accepts_failures: bool = False,
) -> "SweepRun":  # fmt: skip
    """Runs the unfinished trials; progress goes to stderr.

    Args:
        proposer_in: creates the proposer of trials for the folder of the sweep; returns None if the trials are fixed.
        command: name of the ``posttrain`` command, for the record.
        accepts_failures: failed trials do not fail the sweep if another trial is complete.
    """
    start, plan = time.perf_counter(), sweep.plan
    num_workers = _num_workers(sweep, check_machine(sweep.stale))
    create_store(plan.pipeline.store)
    prepare_run(plan)
    folder = sweep_folder(plan.pipeline.store, plan.pipeline.name, sweep.sweep, sweep.params, union(sweep.samples))
    files = SweepFiles(folder, sweep.sweep, sweep.overrides, sweep.config_dir)
    done = SweepRun(sweep, files, proposer_in(folder), num_workers, accepts_failures=accepts_failures)
    # The longest titles, which set the width of the screen's columns.
    titles = [sweep.title(planned.name, (sweep.num_trials or 1) - 1) for planned in plan.stages]
    with stoppable(), Screen(sys.stderr, titles) as screen:
        if done.has_work:
            with contextlib.suppress(TrialsFailedError):  # it marks the record as failed
                done.record(cli_args, screen, command)
        else:  # only reads the results
            done.drive(Run(plan=plan, processes=StageProcesses(), emit=screen.on, tracker=Tracker()))
            done.write_pages()
    done.seconds = time.perf_counter() - start
    return done


def _num_workers(sweep: SweepPlan, cluster: Cluster | None) -> int:
    """Number of concurrent trials: ``sweep.parallel``, or as many as CPUs and GPUs allow."""
    if sweep.sweep.parallel is not None:
        return sweep.sweep.parallel
    own = [planned for planned in sweep.plan.stages if planned.name in sweep.own]
    remote = [planned for planned in own if planned.runs_elsewhere] if cluster else []
    if not remote or not cluster:
        return max((_num_fitting(planned, (count_cpus(), len(visible_gpus()))) for planned in own), default=1)
    there = sum(node.cpus for node in cluster.nodes), sum(node.gpus for node in cluster.nodes)
    return min(_num_fitting(planned, there) for planned in remote)


def _num_fitting(planned: PlannedStage, capacity: tuple[float, float]) -> int:
    """How many such stages fit on the CPUs and GPUs at once; at least one."""
    counts = [int(total // asked) for total, asked in zip(capacity, planned.asks, strict=True) if asked]
    return max(1, min(counts, default=1))


class SweepRun:
    """One execution of a sweep: worker threads ask for a trial, plan it, run it and report it.

    Args:
        proposer: None: the trials are fixed.
        num_workers: number of concurrent trials.
        accepts_failures: as in ``conduct``.
    """

    seconds = 0.0
    run: Run

    def __init__(
        self, sweep: SweepPlan, files: SweepFiles, proposer: Proposer | None, num_workers: int, *,
        accepts_failures: bool = False,
    ) -> None:  # fmt: skip
        self.sweep, self.files, self._accepts_failures = sweep, files, accepts_failures
        self._proposer, self._num_workers = proposer, num_workers
        self._lock = threading.RLock()  # the proposer and the files are called from one thread at a time
        self._stages: dict[Key, Future[None]] = {}  # of all trials; those that share a stage share its future
        self._running: dict[int, Trial] = {}
        self._first = proposer.ask() if proposer else None
        self._known = iter(sweep.known or ())
        self._is_over = False  # no further trial is started

    @property
    def has_work(self) -> bool:
        """Whether a stage of any trial has to run."""
        return bool(self._first if self._proposer else self.sweep.stale)

    @property
    def execution_id(self) -> str | None:
        """Its id in the tracker; None: there was nothing to do."""
        return self.run.tracker.execution_id()

    def record(self, cli_args: Sequence[str], screen: Screen, command: str) -> None:
        """Runs all trials as one Prefect flow run, with a task run per stage (TrialsFailedError: trials failed)."""
        sweep, plan, folder = self.sweep, self.sweep.plan, self.files.folder
        trials = Trials(folder=folder, own=sweep.own, count=sweep.num_trials)
        recorded = open_run(plan, cli_args, screen.on, sweep.stale, trials, command=command)
        with recorded as run, contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # stderr is closed
                print(union_text(sweep), file=sys.stderr, flush=True)
            server = stack.enter_context(embedded_server(plan.pipeline.store / "logs" / "prefect-server.log"))
            from flows.prefect.flow import as_task, in_flow  # beside the server's start

            if server:
                server.wait_until_ready()

            def body() -> None:
                self.drive(run, as_task)
                self.write_pages()
                run.tracker.keep([path for path in sorted(folder.iterdir()) if path.suffix in _KEPT])
                self.require_success()

            assert run.recorder
            name, store = f"{plan.pipeline.name}-sweep", plan.pipeline.store
            in_flow(run.recorder, store, body, server, name=name, flow_run_name=folder.name)

    def write_pages(self) -> None:
        """Writes the pages of the best trials; a failure is only reported."""
        try:
            write_pages(self.sweep, self.files)
        except Exception as error:  # of any reader of the record: the models are there all the same
            with contextlib.suppress(OSError):  # stderr is closed
                print(f"posttrain: a page of the best trials is not written: {error}", file=sys.stderr)

    def drive(self, run: Run, as_task: Callable[[str, Callable[[], None]], None] = lambda _, work: work()) -> None:
        """Runs all trials.

        Args:
            as_task: runs the work on a stage of this title, in the calling thread.

        Raises:
            KeyboardInterrupt: it was stopped; no stage is left running.
        """
        self.run, self._as_task, self._start = run, as_task, time.time()
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

    def require_success(self) -> None:
        """Raises an error that names the trials that failed in this run of the sweep or before."""
        results = trial_results(self.files.folder)
        failed = [str(each.number) for each in results if each.state == "failed"]
        if failed and not (self._accepts_failures and len(failed) < len(results)):
            raise TrialsFailedError(
                f"{len(failed)} of {len(results)} trials failed: {', '.join(failed)}; each reported why when it "
                "failed; the same command again tries these, and only these"
            )

    def _work(self) -> None:
        """The loop of a worker thread."""
        while trial := self._next():
            with self._lock:
                self.run.tracker.trial_begins(trial.number, trial.params)
                stages = self._submit(trial)
            state, cause = self._follow(trial, stages)
            self._end(trial, state, cause)

    def _next(self) -> Trial | None:
        with self._lock:
            while not self._is_over:
                if self._proposer is None:
                    return next(self._known, None)
                proposed, self._first = self._first or self._proposer.ask(), None
                if proposed is None:
                    return None
                number, params = proposed
                try:
                    trial = self.sweep.trial(number, params)
                    check_machine(trial.plan.stale)
                    self.run.claim([trial.plan])
                    return trial
                except ConfigError as error:  # a sampler may propose what a method refuses
                    self.run.tracker.trial_begins(number, params)
                    self._record(TrialResult(number=number, params=params, state="failed", cause=str(error)), {})
        return None

    def _submit(self, trial: Trial) -> dict[str, Future[None]]:
        """Submits the stages that a trial has to run, and returns them by name; stages of earlier trials are shared."""
        titles = {planned.name: self.sweep.title(planned.name, trial.number) for planned in trial.plan.stages}
        run = replace(self.run, plan=trial.plan, titles=titles)
        stages: dict[str, Future[None]] = {}
        for planned in trial.plan.stale:
            key = key_of(planned)
            if key not in self._stages:
                before = [stages[name] for name in trial.plan.waits(planned) if name in stages]
                self._stages[key] = self._pool.submit(copy_context().run, self._run_stage, run, planned, before)
            stages[planned.name] = self._stages[key]
        self._running[trial.number] = trial
        return stages

    def _run_stage(self, run: Run, planned: PlannedStage, before: Sequence[Future[None]]) -> None:
        """Runs one stage, in its own thread, after those that it depends on."""
        for each in before:
            each.result()
        title, results, failure = run.title(planned), list[Result](), None
        try:
            self._as_task(title, lambda: results.append(execute(run, planned)))
        except PipelineError:
            raise
        except Exception as error:  # of Prefect, maybe after the stage's end
            failure = error
        if not results:
            raise PipelineError(f"stage {title}: {failure or 'Prefect ended it before it began'!r}") from failure

    def _follow(self, trial: Trial, stages: Mapping[str, Future[None]]) -> tuple[TrialState, str]:
        """Waits for the stages of a trial, and prunes it if the proposer asks for it."""
        pruning, reports = self.sweep.sweep.pruning, None
        if pruning and pruning.stage in stages:
            entry = trial.plan.entry(trial.plan.stage(pruning.stage))
            reports = ReportFile(file_with(entry.metrics, pruning.metric))
        pending = set(stages.values())
        while pending:
            pending = wait(pending, _POLL_SECONDS if reports else None, FIRST_COMPLETED).not_done
            for report in reports.read() if reports else ():
                if report.step and report.time >= self._start and (cause := self._pruned(trial, stages, report)):
                    return "pruned", cause
        for name, stage in stages.items():  # in order of execution: readers of a failed stage fail with the same error
            error = stage.exception()
            if isinstance(error, StoppedError) or (error and not isinstance(error, PipelineError)):
                raise error
            if isinstance(error, PrunedError):  # as an earlier trial with the same parameters
                return "pruned", str(error)
            if error:
                # Every further trial of a sampler would fail too.
                self._is_over |= bool(self._proposer and name not in self.sweep.own)
                return "failed", str(error)
        return "complete", ""

    def _pruned(self, trial: Trial, stages: Mapping[str, Future[None]], report: StageReport) -> str:
        """Why the proposer prunes a trial after a report, or nothing; ends its stage unless others need it too."""
        assert self._proposer and self.sweep.sweep.pruning
        name = self.sweep.sweep.pruning.stage
        with self._lock:
            if not self._proposer.report(trial.number, report.step, report.metrics):
                return ""
            cause = f"pruned at step {report.step} of {self.sweep.title(name, trial.number)}"
            others = {key_of(each.plan.stage(name)) for each in self._running.values() if each is not trial}
            if not stages[name].done() and key_of(trial.plan.stage(name)) not in others:
                self.run.processes.end(trial.plan.entry(trial.plan.stage(name)).path, PrunedError(cause))
        return cause

    def _end(self, trial: Trial, state: TrialState, cause: str) -> None:
        """Judges a trial by what it finished, and records its result."""
        entries = {planned.name: trial.plan.entry(planned) for planned in trial.plan.stages}
        finished = [planned.name for planned in trial.plan.stages if planned.is_finished(entries[planned.name])]
        manifests = {name: found for name in finished if (found := entries[name].manifest())}
        values: dict[str, float] = {}
        if state == "complete":
            try:
                values = objective_values(self.sweep.sweep, manifests)
            except ArtifactError as error:
                state, cause = "failed", str(error)
        times = [each.provenance for name, each in manifests.items() if name in self.sweep.own]
        result = TrialResult(
            number=trial.number, params=dict(trial.params), state=state, cause=cause, values=values,
            seconds=sum((each.end - each.start for each in times), start=0.0),
            metrics={name: value for name, value in metrics_of(manifests).items() if math.isfinite(value)},
            fingerprints={name: each.fingerprint for name, each in manifests.items()},
        )  # fmt: skip
        with self._lock:
            del self._running[trial.number]
            self._record(result, manifests)

    def _record(self, result: TrialResult, manifests: Mapping[str, Manifest]) -> None:
        """Records the result of a trial, first in the files, which a resumed sweep reads."""
        self.files.add(result)
        if result.state != "complete":
            cause = result.cause.strip().partition("\n")[0]
            self.run.announce(f"trial {result.number} {result.state}: {' '.join(overrides(result.params))}: {cause}")
        own = {name: value for name, value in result.metrics.items() if name.partition("/")[0] in self.sweep.own}
        end = TrialEnd(state=result.state, manifests=manifests, metrics=own | dict(result.values), cause=result.cause)
        self.run.tracker.trial_ends(result.number, end)
        if self._proposer and (line := self._proposer.tell(result)):
            self.run.announce(line)

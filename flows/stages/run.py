"""What the stages of one run share, and the check of all rows before the first of them trains."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from flows.planning.plan import Plan, PlannedStage
from flows.planning.reads import claim
from flows.planning.staleness import PlannedInput, write_examples
from flows.progress.observer import Observer
from flows.stages.admission import Waiting, admitted
from flows.stages.inputs import job_input
from flows.stages.job import CheckJob
from flows.stages.launch import StageProcesses
from flows.wording import counted
from lineage.artifact import DATA
from lineage.errors import LostError, StageError
from lineage.manifest import Manifest
from lineage.store import Store
from lineage.tracker import Tracker
from tasks.check_rows import EXAMPLES, POLICY, rows_slot
from tasks.data.kinds import HELD_OUT
from tasks.method import Method, Training


@dataclass
class DataChecks:
    """What was checked in one run: each stage's rows once."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _errors: dict[str, StageError | None] = field(default_factory=dict)  # fingerprint of a stage -> its refusal
    _examples: dict[str, int] = field(default_factory=dict)  # fingerprint of a stage -> how many it trains on in a pass

    def require(
        self, plan: Plan, planned: PlannedStage, processes: StageProcesses, waiting: Callable[[str], None],
        announce: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Checks the rows of this stage and of all that are to train after it, as far as they are prepared.

        Args:
            waiting: is called repeatedly with what the stage waits for.
            announce: is called with what leaked.

        Raises:
            PipelineError: the rows of one of them cannot be trained on.
        """
        if not isinstance(planned.stage.method, Training):
            return
        with self._lock:
            for each in [planned, *(other for other in plan.stale if other is not planned)]:
                job = check_job(plan, each, plan.entry(planned).path)
                if job is None:
                    continue
                if each.fingerprint not in self._errors:
                    wait = partial(waiting, f"the rows of {each.name}, checked first")
                    wait()
                    self._errors[each.fingerprint] = self._check(each, job, wait, processes, announce)
                error = self._errors[each.fingerprint]
                if error:
                    raise error

    def num_steps(self, planned: PlannedStage, method: Method) -> int | None:
        """Optimizer steps of a method on the rows of a stage; None: not known, or it takes none."""
        if not isinstance(method, Training):
            return None
        examples = self._examples.get(planned.fingerprint)
        return method.steps(lambda: examples or 0) if examples or method.num_steps else None

    def _check(
        self, planned: PlannedStage, job: CheckJob, wait: Waiting, processes: StageProcesses,
        announce: Callable[[str], None],
    ) -> StageError | None:  # fmt: skip
        """Returns what refuses the rows.

        Raises:
            LostError: its process was lost once too often: nothing is known of the rows.
        """
        for left in reversed(range(job.resources.max_failures + 1)):
            try:
                with admitted(job.resources.cpus_per_worker, 0, wait):
                    found = processes.run(job)
                break
            except LostError as lost:
                if not left:
                    raise
                announce(f"{lost}; its rows are checked again")
            except StageError as error:
                return error
        if EXAMPLES in found:
            self._examples[planned.fingerprint] = int(found[EXAMPLES])
            if planned.examples:
                write_examples(planned.examples, int(found[EXAMPLES]))
        if found["leaked_rows"]:
            leaked = counted(int(found["leaked_rows"]), "held-out row")
            announce(f"{job.stage}: {leaked} among what it trains on: {job.leakage}")
        return None


def check_job(plan: Plan, planned: PlannedStage, directory: Path) -> CheckJob | None:
    """The check of one stage's rows; None where it does not train, or what it needs is not made yet.

    Args:
        directory: of the stage that asks: the check goes to its log.
    """
    method = planned.stage.method
    if not isinstance(method, Training) or method.tokenization() is None or POLICY not in planned.inputs:
        return None
    slot = rows_slot(method)
    rows, (tokenizer, template) = planned.inputs[slot], _tokenizer(plan, planned)
    parents = {given.name: manifest for given in (rows, tokenizer) if (manifest := _manifest(plan, given))}
    if any(given.pinned is None and given.name not in parents for given in (rows, tokenizer)):
        return None
    return CheckJob(
        stage=planned.name, method=method, resources=planned.stage.resources, directory=directory,
        inputs={
            slot: job_input(plan, rows, method.consumes[slot], parents),
            POLICY: job_input(plan, tokenizer, method.consumes[POLICY], parents),
        },
        chat_template=template, held_out=dict(_held_out(plan)), previous_percent=_previous_percent(plan, planned),
    )  # fmt: skip


def _tokenizer(plan: Plan, planned: PlannedStage) -> tuple[PlannedInput, str | None]:
    """The model whose tokenizer a stage will be given, and the template that a stage between the two installs."""
    template: str | None = None
    while True:
        stated = planned.stage.method.recipe().get("chat_template")
        template = template or (str(stated) if stated else None)
        given = planned.inputs[POLICY]
        parent = None if given.pinned else plan.stage(given.name)
        if parent is None or not isinstance(parent.stage.method, Training) or POLICY not in parent.inputs:
            return given, template
        planned = parent


def _manifest(plan: Plan, given: PlannedInput) -> Manifest | None:
    entry = given.entry or (None if given.pinned else plan.entry(plan.stage(given.name)))
    return entry.manifest() if entry else None


def _held_out(plan: Plan) -> Iterator[tuple[str, Path]]:
    """Every set of rows that something may be measured on."""
    for planned in plan.stages:
        output = plan.entry(planned).output
        if planned.stage.method.produces in DATA and plan.entry(planned).is_finished() and (output / HELD_OUT).exists():
            yield planned.name, output


def _previous_percent(plan: Plan, planned: PlannedStage) -> float | None:
    """The share of tokens that this stage trained when this pipeline trained it last; None: never, or not asked."""
    if planned.name in plan.pipeline.accept_label_drop:
        return None
    finished = Store(plan.pipeline.store).finished(planned.name)
    mine = (manifest.metrics for manifest in finished if manifest.pipeline == plan.pipeline.name)
    return next((metrics["trained_tokens_percent"] for metrics in mine if "trained_tokens_percent" in metrics), None)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a plan: what its stages share.

    Args:
        titles: stage -> its title for the observer, where that is not its name.
        claim: keeps what further plans read, such as those of trials; raises as ``claim`` of the same name.
    """

    plan: Plan
    processes: StageProcesses
    observer: Observer
    tracker: Tracker
    titles: Mapping[str, str] = field(default_factory=dict)
    checks: DataChecks = field(default_factory=DataChecks)
    claim: Callable[[Sequence[Plan]], None] = claim

    def title(self, planned: PlannedStage) -> str:
        return self.titles.get(planned.name, planned.name)

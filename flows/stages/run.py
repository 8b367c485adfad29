"""What the stages of one run share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flows.planning.plan import Plan, PlannedStage
from flows.planning.reads import claim
from flows.progress.observer import Observer
from flows.stages.data_checks import DataChecks
from flows.stages.launch import StageProcesses
from lineage.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a plan: what its stages share.

    Args:
        titles: stage -> what its observer is told that it is called, where not by its name.
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

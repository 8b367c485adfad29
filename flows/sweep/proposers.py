"""Who proposes the trials of a sweep: every combination, or Optuna."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.pipeline import nearest
from flows.sweep.grid import Grid
from flows.sweep.objective import function_of
from flows.sweep.settings import Sweep
from flows.sweep.space import dimensions
from flows.sweep.trial import Proposer
from lineage.errors import ConfigError


def make_proposer(sweep: Sweep, params: Mapping[str, str], folder: Path) -> Proposer:
    """The proposer that a sweep states.

    Args:
        params: field -> values, of all that varies.
        folder: of the sweep, where Optuna keeps its study.

    Raises:
        ConfigError: it cannot propose from these values.
    """
    space = dimensions(params)
    if sweep.sampler is None:
        return Grid(space)
    from flows.sweep.study import Study  # the import of optuna

    return Study(sweep, space, folder)


def check_sweep(sweep: Sweep, stages: Sequence[str]) -> None:
    """Refuses what a sweep asks of trials that have only these stages.

    Raises:
        ConfigError: an objective or the pruning names another stage, or an objective's function cannot be imported.
    """
    for name, objective in sweep.objectives.items():
        if objective.function:
            function_of(name, objective.function)
        else:
            stage, slash, _ = str(objective.metric).partition("/")
            where = f"sweep.objectives.{name}.metric={objective.metric}"
            if not slash:
                raise ConfigError(f"{where}: is no metric of a stage; state STAGE/METRIC")
            _require_stage(where, stage, stages)
    if sweep.pruning:
        _require_stage(f"sweep.pruning.stage={sweep.pruning.stage}", sweep.pruning.stage, stages)


def _require_stage(where: str, stage: str, stages: Sequence[str]) -> None:
    if stage not in stages:
        raise ConfigError(
            f"{where}: no trial runs a stage {stage}; they run: {', '.join(stages)}{nearest(stage, list(stages))}"
        )

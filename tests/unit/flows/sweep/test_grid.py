"""Every combination, under stable numbers."""

import pytest

from flows.sweep.dimension import dimensions
from flows.sweep.proposers import Grid
from lineage.errors import ConfigError


def _asked(proposer) -> list:
    return list(iter(proposer.ask, None))


def test_every_combination_once_the_last_field_fastest():
    grid = Grid(dimensions({"a": "1,2,1", "b": "x,y"}))
    assert [trial.overrides for trial in grid.trials] == [
        ["a=1", "b=x"],
        ["a=1", "b=y"],
        ["a=2", "b=x"],
        ["a=2", "b=y"],
    ]
    assert _asked(grid) == grid.trials
    assert [trial.number for trial in grid.trials] == [0, 1, 2, 3]


def test_a_rerun_has_the_same_numbers():
    params = {"a": "shuffle(range(0,9))", "b": "x,y"}
    assert Grid(dimensions(params)).trials == Grid(dimensions(params)).trials


@pytest.mark.parametrize("values", ["interval(0,1)", "tag(log,range(1,5))"])
def test_what_only_a_sampler_reads_is_refused_with_the_remedy(values):
    with pytest.raises(ConfigError, match="sweep=optuna"):
        Grid(dimensions({"a": values}))

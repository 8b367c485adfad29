"""Every combination, under stable numbers."""

import pytest

from flows.sweep.proposers import make_proposer
from lineage.errors import ConfigError
from tests.sweeps import sweep


def _asked(proposer) -> list:
    return list(iter(proposer.ask, None))


def test_every_combination_once_the_last_field_fastest(tmp_path):
    grid = make_proposer(sweep(), {"a": "1,2,1", "b": "x,y"}, tmp_path)
    assert [trial.overrides for trial in grid.known()] == [
        ["a=1", "b=x"],
        ["a=1", "b=y"],
        ["a=2", "b=x"],
        ["a=2", "b=y"],
    ]
    assert _asked(grid) == grid.known()
    assert [trial.number for trial in grid.known()] == [0, 1, 2, 3]


def test_a_rerun_has_the_same_numbers(tmp_path):
    params = {"a": "shuffle(range(0,9))", "b": "x,y"}
    assert make_proposer(sweep(), params, tmp_path).known() == make_proposer(sweep(), params, tmp_path).known()


@pytest.mark.parametrize("values", ["interval(0,1)", "tag(log,range(1,5))"])
def test_what_only_a_sampler_reads_is_refused_with_the_remedy(tmp_path, values):
    with pytest.raises(ConfigError, match="sweep=optuna"):
        make_proposer(sweep(), {"a": values}, tmp_path)

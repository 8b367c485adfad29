"""Every shipped pipeline runs in miniature from its own sources, is finished then, and is deployed."""

import json

import pytest

from tests.command import Command
from tests.miniature import SHIPPED, overrides_of

GATED = 3  # exit code: in four steps no model passes an honest gate


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_pipeline_runs_and_then_there_is_nothing_to_do(tmp_path, prefect_url, name):
    command = Command(tmp_path, *overrides_of(name), environment={"PREFECT_API_URL": prefect_url})
    done = command("run", "--json")
    assert done.returncode in (0, GATED), done.stderr
    for row in json.loads(command("plan", "--json").stdout)["stages"]:
        assert row["state"] == "reuse" or (row["method"] == "Gate" and done.returncode == GATED), row
    metrics = {row["stage"]: row["metrics"] for row in json.loads(done.stdout)["stages"] if row.get("metrics")}
    assert any("steps" in found for found in metrics.values())

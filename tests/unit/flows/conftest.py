"""Plans of the toy pipeline, whose stages take no time."""

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from tests.command import CONF


@pytest.fixture
def toy(tmp_path, request):
    """Makes a plan with some overrides, on rows and a store of its own; a file may state its ``PIPELINE``."""
    name = getattr(request.module, "PIPELINE", "toy")
    (tmp_path / "rows.txt").write_text("rows")
    base = [f"pipeline={name}", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]

    def plan(*overrides: str):
        return make_plan(load_pipeline([*base, *overrides], CONF))

    return plan

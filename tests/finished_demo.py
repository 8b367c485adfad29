"""What `make demo` leaves in a checkout, in seconds: a finished store, and MLflow's database.

python -m tests.finished_demo    # `.ci/run` puts it there: no test may read it
"""

from pathlib import Path

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from lineage.mlflow.address import connect
from tests.command import REPOSITORY
from tests.finished import finish


def main() -> None:
    plan = make_plan(load_pipeline([f"store={REPOSITORY / 'artifacts'}"]))
    if plan.stale:
        finish(plan, *(planned.name for planned in plan.stale))
    connect(f"sqlite:///{Path(REPOSITORY, 'mlflow.db')}")


if __name__ == "__main__":
    main()

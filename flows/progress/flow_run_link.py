"""Which flow run of Prefect a process is in, for the notes of its runs."""

import sys
from dataclasses import replace

from flows.progress.run_notes import Links
from lineage.mlflow.address import shown


def with_flow_run(links: Links, *, is_ours: bool) -> Links:
    """Names the flow run: whoever is in one has imported Prefect; nobody else is made to.

    Args:
        is_ours: whether its server was started for this run alone, and has no pages.
    """
    if links.flow_run or "prefect.context" not in sys.modules:
        return links
    from prefect.context import FlowRunContext
    from prefect.settings import PREFECT_API_URL
    from prefect.utilities.urls import url_for

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return links
    run = context.flow_run
    return replace(
        links, flow_run=str(run.id), deployed=run.deployment_id is not None,
        flow_page=None if is_ours else url_for("flow-run", run.id),
        prefect_api=None if is_ours else shown(str(PREFECT_API_URL.value())),
    )  # fmt: skip

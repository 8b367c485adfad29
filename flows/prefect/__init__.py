"""Prefect: an embedded server, the flow of a run, deployments, triggers."""

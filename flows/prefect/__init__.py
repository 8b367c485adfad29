"""Prefect: a server for a command that has none, the flow of a run, deployments, triggers."""

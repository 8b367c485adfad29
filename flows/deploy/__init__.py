"""Pipelines as Prefect deployments: registered, run from Prefect's command line, UI or API, and looked at there."""

"""The work of stages. Runs in a plain Python process: no ray, no prefect."""

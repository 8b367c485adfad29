"""What a stage does. Runs in a plain Python process: no ray, no prefect."""

"""The record of a run beside its manifests: attempts, metrics, environment, events, verdicts."""

"""MLflow, a mirror of the manifests: written while a run goes, or refilled from them afterwards."""

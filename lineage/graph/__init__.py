"""The lineage graph: an index over the manifests, and queries on it."""

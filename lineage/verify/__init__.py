"""Is the record intact: each part against the manifests."""

"""Verification of the record: each part against the manifests."""

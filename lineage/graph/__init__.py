"""What an artifact was made from and went into: an index over the manifests, and the questions to it."""

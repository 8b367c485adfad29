"""Sources: what a pipeline starts from, checked and pinned."""

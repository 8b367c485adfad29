"""From converted rows to the files of a data stage: duplicates, splits, mixtures, and the report."""

"""How much of each set a mixture takes."""

from collections.abc import Mapping

from lineage.errors import DataError
from tasks.data.preparing.options import Prepare


def mixed_counts(counts: Mapping[str, int], options: Prepare) -> Mapping[str, int]:
    """Training rows to take of each slot: more than it has where rows are repeated.

    Args:
        counts: slot -> training rows that it has.

    Raises:
        DataError: a slot has none.
    """
    weights = _weights(counts, options)
    if weights is None:
        return counts
    empty = [slot for slot, count in counts.items() if not count]
    if empty:
        raise DataError(
            f"a mixture of {', '.join(counts)}: {', '.join(empty)} has no training row; give it rows, or take it out "
            "of the inputs and the proportions"
        )
    total = sum(weights.values())
    sizes = [counts[slot] * total / weight for slot, weight in weights.items()]
    size = max(sizes) if options.stopping == "all_exhausted" else min(sizes)
    return {slot: round(size * weight / total) for slot, weight in weights.items()}


def _weights(counts: Mapping[str, int], options: Prepare) -> Mapping[str, float] | None:
    if options.temperature is not None:
        return {slot: count ** (1 / options.temperature) for slot, count in counts.items()}
    return options.proportions

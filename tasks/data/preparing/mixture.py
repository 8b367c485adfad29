"""How much of each set a mixture takes."""

import math
from collections.abc import Mapping

from lineage.errors import DataError
from tasks.data.preparing.options import Prepare

_FEWEST, _MOST = 0.5, 2**40  # rows of a slot: what rounds to one, and more than any disk holds


def mixed_counts(counts: Mapping[str, int], options: Prepare) -> Mapping[str, int]:
    """Training rows to take of each slot: more than it has where rows are repeated.

    Args:
        counts: slot -> training rows that it has.

    Raises:
        DataError: a slot has none, or none is taken of it.
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
    per_weight = [counts[slot] / weight if weight else math.inf for slot, weight in weights.items()]
    rows = max(per_weight) if options.stopping == "all_exhausted" else min(per_weight)
    wanted = {slot: rows * weight for slot, weight in weights.items()}
    for slot, count in wanted.items():
        if not _FEWEST < count < _MOST:
            raise DataError(
                f"a mixture of {', '.join(counts)}: {count:.3g} rows of {slot}, which has {counts[slot]}; a mixture of "
                "one row of each slot at least is accepted, and one that can be written; state a larger share for the "
                "slot of the fewest rows, or a temperature nearer to 1"
            )
    return {slot: round(count) for slot, count in wanted.items()}


def _weights(counts: Mapping[str, int], options: Prepare) -> Mapping[str, float] | None:
    largest = max(counts.values()) or 1  # a power of the ratio to it cannot overflow
    if options.temperature is not None:
        return {slot: (count / largest) ** (1 / options.temperature) for slot, count in counts.items()}
    return options.proportions

"""What an unpaired answer is marked with: wanted or not."""

from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.values import named

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def label(value: object, unjudged: str) -> bool:
    """True: wanted.

    Args:
        unjudged: the format of such rows without a label, for the message.
    """
    known = _LABELS.get(str(value).lower()) if isinstance(value, bool | int | float | str) else None
    if known is None:
        raise BadRowError(
            f"label is {named(value)}", "true or false, 1 or 0",
            f"write one of these; if it is no judgement of the answer, set format={unjudged}", reason="no label",
        )  # fmt: skip
    return known

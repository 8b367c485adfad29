"""The refusal of one row."""


class BadRowError(Exception):
    """What is wrong with a row, what is accepted, and what to do.

    Args:
        reason: a few words to count by, such as ``no answer``.
    """

    def __init__(self, found: str, accepted: str, mend: str, *, reason: str = "not of the format") -> None:
        super().__init__(f"{found}; accepted: {accepted}; {mend}")
        self.reason = reason

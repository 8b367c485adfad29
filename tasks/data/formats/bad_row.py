"""The refusal of one row."""


class BadRowError(Exception):
    """What is wrong with a row, what is accepted, and what to do.

    Args:
        found: what is wrong, such as ``output is the number 42``.
        reason: a few words to count by, such as ``no answer``.
    """

    def __init__(self, found: str, accepted: str, mend: str, *, reason: str = "not of the format") -> None:
        found = found.encode(errors="backslashreplace").decode()  # it may quote what cannot be written
        super().__init__(found, accepted, mend)
        self.found, self.accepted, self.mend, self.reason = found, accepted, mend, reason

    def __str__(self) -> str:
        return f"{self.found}; accepted: {self.accepted}; {self.mend}"

"""How long somebody was not heard of, by one who looks now and then."""

import time


class Silence:
    """How long a holder was silent while somebody looked.

    A look may take as long as the store is away; the holder could not be heard then, and is not taken for dead for it.
    """

    def __init__(self, beat: int) -> None:
        self._beat, self._seconds, self._looked = beat, 0.0, time.monotonic()

    def seconds(self, beat: int, longest: float) -> float:
        """Looks again; in seconds of the waiter's own clock, since the heartbeat changed.

        Args:
            longest: time from one look to the next that is counted.
        """
        now = time.monotonic()
        gap = min(now - self._looked, longest)
        self._seconds = self._seconds + gap if beat == self._beat else 0.0
        self._beat, self._looked = beat, now
        return self._seconds

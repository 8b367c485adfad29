"""Notes of flow runs that Prefect may think are under way when they are over, for the next command. No prefect here."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from flows.prefect_address import configured_api_url, use_own_auth
from flows.progress.run_record import latest
from lineage.files import atomic_write
from lineage.owner import Owner

End = Literal["COMPLETED", "FAILED", "CANCELLED", "CRASHED"]  # as Prefect spells its types of states

_FOLDER = Path("logs") / "prefect-open"


@dataclass(frozen=True, kw_only=True)
class OpenFlow:
    """One flow run, noted when it begins; the note is gone when Prefect knows how it ended.

    Args:
        api: of Prefect; None: a server that was started for this run alone, on the user's own database.
        end: what it came to; CRASHED also while it is under way, since that is what a kill is.
        message: why.
        finished: names of its task runs whose stages are committed.
    """

    flow_run: str
    driver: Owner
    api: str | None
    end: End = "CRASHED"
    message: str = ""
    finished: Sequence[str] = ()

    def path(self, store: Path) -> Path:
        return store / _FOLDER / f"{self.flow_run}.json"

    def write(self, store: Path) -> None:
        """Puts the note in its place, whole, over what it said before.

        Raises:
            OSError: the store cannot be written.
        """
        atomic_write(self.path(store), json.dumps(asdict(self)))

    def remove(self, store: Path) -> None:
        """Prefect knows how it ended; another command may have said so before.

        Raises:
            OSError: the store cannot be written.
        """
        self.path(store).unlink(missing_ok=True)


def left_open(store: Path) -> Iterator[OpenFlow]:
    """Of drivers that are gone: of this machine, or not heard of for long."""
    silent = {note.links.flow_run for note in latest(store) if note.is_dead(store)}
    for path in sorted((store / _FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # another command is as fast
            fields = json.loads(path.read_text())
            flow = OpenFlow(**fields | {"driver": Owner(**fields["driver"])})
            if flow.flow_run in silent or flow.driver.is_dead(silent_seconds=0.0):
                yield flow if flow.message else replace(flow, message=_killed(flow.driver))


def tell_of_killed(store: Path) -> None:
    """Tells the user's Prefect of runs whose drivers were killed; costs nothing where there are none."""
    url = configured_api_url()
    if url and any(flow.api == url for flow in left_open(store)):
        use_own_auth(url)
        from flows.prefect_told import tell_left  # imports prefect

        tell_left(store, url)


def _killed(driver: Owner) -> str:
    return f"its process {driver.pid} on {driver.host} was killed; run the same command again to go on"

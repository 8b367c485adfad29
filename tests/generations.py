"""Generations of the toy pipeline that retrains, as its rows grow."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from lineage.promotions import read_events, stacks
from tests.command import Command

TOY_RETRAIN = ("pipeline=toy-retrain", "model=none", "sources.rows.path=rows.jsonl")


def champion(folder: Path) -> str | None:
    """The first digits of the fingerprint of the model that has the alias."""
    held = stacks(read_events(folder / "artifacts")).get("champion", [])
    return held[-1].fingerprint[:16] if held else None


@dataclass
class Generations:
    """A folder whose rows grow, run by run.

    Args:
        heard: what the webhook was sent.
    """

    toy: Command
    heard: list[dict[str, str]]
    count: int = 0
    rows: list[str] = field(default_factory=list)

    def grow(self, word: str, count: int) -> None:
        self.rows += [f"{word} row {number}" for number in range(self.count, self.count + count)]
        self.count += count
        self.write()

    def write(self) -> None:
        (self.toy.folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in self.rows))

    def run(self, code: int = 0) -> dict[str, dict]:
        result = self.toy("run", "--json")
        assert result.returncode == code, result.stderr
        return {row["stage"]: row for row in json.loads(result.stdout)["stages"]}

    def say(self, subject: str, *parts: str) -> None:
        """What was heard last, and that nothing else was."""
        [message] = self.heard
        self.heard.clear()
        assert message["subject"] == f"toy-retrain: {subject}"
        assert "\n" not in message["body"]
        for part in parts:
            assert part in message["body"]

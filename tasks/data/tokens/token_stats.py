"""Statistics of rows that were tokenized: kept beside the tokens, shown before the first step, and metrics of a run."""

import json
from dataclasses import asdict, dataclass, field, fields

from tasks.data.kinds import LABEL_NAMES, RowOutcome

CONTROL_TOKENS = "control_tokens"  # why a row is dropped: its texts spell some
MAX_NAMED = 20  # rows in one message; all of them are in the file of outcomes


@dataclass(kw_only=True)
class Named:
    """The number of affected rows, and the ids of the first of them."""

    count: int = 0
    row_ids: list[str] = field(default_factory=list)

    def add(self, row_id: str) -> None:
        self.count += 1
        if len(self.row_ids) < MAX_NAMED:
            self.row_ids.append(row_id)

    def __str__(self) -> str:
        more = self.count - len(self.row_ids)
        return ",".join(self.row_ids) + (f" and {more} more" if more else "")


@dataclass(kw_only=True)
class TokenStats:
    """Statistics of the rows that were tokenized.

    Args:
        gets_loss: whether tokens are trained before anything is generated: not those of prompts.
        num_rows: rows that came in.
        num_examples: rows that are trained on; chunks, for text; packs, for packed rows.
        num_tokens, num_trained: tokens that a trainer reads, and those of them that get loss.
        cut, prompts_cut, dropped: rows that lost their end, the beginning of their prompt, and all; these by reason.
        merged: rows with a start of the assistant over which tokens would merge.
        control: rows whose texts spell control tokens; ``spelled`` are these, ``keeps_control`` whether they are kept.
        unknown: rows of which some text has no token.
        split: rows that are several examples, since the chat template renders earlier turns otherwise than the last.
        stop_tokens: those that end the assistant's turns: what generation must stop at.
        lengths: tokens of a row before anything was cut -> rows.
        samples: texts of the first rows as they are trained, the trained part in ⟦ ⟧.
        labels: of single answers: desirable and undesirable -> rows that are trained on.
    """

    gets_loss: bool = True

    num_rows: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    packed: bool = False
    cut: Named = field(default_factory=Named)
    prompts_cut: Named = field(default_factory=Named)
    dropped: dict[str, Named] = field(default_factory=dict)
    split: Named = field(default_factory=Named)
    merged: Named = field(default_factory=Named)
    control: Named = field(default_factory=Named)
    spelled: list[str] = field(default_factory=list)
    keeps_control: bool = False
    unknown: Named = field(default_factory=Named)
    stop_tokens: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: RowOutcome) -> None:
        """Counts a row."""
        self.num_rows += 1
        self.lengths[outcome.length] = self.lengths.get(outcome.length, 0) + 1
        if outcome.cut:
            self.cut.add(outcome.row_id)
        if outcome.prompt_cut:
            self.prompts_cut.add(outcome.row_id)
        if outcome.num_examples > 1:
            self.split.add(outcome.row_id)
        if outcome.merged:
            self.merged.add(outcome.row_id)
        if outcome.spelled:
            self.control.add(outcome.row_id)
            self.spelled = sorted({*self.spelled, *outcome.spelled})[:MAX_NAMED]
        if outcome.unknown:
            self.unknown.add(outcome.row_id)
        self.stop_tokens = sorted({*self.stop_tokens, *outcome.stops})
        if outcome.dropped:
            self.dropped.setdefault(outcome.dropped, Named()).add(outcome.row_id)
        else:
            self.num_tokens += outcome.tokens
            self.num_trained += outcome.trained
            if outcome.label is not None:
                name = LABEL_NAMES[outcome.label]
                self.labels[name] = self.labels.get(name, 0) + 1

    @property
    def control_done(self) -> str:
        """What was done with the control tokens that rows spell."""
        if CONTROL_TOKENS in self.dropped:
            return "these rows are dropped"
        return "they become these tokens" if self.keeps_control else "they are encoded as text"

    @property
    def trained_percent(self) -> float:
        return 100.0 * self.num_trained / max(self.num_tokens, 1)

    @property
    def length(self) -> int:
        """Tokens of all rows, before anything was cut."""
        return sum(length * count for length, count in self.lengths.items())

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "rows": float(self.num_rows),
            "rows_cut": float(self.cut.count),
            "rows_dropped": float(sum(named.count for named in self.dropped.values())),
            **({"prompts_cut": float(self.prompts_cut.count)} if self.prompts_cut.count else {}),
            **({"rows_split": float(self.split.count)} if self.split.count else {}),
            **({"rows_with_boundaries": float(self.merged.count)} if self.merged.count else {}),
            **({"rows_with_control_tokens": float(self.control.count)} if self.control.count else {}),
            **({"rows_with_unknown_tokens": float(self.unknown.count)} if self.unknown.count else {}),
            **({"packs": float(self.num_examples)} if self.packed else {}),
            **{f"{name}_rows": float(count) for name, count in sorted(self.labels.items())},
            **(
                {"trained_tokens_percent": self.trained_percent}
                if self.gets_loss
                else {"prompt_tokens": float(self.num_tokens)}
            ),
        }

    @property
    def quantiles(self) -> dict[str, int]:
        """Quantiles of the lengths in tokens, and the longest."""
        lengths = sorted(self.lengths.items())
        found = {}
        for percent in (50, 95, 99):
            left = max(1, -(-percent * self.num_rows // 100))  # position of that row, from the shortest
            for length, count in lengths:
                left -= count
                if left <= 0:
                    found[f"p{percent}"] = length
                    break
        return {**found, "max": lengths[-1][0]} if lengths else {}

    def to_json(self) -> str:
        shown = {**asdict(self), **self.quantiles, "trained_tokens_percent": self.trained_percent}
        return json.dumps(shown, indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> "TokenStats":
        known = {each.name for each in fields(TokenStats)}  # stats of text, conversations and pairs may be older
        stored = {name: value for name, value in json.loads(text).items() if name in known}
        names = [each.name for each in fields(TokenStats) if each.type is Named and each.name in stored]
        stored |= {name: Named(**stored[name]) for name in names}
        stored["dropped"] = {reason: Named(**named) for reason, named in stored["dropped"].items()}
        stored["lengths"] = {int(length): count for length, count in stored["lengths"].items()}
        return TokenStats(**stored)

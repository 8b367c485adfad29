"""Fields of every data stage."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.data.formats.proposals import placeholders
from tasks.data.kinds import ROW_KINDS
from tasks.recipe import Method

ROWS, REPLAY, TOKENIZER = "rows", "replay", "tokenizer"  # slots

EMPTY_ROWS = frozenset({"no answer", "empty prompt", "no text", "no message", "no messages"})  # reasons
DEFAULT_BAD_SHARE = 0.01  # of such rows, that are left out unless max_bad_rows is set

_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Prepare(Method):
    """Reads, checks, identifies, splits and writes a user's rows.

    Slots:
        rows, and any further ones: rows to prepare; several slots are a mixture.
        replay: prepared rows of an earlier model.
        tokenizer: a model whose tokenizer measures the lengths in the report.

    Args:
        held_out: below 1: a share of the keys; from 1 on: a number of rows, rounded up to whole keys. A key is a row's
            ``group``, else its prompt (in a conversation, all before the last answer), else the row itself. The hash of
            the key decides. With a share, added rows move no row to the other split. With a number, added rows lower
            the threshold: a row that was trained on is never held out, and a row that is no longer held out is
            excluded from both splits (counted as on neither side) until there is about twice as much data. For that,
            about as many rows as are held out go to neither side.
        seed: of the split and of the mixture.
        replay_share: share of replayed rows in the training rows.
        max_bad_rows: how many bad rows may be left out: below 1 a share of the rows, from 1 on a number; with more, the
            stage fails. None: 1 in 100 that are empty or without an answer, and none with another fault.
            ``rejects.jsonl`` lists them.
        system_prompt: added to every conversation or prompt without one.
        prompt_template: builds the prompt of a row from its columns, such as ``{context}\\n\\n{question}``.
        tool_nulls: nulls in the arguments of calls and in tools, which are objects: left out (``drop``), as those of
            tables are, or what the user wrote (``keep``). None: a row with one is bad. In JSON text they are kept.
        proportions: slot -> share of the training rows, for all slots, with the sum 1. All held-out rows are kept.
        temperature: proportions by size: a slot of n rows weighs n^(1/temperature), so that 1 is the sizes themselves
            and more makes them more alike (Raffel et al. 2020, arXiv:1910.10683, section 3.5.2).
        stopping: ``first_exhausted`` (the default): the largest mixture without repeated rows; ``all_exhausted``: the
            smallest mixture with every row.
    """

    version: ClassVar[int] = 2
    optional: ClassVar[frozenset[str]] = frozenset({REPLAY, TOKENIZER, "*"})
    preload: ClassVar[tuple[str, ...]] = ()

    held_out: float | int = 0.05
    seed: Annotated[int, Ge(0)] = 0
    replay_share: Annotated[float, Gt(0), Lt(1)] | None = None
    max_bad_rows: Annotated[float | int, Ge(0)] | None = None
    system_prompt: Annotated[str, MinLen(1)] | None = None
    prompt_template: str | None = None
    tool_nulls: Literal["drop", "keep"] | None = None
    proportions: Mapping[str, float] | None = None
    temperature: Annotated[float, Gt(0)] | None = None
    stopping: Literal["first_exhausted", "all_exhausted"] | None = None

    def recipe(self) -> dict[str, object]:
        """The default has the identity that 0 had before there was a share, and 0 one of its own."""
        limit: object = 0 if self.max_bad_rows is None else self.max_bad_rows or "none"
        return {**super().recipe(), "max_bad_rows": limit}

    def accepts_bad_rows(self, bad: Mapping[str, int], num_rows: int) -> bool:
        """Whether so many bad rows, by reason, may be left out."""
        count, limit = sum(bad.values()), self.max_bad_rows
        if limit is None:
            return bad.keys() <= EMPTY_ROWS and count <= num_rows * DEFAULT_BAD_SHARE
        return count <= (limit if limit >= 1 else limit * num_rows)

    def __init_subclass__(cls, **kwargs: object) -> None:
        if "produces" in cls.__dict__ and "consumes" not in cls.__dict__:
            cls.consumes = {ROWS: Kind.ROWS, REPLAY: cls.produces, TOKENIZER: Kind.CHECKPOINT, "*": Kind.ROWS}
        super().__init_subclass__(**kwargs)

    def __post_init__(self) -> None:
        self._check_held_out()
        self._check_mixture()
        if self.prompt_template is not None:
            placeholders(self.prompt_template)
        if not ROW_KINDS[self.produces].chat and (self.system_prompt is not None or self.prompt_template is not None):
            field = "system_prompt" if self.system_prompt is not None else "prompt_template"
            raise ConfigError(
                f"{field}: this stage produces raw text, which has neither system nor user; remove it, or prepare "
                "conversations with conf/stage/conversations.yaml"
            )

    def _check_held_out(self) -> None:
        counted = isinstance(self.held_out, int)
        if isinstance(self.held_out, bool) or not (self.held_out >= 1 if counted else 0 < self.held_out < 1):
            raise ConfigError(
                f"held_out={self.held_out}: a share of the rows above 0.0 and below 1.0, or a count of them from 1 on, "
                "is accepted; set held_out=0.05 or held_out=200"
            )
        if counted and self.replay_share is not None:
            raise ConfigError(
                f"held_out={self.held_out} and replay_share={self.replay_share}: the threshold of a count moves as "
                "rows are added, and new rows of a group that was held out would be trained on; set a "
                "share: held_out=0.05"
            )

    def _check_mixture(self) -> None:
        if self.proportions is not None and self.temperature is not None:
            raise ConfigError("proportions and temperature both say how much of each slot is taken; set one of them")
        if self.stopping is not None and self.proportions is None and self.temperature is None:
            raise ConfigError(f"stopping={self.stopping}: there is no mixture to stop; set proportions or temperature")
        if self.stopping == "all_exhausted" and self.replay_share is not None:
            raise ConfigError(
                "stopping=all_exhausted and replay_share: rows that are repeated and rows that come back would have "
                "one name; set stopping=first_exhausted"
            )
        shares = self.proportions or {}
        total = math.fsum(shares.values())
        if self.proportions is not None and (min(shares.values(), default=0) <= 0 or abs(total - 1) > _SUM_TOLERANCE):
            configured = ", ".join(f"{slot}: {share:g}" for slot, share in shares.items())
            raise ConfigError(
                f"proportions={{{configured}}}: the sum is {total:g}; shares above 0 with the sum 1 are accepted"
            )

    def row_slots(self, filled: Collection[str]) -> list[str]:
        """The slots of rows, in the order in which they are read.

        Args:
            filled: all slots with an input.

        Raises:
            ConfigError: ``proportions`` does not name all slots, or there is nothing to mix.
        """
        slots = [ROWS, *sorted(set(filled) - self.consumes.keys())]
        if self.proportions is not None and set(self.proportions) != set(slots):
            raise ConfigError(
                f"proportions name {', '.join(self.proportions)}; the slots of rows are {', '.join(slots)}; set a "
                "share for each of them"
            )
        if self.temperature is not None and len(slots) == 1:
            raise ConfigError(
                f"temperature={self.temperature:g}: there is one slot of rows, and nothing to mix; fill a second one, "
                "such as inputs.more=<source>, or set temperature=null"
            )
        return slots

    def highest_share(self) -> int:
        """The highest ``key_share`` that is held out, for a fractional ``held_out``."""
        return math.ceil(Fraction(self.held_out) * 2**64) - 1

"""What the looks at a store's users find."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Needed:
    """What stays.

    Args:
        by: key -> who needs it, in words: of an artifact its node, without ancestors; or ``TOKENS``.
        pipelines: of which everything stays, because what they need cannot be told; and why.
        everything: why all of the store stays.
        planned: names of the pipelines whose needs are known.
        unplanned: names of those that stand only with overrides, which nobody has stated here; and what they lack.
        lines: for people, of what else stays that would go.
    """

    by: dict[str, str] = field(default_factory=dict)
    pipelines: dict[str, str] = field(default_factory=dict)
    everything: list[str] = field(default_factory=list)
    planned: set[str] = field(default_factory=set)
    unplanned: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

"""What was found of a training stage, as it is written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lineage.manifest import Provenance

Verdict = Literal["bit-identical", "within tolerance", "differs", "not compared"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An interrupted training beside the unbroken one.

    Args:
        detail: what differs first; why it was not compared.
        num_workers: before and after the interruption.
        resumed_at: steps of the checkpoints that it went on from.
        loss_difference: the largest of a step's loss or count of tokens, relative; None: no number says.
        weight_difference: norm of the difference of all weights, by that of what the unbroken training had added to
            them; None: as before.
    """

    verdict: Verdict
    detail: str = ""
    num_workers: tuple[int, int]
    resumed_at: tuple[int, ...] = ()
    loss_difference: float | None = None
    weight_difference: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far what has other workers may be apart.

    Args:
        losses: relative, of each step's loss and count of tokens.
        weights: norm of the difference, by that of what the training had added to them.
    """

    losses: float
    weights: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was found of one training stage.

    Args:
        key: of all that the verdicts depend on, as ``basis`` states it.
        comparisons: how it was interrupted -> what came of it.
        tolerance: with other workers; with the same, every bit counts.
        provenance: of the unbroken training.
    """

    key: str
    basis: Mapping[str, object]
    pipeline: str
    stage: str
    num_steps: int
    save_steps: int
    tolerance: Tolerance
    comparisons: Mapping[str, Comparison]
    provenance: Provenance

    def words(self) -> str:
        """The verdicts: ``killed bit-identical, resharded within tolerance``."""
        return ", ".join(f"{how} {comparison.verdict}" for how, comparison in self.comparisons.items())

    @staticmethod
    def from_json(text: str) -> "Certificate":
        fields = json.loads(text)
        comparisons = {
            how: Comparison(
                **{**each, "num_workers": tuple(each["num_workers"]), "resumed_at": tuple(each["resumed_at"])}
            )
            for how, each in fields["comparisons"].items()
        }
        tolerance, ran = Tolerance(**fields["tolerance"]), Provenance(**fields["provenance"])
        return Certificate(**{**fields, "comparisons": comparisons, "tolerance": tolerance, "provenance": ran})

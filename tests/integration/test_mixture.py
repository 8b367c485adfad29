"""What a mixture takes of each slot."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from lineage.errors import ConfigError, DataError
from tasks.data.preparing.decide import mixed_counts
from tasks.prepare_data import PrepareText
from tests.prepared import numbered, prepare_slots, report, side

EVEN = {"rows": 0.5, "more": 0.5}


def mixed(directory: Path, method: PrepareText, out: str = "out", **counts: int) -> dict[str, float]:
    """One slot for each name, of so many rows that begin with it."""
    slots = {slot: (numbered(count, slot), {}) for slot, count in counts.items()}
    return prepare_slots(directory, method, slots, out)


def trained(directory: Path, name: str = "train", out: str = "out") -> Mapping[str, int]:
    return Counter(str(row["text"]).split()[0] for row in side(directory, name, out))


def test_without_a_mixture_all_rows_of_all_slots_are_used_and_interleaved(tmp_path: Path) -> None:
    metrics = mixed(tmp_path, PrepareText(held_out=0.2), rows=400, more=100)
    assert (metrics["rows"], metrics["dropped"]) == (500, 0)
    assert trained(tmp_path) + trained(tmp_path, "held_out") == {"rows": 400, "more": 100}
    assert set(report(tmp_path)["sources"]) == {"rows", "more"}
    slots = [str(row["text"]).split()[0] for row in side(tmp_path, "train")]
    for part in range(1, 5):
        share = slots.count("more") * part / 4
        assert slots[: len(slots) * part // 4].count("more") == pytest.approx(share, abs=2)


def test_the_first_exhausted_slot_ends_the_mixture_and_no_row_is_repeated(tmp_path: Path) -> None:
    method = PrepareText(held_out=0.2, proportions={"rows": 0.75, "more": 0.25})
    metrics = mixed(tmp_path, method, rows=300, more=300)
    found, held_out = trained(tmp_path), trained(tmp_path, "held_out")
    assert found["rows"] == 300 - held_out["rows"]
    assert found["more"] == pytest.approx(found["rows"] / 3, abs=1)
    left_out = 300 - held_out["more"] - found["more"]
    assert report(tmp_path)["sources"]["more"]["dropped"] == {"left out by the mixture": left_out}
    assert metrics["dropped"] == left_out
    assert metrics["rows"] == 600 - left_out


def test_all_exhausted_repeats_rows_until_every_row_is_used(tmp_path: Path) -> None:
    metrics = mixed(tmp_path, PrepareText(held_out=0.2, proportions=EVEN, stopping="all_exhausted"), rows=300, more=70)
    found, held_out = trained(tmp_path), trained(tmp_path, "held_out")
    assert found["rows"] == found["more"] == 300 - held_out["rows"]
    times = Counter(str(row["text"]) for row in side(tmp_path, "train"))
    of_more = [count for text, count in times.items() if text.startswith("more")]
    assert len(of_more) == 70 - held_out["more"]
    assert max(of_more) - min(of_more) == 1
    assert metrics["repeated_rows"] == found["more"] - len(of_more)
    assert metrics["rows"] == 370 and metrics["dropped"] == 0
    ids = [row["row_id"] for name in ("train", "held_out") for row in side(tmp_path, name)]
    assert len(set(ids)) == len(ids)


def test_a_mixture_keeps_the_held_out_rows_and_is_drawn_again_by_its_seed(tmp_path: Path) -> None:
    mixed(tmp_path, PrepareText(held_out=0.2), "all", rows=300, more=100)
    for out, seed in (("first", 0), ("again", 0), ("other", 1)):
        mixed(tmp_path, PrepareText(held_out=0.2, proportions=EVEN, seed=seed), out, rows=300, more=100)
    assert side(tmp_path, "held_out", "all") == side(tmp_path, "held_out", "first")
    first, again, other = (side(tmp_path, "train", out) for out in ("first", "again", "other"))
    assert first == again != other


def test_a_temperature_makes_slots_more_alike(tmp_path: Path) -> None:
    shares = []
    for temperature in (1.0, 2.0, 100.0):
        mixed(tmp_path, PrepareText(held_out=0.1, temperature=temperature), str(temperature), rows=900, more=100)
        found = trained(tmp_path, out=str(temperature))
        shares.append(found["more"] / found.total())
    assert shares == pytest.approx([0.1, 0.25, 0.5], abs=0.02)
    assert mixed_counts({"rows": 300, "more": 40}, PrepareText(temperature=0.5)) == {"rows": 300, "more": 5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"proportions": {"rows": 0.5, "more": 0.4}},
            r"^proportions=.*: the sum is 0.9; shares above 0 with the sum 1",
        ),
        ({"proportions": {"rows": 1.5, "more": -0.5}}, r"the sum is 1; shares above 0 with the sum 1 are accepted"),
        ({"proportions": EVEN, "temperature": 2.0}, "both say how much of each slot is taken; set one of them"),
        ({"stopping": "all_exhausted"}, "there is no mixture to stop; set proportions or temperature"),
        (
            {"proportions": EVEN, "stopping": "all_exhausted", "replay_share": 0.3},
            "rows that are repeated and rows that come back would have one name; set stopping=first_exhausted",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_when_it_is_set(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrepareText(**fields)  # type: ignore[arg-type]


def test_a_mixture_that_does_not_fit_its_slots_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^proportions name rows, more; the slots of rows are rows, other; set a"):
        mixed(tmp_path, PrepareText(proportions=EVEN), rows=30, other=30)
    with pytest.raises(ConfigError, match=r"^temperature=2: there is one slot of rows, and nothing to mix; "):
        mixed(tmp_path, PrepareText(temperature=2.0), rows=30)
    with pytest.raises(DataError, match=r"^a mixture of rows, more: more has no training row; give it rows, or take"):
        mixed(tmp_path, PrepareText(held_out=0.9, seed=3, proportions=EVEN), rows=300, more=1)


@pytest.mark.parametrize(
    ("method", "slot"),
    [
        (PrepareText(temperature=0.001), "0 rows of more"),
        (PrepareText(temperature=0.001, stopping="all_exhausted"), "inf rows of rows"),
        (PrepareText(proportions={"rows": 0.999, "more": 0.001}), "0.3 rows of more"),
    ],
)
def test_a_mixture_that_leaves_a_slot_out_or_cannot_be_written_is_refused(method: PrepareText, slot: str) -> None:
    with pytest.raises(DataError, match=rf"^a mixture of rows, more: {slot}, which has .*; set a larger share"):
        mixed_counts({"rows": 300, "more": 40}, method)

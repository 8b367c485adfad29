"""Sets of the hub, whole or as a stream that ends."""

import pytest
from datasets import Dataset, IterableDataset

from lineage.errors import ConfigError
from tasks.data.reading.chunk import Row
from tests.unit.tasks.data.reading.written import read, rows_of


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A hub with a set of 3,000 numbers. Returns what it was asked for."""
    asked: list[dict[str, object]] = []
    rows = Dataset.from_dict({"number": list(range(3000))})

    def load_dataset(path: str, *, streaming: bool, **options: object) -> Dataset | IterableDataset:
        asked.append({"path": path, "streaming": streaming, **options})
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return asked


def test_a_set_of_the_hub_is_read_whole_at_its_revision(hub: list[dict[str, object]]) -> None:
    rows = read("owner/name", revision="abc", split="dev[10%:]")
    assert [row.fields["number"] for row in rows if isinstance(row, Row)] == list(range(3000))
    assert rows[1234].where == "owner/name[1234]"
    assert hub == [{"path": "owner/name", "streaming": False, "name": None, "revision": "abc", "split": "dev"}]


def test_subset_and_loader_are_passed_on(hub: list[dict[str, object]]) -> None:
    read("owner/name", revision="abc", subset="german", loader={"data_files": "a/*.parquet"})
    assert hub[0]["name"] == "german" and hub[0]["data_files"] == "a/*.parquet"


def test_a_stream_ends_with_its_slice_or_its_sample(hub: list[dict[str, object]]) -> None:
    def numbers(**fields: object) -> list[object]:
        return [row["number"] for row in rows_of("owner/name", streaming=True, **fields)]  # type: ignore[index]

    assert numbers(split="train[100:1500]") == list(range(1500))
    assert numbers(sample_count=7) == list(range(7))
    # A slice is of the rows as they stand: the sample is drawn from it later.
    assert numbers(split="train[:1500]", sample_count=7, shuffle_seed=1) == list(range(1500))
    drawn = numbers(sample_count=7, shuffle_seed=1)
    assert len(set(drawn)) == 7 and max(map(int, map(str, drawn))) > 100
    assert drawn == numbers(sample_count=7, shuffle_seed=1) != numbers(sample_count=7, shuffle_seed=2)
    assert max(map(int, map(str, numbers(sample_count=7, shuffle_seed=1, shuffle_buffer=10)))) < 20
    assert all(each["split"] == "train" and each["streaming"] for each in hub)


@pytest.mark.parametrize("split", ["train", "train[90%:]", "train[:90%]", "train[-100:]", "train[100:]"])
def test_a_stream_without_an_end_is_refused(hub: list[dict[str, object]], split: str) -> None:
    with pytest.raises(ConfigError, match=r"owner/name: streaming without an end.*set sample_count, or a slice"):
        read("owner/name", streaming=True, split=split)
    assert not hub

"""A split and the part of it, as the user writes them."""

import pytest
from datasets import ReadInstruction

from lineage.errors import ConfigError, DataError
from tasks.data.reading.slices import parse_split


@pytest.mark.parametrize("text", ["train", "validation", "test_2.a-b"])
def test_a_name_alone_is_the_whole_split(text: str) -> None:
    assert parse_split(text) == (text, None)


@pytest.mark.parametrize("count", [100, 333, 2001])
@pytest.mark.parametrize(
    "bounds", ["90%:", ":10%", "10%:20%", ":100", "50:100", "-100:", "-50:-10", ":-1%", "-33%:", "7:", ":", "33%:66%"]
)
def test_a_slice_is_what_datasets_takes_it_for(bounds: str, count: int) -> None:
    name, part = parse_split(f"dev[{bounds}]")
    assert part
    expected = ReadInstruction.from_spec(f"dev[{bounds}]").to_absolute({"dev": count})[0]
    assert (name, *part.bounds(count)) == ("dev", expected.from_ or 0, count if expected.to is None else expected.to)


def test_a_slice_beyond_the_last_row_ends_there() -> None:
    _, part = parse_split("train[:1000]")
    assert part and part.bounds(300) == (0, 300)


@pytest.mark.parametrize("bounds", ["300:", "5:5", "20:10", ":0", "90%:80%"])
def test_a_slice_of_no_row_is_refused(bounds: str) -> None:
    _, part = parse_split(f"train[{bounds}]")
    with pytest.raises(DataError) as refusal:
        assert part and part.bounds(300)
    assert str(refusal.value) == (
        f"split='train[{bounds}]' of 300 rows leaves none; give a part that has at least one row"
    )


@pytest.mark.parametrize(
    ("text", "last"),
    [("[:1000]", 1000), ("[10:20]", 20), ("[10:]", None), ("[:10%]", None), ("[-10:]", None), ("[:-10]", None)],
)
def test_some_slices_end_where_no_count_is_needed(text: str, last: int | None) -> None:
    _, part = parse_split(f"train{text}")
    assert part and part.last == last


@pytest.mark.parametrize(
    "text", ["", "train[", "train[5]", "train[a:]", "train[1.5%:]", "train[:1000]x", "train+test", "train[::2]", "[:5]"]
)
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_split(text)
    assert str(refusal.value) == (
        f"split={text!r}: a split, or a part of one in rows or percent, such as train[:1000], train[90%:] or "
        "train[-100:] is accepted; write it so"
    )


def test_more_than_all_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"split='train\[:101%\]': 101% is more than all rows"):
        parse_split("train[:101%]")

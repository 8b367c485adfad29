"""Short rows together in examples of one length, so that little of a batch is padding."""

from pathlib import Path

_ROWS_PER_SEARCH = 10_000  # best fits are looked for among so many


def pack(tokens: Path, max_length: int) -> int:
    """Replaces rows by packs of them: best-fit decreasing, Ding et al. 2024, arXiv:2404.10830. Returns how many.

    Each pack holds whole rows, one after the other; ``seq_lengths`` are their lengths.
    """
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()  # it fills logs, and says nothing
    draft = tokens.with_suffix(".packs")
    packs = pack_dataset(
        Dataset.from_file(str(tokens)), max_length, strategy="bfd",
        map_kwargs={"batch_size": _ROWS_PER_SEARCH, "cache_file_name": str(draft)},
    )  # fmt: skip
    draft.replace(tokens)
    return len(packs)

"""A source of whose first rows none can be read: those after them are refused, one by one."""

from pathlib import Path

from lineage.artifact import Kind, Source
from tasks.data.preparing.convert_rows import ConvertRows, detect_source


def test_rows_behind_a_thousand_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((("x" * 1023) + "\n") * 3000 + '{"text": "a"}\n', encoding="utf-8")
    opened = detect_source(Source(path=str(path)))
    detected, chunks = opened.detected, opened.chunks
    assert detected is None

    convert = ConvertRows(kind=Kind.TEXT, seed=0, system_prompt=None, prompt_template=None, detected=detected)
    rejects = [reject for chunk in chunks for reject in convert(chunk).rejects]

    assert len(rejects) == 3001
    assert (rejects[-1].where, rejects[-1].reason) == (f"{path}:3001", "format not known")
    assert rejects[-1].problem == (
        "its format is not known, since no row before it can be read; accepted: rows of one format; "
        "correct the first rows"
    )

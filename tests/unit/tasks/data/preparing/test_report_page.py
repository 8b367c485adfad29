"""The report: what is written is what is read, and nothing that rows bring does anything on its page."""

import re
from html.parser import HTMLParser
from pathlib import Path

from tasks.data.preparing.report import (
    DataReport,
    Labels,
    Lengths,
    Likeness,
    Overlap,
    Remark,
    SourceReport,
    render,
    sections,
    write_reports,
)

HOSTILE = "<script>alert('x')</script>\"&amp;$policy ${style} \udc80 é"


def report(text="word"):
    """A report in which everything that rows can bring is a text."""
    return DataReport(
        counts={"rows": 1234, "train_rows": 5, "leaked_rows": 1},
        sources={
            f"rows {text}": SourceReport(
                path=f"path {text}", format="text", evidence=f"evidence {text}",
                mapping={f"column {text}": f"to {text}"}, rows_read=9, rows_used=5, dropped={f"reason {text}": 4},
                remarks={f"remark {text}": Remark(count=2, places=[f"place {text}"])},
                ignored_columns={f"ignored {text}": 3},
            )
        },
        lengths=Lengths(
            unit="tokens", tokenizer=f"tokenizer {text}", rows=6, p50=1, p95=2, p99=3, max=9, edges=[0, 5, 10],
            counts=[4, 2], suggested_max_length=64, suggests_packing=True,
        ),
        near_duplicates=[Likeness(row_id=f"near {text}", other_row_id=f"other {text}", similarity=0.87)],
        leakage=[
            Overlap(
                kind="n-gram", train_row_id=f"train {text}", held_out_row_id=f"held {text}", shared=0.61,
                train_set=f"train set {text}", held_out_set=f"held set {text}",
            )
        ],
        rejects=f"rejects {text}",
        labels=Labels(
            max_length=64, trained_tokens_percent=12.3, rows_cut=7, rows_dropped=8, samples=[f"sample {text}"]
        ),
    )  # fmt: skip


def page_of(report):
    return render(report, sections(report, Path()))


class Page(HTMLParser):
    """What a browser makes of the page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.names = set(), "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.names += [name for name, _ in attributes]

    def handle_data(self, data):
        self.text += data


def test_a_report_that_was_written_is_read_as_it_was(tmp_path):
    for each in (report(), DataReport(counts={"rows": 0}, sources={})):
        write_reports(each, tmp_path)

        assert DataReport.read(tmp_path) == each
        assert (tmp_path / "report.html").read_text() == page_of(each)


def test_the_page_says_all_that_the_report_holds():
    shown = Page(page_of(report())).text

    for reported in (
        "1234", "leaked rows", "path word", "evidence word", "column word", "to word", "9 read, 5 used", "reason word",
        "remark word", "place word", "ignored word", "tokenizer word", "max_length=64 holds 95 %", "packing",
        "near word", "other word", "0.87", "n-gram", "train word", "held word", "0.61", "train set word",
        "held set word", "rejects word", "12.3 %", "sample word", "0 to 4: 4 rows", "5 to 9: 2 rows",
    ):  # fmt: skip
        assert reported in shown, reported


def test_what_is_not_listed_is_in_a_file_that_the_page_names():
    several = report()
    several.counts |= {"near_duplicate_rows": 31, "leaked_rows": 32}

    shown = Page(page_of(several)).text

    assert "and 30 more; near_duplicates.parquet has all of them" in shown
    assert "and 31 more; leakage.parquet has all of them" in shown
    assert " more; " not in Page(page_of(report())).text


def test_what_rows_bring_is_text_on_the_page():
    plain, hostile = Page(page_of(report())), page_of(report(HOSTILE))

    assert hostile.isascii()
    shown = Page(hostile)
    assert shown.tags == plain.tags and sorted(shown.names) == sorted(plain.names)
    assert "script" not in shown.tags
    assert shown.text.count("<script>alert('x')</script>\"&amp;$policy ${style}") == plain.text.count("word")


def test_the_page_loads_nothing():
    page = page_of(report())

    assert "default-src 'none'" in page
    assert not re.findall(r"(?:src|href|url)\s*[=(]", page.replace("default-src", "").replace("style-src", ""))


def test_half_a_surrogate_pair_of_a_file_name_is_written_and_read(tmp_path):
    write_reports(report(HOSTILE), tmp_path)

    assert DataReport.read(tmp_path) == report(HOSTILE)

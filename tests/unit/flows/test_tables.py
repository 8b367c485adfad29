"""Tables as plain text."""

from flows.reports.wording import empty_table, plain_text


def test_columns_are_as_wide_as_their_cells_and_text_stays_as_it_is():
    table = empty_table("name", "count", "why", numbers=("count",))
    table.add_row("a", "7", "restart=[cpt]")
    table.add_row("long name", "12", "one\ntwo")
    table.add_row("", "", "")
    assert plain_text(table).split("\n") == [
        "name       count  why",
        "a              7  restart=[cpt]",
        "long name     12  one",
        "                  two",
        "",
    ]

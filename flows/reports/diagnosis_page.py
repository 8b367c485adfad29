"""Renders the rules of the loss-curve doctor in ``docs/diagnose.md``: ``python -m flows.reports.diagnosis_page``."""

import sys
from pathlib import Path

from flows.reports.settings_page import rendered, write_page
from lineage.diagnosis.rules import RULES
from lineage.markup import markdown_table

FILE = Path(__file__).parents[2] / "docs" / "diagnose.md"


def render() -> str:
    """The text of the page."""
    rows = [(f"`{rule.name}`", rule.group, rule.sign, rule.remedy) for rule in RULES]
    return rendered(FILE, {"rules": markdown_table(("rule", "group", "sign", "what to change"), rows)})


def main() -> int:
    """Writes the page."""
    return write_page(FILE, render())


if __name__ == "__main__":
    sys.exit(main())

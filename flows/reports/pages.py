"""Renders the tables of pages in ``docs/`` from the code: ``python -m flows.reports.pages`` writes them."""

import re
import sys
from dataclasses import fields
from pathlib import Path

from flows.reports.docs import advice_page, methods_page, settings_page
from flows.steps.calls import CALLS
from lineage.diagnosis.rules import RULES
from lineage.markup import markdown_table
from tasks.train.steps.losses import LOSSES
from tasks.train.steps.renderers import RENDERERS

DOCS = Path(__file__).parents[2] / "docs"

_PART = re.compile(r"(<!-- (\w+) -->\n?).*?(\n?<!-- end -->)", re.DOTALL)


def _rules() -> dict[str, str]:
    rows = [(f"`{rule.name}`", rule.group, rule.needs, rule.sign, rule.remedy) for rule in RULES]
    return {"rules": markdown_table(("rule", "group", "needs", "sign", "what to change"), rows)}


def _steps() -> dict[str, str]:
    rows = [
        (f"`{name}`", f"`{each.about}`", ", ".join(f"`{column}`" for column in each.reads),
         ", ".join(f"`{option}`" if of is None else f"`{option}={of:g}`" for option, of in each.options.items()),
         each.paper)
        for name, each in LOSSES.items()
    ]  # fmt: skip
    calls = [
        (f"`{name}`", ", ".join(f"`{each.name}`" for each in fields(call)), "yes" if call.changes else "no",
         call.__doc__ or "")
        for name, call in CALLS.items()
    ]  # fmt: skip
    families = [
        (f"`{name}`", each.about, f"`{each.turn}...{each.end}`".replace("\n", "\\n"))
        for name, each in RENDERERS.items()
    ]
    return {
        "renderers": markdown_table(("renderer", "models", "a turn"), families),
        "losses": markdown_table(("loss", "of each token", "columns", "options", "source"), rows),
        "primitives": markdown_table(("primitive", "arguments", "in the command log", "does"), calls),
    }


PAGES = {
    "settings.md": settings_page.render, "methods.md": methods_page.render, "advice.md": advice_page.render,
    "diagnose.md": _rules, "steps.md": _steps,
}  # fmt: skip


def rendered(page: str) -> str:
    """A page with its parts between ``<!-- NAME -->`` and ``<!-- end -->``; the rest is written by hand."""
    parts, text = PAGES[page](), (DOCS / page).read_text(encoding="utf-8")
    return _PART.sub(lambda found: found[1] + parts[found[2]].strip("\n") + found[3], text)


def main() -> int:
    """Writes the pages."""
    for page in PAGES:
        (DOCS / page).write_text(rendered(page), encoding="utf-8")
        print(f"{DOCS / page} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())

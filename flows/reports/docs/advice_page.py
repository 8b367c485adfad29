"""The tables of ``docs/advice.md``, from the table of ``tasks.judgement.advice``, the presets and the sweeps."""

from collections.abc import Sequence

import yaml

from flows.declare.config import CONF
from lineage.markup import markdown_table
from tasks.judgement.advice import ADAMW, BATCH_FACTOR, SIZES, TABLE, Row, Value
from tasks.recipe import ADAPTER_FACTOR


def render() -> dict[str, str]:
    """The rendered parts of the page."""
    head = ("field", "of", "size", "default", "recommended", "permissible", "advised", "source", "no warning")
    return {
        "adamw": ", ".join(f"`{name}`" for name in sorted(ADAMW)), "factor": str(ADAPTER_FACTOR),
        "batch": str(BATCH_FACTOR), "table": markdown_table(head, [_cells(row) for row in TABLE]),
        "presets": _files("preset", ("conservative", "tiny-data", "medium", "large", "one-gpu-qlora")),
        "sweeps": _files("sweep", ("lr-sft", "lr-peft", "guide")),
    }  # fmt: skip


def _cells(row: Row) -> list[str]:
    of = [*(row.methods or ("every training",)), *row.tuned]
    default = _text(row.default)
    ranges = [each.text if each else "-" for each in (row.recommended, row.permissible)]
    if row.share:
        ranges[0] += f", or {row.share.text} of all steps"
    return [
        f"`{row.field}`" if "." in row.field else row.field, ", ".join(of), SIZES[row.size] if row.size else "any",
        f"**{default}**" if row.breaks_itself else default, *ranges, _text(row.advised), row.source, row.silent,
    ]  # fmt: skip


def _text(value: Value | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _files(group: str, names: Sequence[str]) -> str:
    """Table of the values that the files of a group set."""
    rows = []
    for name in names:
        tree = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
        tree.pop("defaults")
        rows.append([f"`{group}={name}`", ", ".join(_leaves(tree, ""))])
    return markdown_table([group, "sets"], rows)


def _leaves(tree: object, path: str) -> list[str]:
    if not isinstance(tree, dict):
        return [f"`{path}={'null' if tree is None else tree}`"]
    nested = (path == "params" or path == "fixed") and all(not isinstance(value, dict) for value in tree.values())
    dot = " " if nested else "."
    return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{path}{dot}{key}" if path else str(key))]

"""Renders ``docs/advice.md`` from the table of ``tasks.advice``, the presets and the sweeps.

``python -m flows.reports.advice_page`` writes it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from flows.declare.compose import CONF
from flows.reports.settings_page import write_page
from lineage.markup import markdown_table
from tasks.advice import ADAMW, BATCH_FACTOR, SIZES, TABLE, Row, Value
from tasks.recipe import ADAPTER_FACTOR

FILE = Path(__file__).parents[2] / "docs" / "advice.md"

_HEAD = """\
<!-- Rendered by `make settings-page` from tasks/advice.py, conf/preset and conf/sweep. -->
# Which settings are sane

Two reference documents, a job form and a guide by data size, name defaults, recommended ranges and permissible ranges.
`tasks/advice.py` holds them in [one table](#the-table). Nothing is changed by itself: advice is text and overrides.

```sh
posttrain plan                          # warns of values outside their ranges, a line for each stage and field
posttrain plan advice=strict            # refuses them; advice=off says nothing
posttrain advise sft                    # a recipe for this data, model and machine, as overrides to paste
posttrain advise sft --out advice.yaml  # writes it with the reasons, for posttrain plan --overrides-from advice.yaml
posttrain plan preset=medium            # presets, below
```

- `advice: warn | strict | off` changes no model: it is in no fingerprint. What is finished gets no warning.
- A warning is of a value outside the recommended range, or outside the permissible one. Whatever `advice` is, the plan
  refuses what cannot work: of these fields, a dropout of 1 and a `held_out` of 1.0.
- The size of the data is the number of rows that were prepared for the stage. Before that, a value that some size
  recommends gives no warning; `posttrain advise` counts the rows of the sources.
- The ranges are for pretrained models. Stages of a model made from scratch, such as the demo's, are not compared, and
  the plan says so in one line. `posttrain advise` keeps their values.
- The learning rates are AdamW's ({adamw}); those of other optimizers are not compared.
- A field that is `null` is not compared.
"""
_TABLE = """\
## The table

`-`: the document has none. A default in bold is outside its own range: the form's learning rate of 1e-4 is not below
the 5e-5 that the form permits. "No warning" says why values outside the recommended range give none. A LoRA's rate is
about {factor} times that of a full training; a batch twice as large wants {batch} times the learning rate.
"""
_CHOICES = """\
## Where the documents contradict each other
"""
# What the documents say; what was chosen; why.
CONTRADICTIONS: Sequence[tuple[str, str, str]] = (
    (
        "Defaults outside their own ranges: learning rate 1e-4, epochs 1, evaluation batch 1, workers 1, alpha 16",
        "the ranges", "a form that forbids its own default means the range; the table keeps both and marks the default",
    ),
    (
        "One range for all data (learning rate 1e-5..2e-5, epochs 2-5, batch 8), and ranges by data size",
        "by data size", "they are finer; the form's permissible range still holds",
    ),
    (
        "The form's learning rate and epochs are of no named method",
        "of SFT, by data size; for other methods the permissible range alone",
        "the defaults of DPO and reward models are their papers', below the form's range",
    ),
    ("Learning rate < 5e-5, and LoRA's 5e-5..2e-4", "< 5e-5 for full trainings", "a LoRA takes ten times the rate"),
    ("Local batch < 16, and 8-16 for large data", "8-16", "a value that one row recommends gives no warning"),
    ("Sizes of data with other bounds", "< 5K, 5-50K, > 50K rows", "the figures by data size are for these"),
    ("Small data with a LoRA: 3-5 and 1-3 epochs", "3-5", "it is in the row of LoRA; 1-3 is in that of SFT"),
    (
        "alpha = rank (safe), and 2-4 x rank", "1 to 4 gives no warning, and 2 is advised",
        "a warning is due above 4 alone; 2 is in every range by data size",
    ),
    ("Rank up to 64, and up to 256", "64", "it is the bound of the form and of large data; more costs memory"),
    ("QLoRA: alpha 32 for rank 16-64, and 2-4 x rank", "32 under QLoRA", "the row that names the adapter decides"),
    (
        "A LoRA at ten times SFT's rate, and 1e-5..1e-4 for medium data", "the ranges by data size",
        "the advised rates are ten times SFT's and inside the ranges",
    ),
    (
        "Validation every 100-200 steps, and every 10 in the conservative preset", "100-200",
        "10 is caution that costs time; the plan says so of the preset",
    ),
    ("Workers 4, on any machine", "no warning below 10; as many as GPUs are advised", "their number changes no model"),
    ("A report every 5 steps, at most 20", "every step", "`metrics.jsonl` holds every step"),
)  # fmt: skip
_BANDS = """\
## Sizes of data

| size | example of the documents | preset |
| --- | --- | --- |
| small, < 5K rows | | `tiny-data` |
| medium, 5-50K rows | MedQA, 10K | `medium` |
| large, > 50K rows | Natural Instructions, 800K and more | `large` |
"""
_PRESETS = """\
## Presets and sweeps

`preset=NAME` sets `training.every` (all trainings), `training.sft`, and `training.sft_adapter` (SFT of an adapter),
each only where the stage sets nothing itself: the recipes of `model=tiny` win, as do overrides, and the plan names
those fields. `training.sft.learning_rate=5e-6` changes one. The rank of an adapter is that of `adapter=lora`.
"""
_SWEEPS = """\
`posttrain run --multirun sweep=NAME` tries values ([sweeps.md](sweeps.md)); `sweep.until=STAGE` does it for another
stage (of `guide` with `sweep.objectives.best.metric=STAGE/held_out_loss`). The guide's batches of 2, 4 and 8 and its
1 to 8 accumulation steps are one field here, their product; its three optimizers are of torch.
"""


def render() -> str:
    """The text of the page."""
    names = ", ".join(f"`{name}`" for name in sorted(ADAMW))
    head = ["field", "of", "size", "default", "recommended", "permissible", "advised", "source", "no warning"]
    parts = [
        _HEAD.format(adamw=names), _TABLE.format(factor=ADAPTER_FACTOR, batch=BATCH_FACTOR),
        _lines(head, [_cells(row) for row in TABLE]), _CHOICES,
        _lines(["the documents say", "choice", "why"], CONTRADICTIONS), _BANDS, _PRESETS,
        _files("preset", ("conservative", "tiny-data", "medium", "large", "one-gpu-qlora")), _SWEEPS,
        _files("sweep", ("lr-sft", "lr-peft", "guide")),
    ]  # fmt: skip
    return "\n".join(parts)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(columns, rows) + "\n"


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
    """What the files of a group set."""
    rows = []
    for name in names:
        tree = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
        tree.pop("defaults")
        rows.append([f"`{group}={name}`", ", ".join(_leaves(tree, ""))])
    return _lines([group, "sets"], rows)


def _leaves(tree: object, path: str) -> list[str]:
    if not isinstance(tree, dict):
        return [f"`{path}={'null' if tree is None else tree}`"]
    nested = (path == "params" or path == "fixed") and all(not isinstance(value, dict) for value in tree.values())
    dot = " " if nested else "."
    return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{path}{dot}{key}" if path else str(key))]


def main() -> int:
    """Writes the page."""
    return write_page(FILE, render())


if __name__ == "__main__":
    sys.exit(main())

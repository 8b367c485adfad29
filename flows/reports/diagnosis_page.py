"""Renders ``docs/diagnose.md`` from the rules of the loss-curve doctor; ``python -m flows.reports.diagnosis_page``."""

import sys
from pathlib import Path

from flows.reports.settings_page import write_page
from lineage.diagnosis.rules import RULES
from lineage.markup import markdown_table

FILE = Path(__file__).parents[2] / "docs" / "diagnose.md"

_HEAD = """\
<!-- Rendered by `make settings-page` from the rules of lineage/diagnosis. -->
# What a loss curve means, and what to change

```sh
posttrain diagnose dpo                         # a stage that runs, failed or is finished; any REF
posttrain diagnose dpo --out patch.yaml        # the overrides of its run, with the change of the first finding
posttrain plan --overrides-from patch.yaml     # what that would run: the stage, and what follows it
posttrain run --overrides-from patch.yaml
posttrain diff OLD NEW                         # names the rule before the fields that it changed
```

It reads `metrics.jsonl`, the losses on held-out rows, the report on the rows, the recipe and the cause of a failure. A
finding has a rule, its evidence (steps and values, with a plot), a confidence, and overrides where a setting mends it.
`--json` prints the same as one object, `--html FILE` draws the curves, `--rule RULE` writes the change of another
finding. Nothing is trained or changed by it: a patch is applied by your command alone.

A patch holds the overrides of the run that made the stage, those of the finding, and
`because.STAGE=RULE:STAGE@FINGERPRINT`. That note is in the run record and the manifest, and is no part of a
fingerprint. A patch of a sweep's trial holds the finding's overrides alone: add those of the trial.

`posttrain status` shows the findings on stages that run, below each; MLflow has them as the tag `posttrain.diagnosis`
of the stage's run, while it runs and after. They are made anew when the reports have grown by a tenth.

Rules of one group explain the same curve: of a group the first that fires counts, and of a failure it alone. A curve of
fewer than 50 steps (20 for preferences and reinforcement, 30 for jumps) is not judged. Noise is measured on the curve:
a fall or a rise counts from several standard errors on. Changes are the usual first step, not the last: diagnose again
after it, and change one thing at a time (learning rate, batch, epochs, regularization).

"""
_TAIL = """
## The quickstart's DPO without what keeps it

```sh
posttrain run stages.dpo.method.beta=0.1 stages.dpo.method.sft_weight=null
posttrain diagnose dpo --out patch.yaml
posttrain run --overrides-from patch.yaml
```

The second command prints that at step 250 the margin is 23.3 nats and chosen answers are less likely by 23.6 nats, and
writes `beta=0.3` and `sft_weight=1`, the recipe that the quickstart ships. The tables of the two runs say what that is
worth: right answers 0 % and 76 %, answers without an end 80 % and 0 %, preference accuracy 0.90 and 0.905.

## What it does not see

Which rows are broken (it names the steps), whether the labels are right where they can be learned
by heart, and a rate that is only somewhat too high. `low-device-use` needs `mfu` among a stage's metrics.
"""


def render() -> str:
    """The text of the page."""
    rows = [(f"`{rule.name}`", rule.group, rule.sign, rule.remedy) for rule in RULES]
    return "\n".join([_HEAD + "## Rules\n", markdown_table(("rule", "group", "sign", "what to change"), rows), _TAIL])


def main() -> int:
    """Writes the page."""
    return write_page(FILE, render())


if __name__ == "__main__":
    sys.exit(main())

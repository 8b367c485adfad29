"""Output of ``posttrain diagnose``: findings with small plots, a patch, an HTML page."""

import html
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from flows.progress.run_record import RunRecord, runs_of
from flows.progress.stage_log import stage_entry
from flows.reports.wording import counted, on_screen, spelled
from lineage.diagnosis.curves import Curve, Curves, read_curves
from lineage.diagnosis.finding import Finding
from lineage.diagnosis.rules import MIN_STEPS, RULES, diagnose
from lineage.errors import ConfigError, PipelineError
from lineage.markup import html_page
from lineage.record.run_file import RunFile
from lineage.store import Entry

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60  # characters of a plot
# Nested field -> its short form, which the pipeline's YAML may set and which would contradict a change.
_SHORT_FORMS = {
    "method.schedule.warmup": "method.warmup_ratio", "method.schedule.name": "method.lr_schedule",
    "method.optimizer.weight_decay": "method.weight_decay",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings on one stage.

    Args:
        name: name of the stage in its pipeline, without the number of a trial.
        run: the last run that includes the stage; None: not recorded.
    """

    name: str
    entry: Entry
    curves: Curves
    findings: list[Finding]
    run: RunRecord | None

    @property
    def node(self) -> str:
        return f"{self.name}@{self.entry.path.name}"

    def cli_args(self) -> tuple[list[str], str | None]:
        """The overrides and ``--config-dir`` of the run that includes the stage; empty for a sweep."""
        noted = RunFile.read(self.entry.path)
        cli_args = list(self.run.cli_args if self.run else noted.cli_args if noted else ())
        if "--multirun" in cli_args or (self.run and self.run.sweep):
            return [], None
        config_dir = cli_args[cli_args.index("--config-dir") + 1] if "--config-dir" in cli_args else None
        return [word for word in cli_args if "=" in word and not word.startswith("-")], config_dir


def read_diagnosis(ref: str, store: Path) -> Diagnosis:
    """Reads and diagnoses the curves of a finished, running or failed stage.

    Raises:
        ConfigError, ArtifactError: the REF names no stage that has started.
    """
    entry = stage_entry(ref, store)
    run, stage = next(runs_of(store, entry.path), (None, None))
    failure = stage.reason if stage and stage.state == "failed" else ""
    name, curves = entry.path.parent.name, read_curves(entry.path, failure=failure)
    found = Diagnosis(name=name, entry=entry, curves=curves, findings=[], run=run)
    if curves.micro_batch_size is None:
        curves = _as_declared(found)
    return replace(found, curves=curves, findings=diagnose(curves))


def _as_declared(found: Diagnosis) -> Curves:
    """The curves of an unfinished stage with the recipe and resources that its run declares, if they can be loaded."""
    from flows.declare.config import load_pipeline  # hydra, which the pages and `diff` do without

    cli_args, config_dir = found.cli_args()
    if not found.run or found.run.sweep:
        return found.curves
    try:
        stage = load_pipeline(cli_args, Path(config_dir) if config_dir else None).stages[found.name]
    except (PipelineError, KeyError):  # the run was started elsewhere, or its files have changed since
        return found.curves
    resources = stage.resources
    return replace(
        found.curves, recipe=stage.method.recipe(), gpus=resources.gpus_per_worker,
        micro_batch_size=resources.rows_at_once, is_checkpointed=resources.checkpointed_layers is not None,
    )  # fmt: skip


def overrides_of(name: str, finding: Finding) -> list[str]:
    """The change of a finding as overrides."""
    nulled = {short: None for long, short in _SHORT_FORMS.items() if long in finding.change}
    return [f"stages.{name}.{field}={spelled(value)}" for field, value in {**nulled, **finding.change}.items()]


def finding_dict(name: str, finding: Finding) -> dict[str, object]:
    """A finding as in the JSON output."""
    return {
        "rule": finding.rule, "confidence": finding.confidence, "evidence": finding.evidence,
        "remedy": finding.remedy, "overrides": overrides_of(name, finding), "metric": finding.metric,
        "step": finding.at,
    }  # fmt: skip


def diagnosis_dict(found: Diagnosis) -> dict[str, object]:
    """The object that ``diagnose --json`` prints."""
    findings = [finding_dict(found.name, each) for each in found.findings]
    state = "finished" if found.entry.manifest() else "failed" if found.curves.failure else "unfinished"
    return {"stage": found.node, "state": state, "steps": found.curves.num_steps, "findings": findings}


def diagnosis_text(found: Diagnosis) -> str:
    """The diagnosis as text, with a plot of the curve of each finding."""
    head = f"{found.node}: {counted(found.curves.num_steps, 'step')}"
    if not found.findings:
        checked = [name for name in ("loss", found.curves.validation_name) if name in found.curves.series]
        few = f"; most judge {MIN_STEPS} steps or more" if 0 < len(found.curves.loss) < MIN_STEPS else ""
        lines = [f"{head}, and none of the {len(RULES)} rules fires{few}", *_plots(found.curves, checked)]
        if "loss" in found.curves.series and found.curves.validation_name not in found.curves.series:
            lines.append(
                "  no held-out loss was measured, so learning by heart cannot be seen; "
                f"stages.{found.name}.method.validation.every_steps=N measures it"
            )
        return on_screen("\n".join(lines))
    lines = [f"{head}, {counted(len(found.findings), 'finding')}"]
    for each in found.findings:
        lines += ["", f"{each.rule} ({each.confidence} confidence): {each.evidence}"]
        lines += _plots(found.curves, [each.metric] if each.metric else [])
        lines += [f"  {each.remedy}", *(f"    {word}" for word in overrides_of(found.name, each))]
    if any(each.change for each in found.findings):
        patch = f"posttrain diagnose {found.node} --out patch.yaml"
        lines += ["", f"to apply: {patch}, then posttrain run --overrides-from patch.yaml"]
    return on_screen("\n".join(lines))


def _plots(curves: Curves, names: list[str]) -> Iterator[str]:
    for name in names:
        if len(curves[name]) > 1:
            curve = curves[name]
            low, high = min(curve.values), max(curve.values)
            yield f"  {name} {low:.4g}..{high:.4g}, steps {curve.steps[0]}..{curve.steps[-1]}"
            yield f"  {sparkline(curve)}"


def sparkline(curve: Curve) -> str:
    """A curve as one line of bars, each the mean of a part."""
    means = curve.blocks(min(_WIDTH, len(curve)))
    low, high = min(means), max(means)
    return "".join(_BARS[int((value - low) / ((high - low) or 1.0) * (len(_BARS) - 1) + 0.5)] for value in means)


def patch_of(found: Diagnosis, rule: str | None) -> str:
    """The overrides of the run with the change of one finding, as YAML for ``--overrides-from``.

    Args:
        rule: the rule whose change is applied; None: the most certain finding with a change.

    Raises:
        ConfigError: no finding has a change.
    """
    able = {each.rule: each for each in found.findings if each.change}
    if not able or (rule and rule not in able):
        raise ConfigError(
            f"--out: {found.node}: {f'{rule} has no' if rule else 'no finding has a'} change that overrides can make; "
            f"rules that have one here: {', '.join(able) or 'none'}"
        )
    finding = able[rule] if rule else next(iter(able.values()))
    cli_args, config_dir = found.cli_args()
    change = [*overrides_of(found.name, finding), f"because.{found.name}={finding.rule}:{found.node}"]
    changed = {word.partition("=")[0] for word in change}
    kept = [word for word in cli_args if word.lstrip("+").partition("=")[0] not in changed]
    held: Mapping[str, object] = {
        "diagnosis": {
            "stage": found.node, "rule": finding.rule, "confidence": finding.confidence, "evidence": finding.evidence,
        },
        **({"config_dir": config_dir} if config_dir else {}), "overrides": [*kept, *change],
    }  # fmt: skip
    note = "# posttrain run --overrides-from THIS_FILE\n"
    if not cli_args and found.run is None:
        note += "# No record of the run that made the stage is here: add its overrides.\n"
    text: str = yaml.safe_dump(dict(held), sort_keys=False, width=10_000, allow_unicode=True)
    return note + text


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#1d2733}
h1{font-size:1.5rem;overflow-wrap:anywhere}
svg{width:100%;height:auto;background:#f6f8fa;border-radius:6px}
text{font-size:12px;fill:#57606a}
@media (max-width:600px){text{font-size:26px}}
polyline{fill:none;stroke:#2463a8;stroke-width:1.5}line{stroke:#c0392b;stroke-dasharray:4 3}
pre{background:#f6f8fa;padding:.6rem;border-radius:6px;overflow:auto}
"""
_BOX = (800, 220, 46)  # width, height and margin of a picture, pixels


def diagnosis_page(found: Diagnosis) -> str:
    """A page with each finding and its curve, then the other curves that say most."""
    body = [f"<h1>{html.escape(found.node)}</h1><p>{counted(found.curves.num_steps, 'step')}</p>"]
    for each in found.findings:
        body.append(f"<h2>{each.rule} ({each.confidence} confidence)</h2><p>{html.escape(each.evidence)}</p>")
        body.append(_picture(found.curves, each.metric, each.at))
        body.append(f"<p>{html.escape(each.remedy)}</p>")
        if each.change:
            body.append(f"<pre>{html.escape(chr(10).join(overrides_of(found.name, each)))}</pre>")
    if not found.findings:
        body.append(f"<p>None of the {len(RULES)} rules fires.</p>")
    others = dict.fromkeys(["loss", found.curves.validation_name, "reward", "learning_rate", "grad_norm"])
    shown = {each.metric for each in found.findings}
    body += [_picture(found.curves, name, None) for name in others if name and name not in shown]
    return html_page(
        title=f"diagnosis of {html.escape(found.node)}", style=_STYLE, body="\n".join(body),
        policy="default-src 'none'; style-src 'unsafe-inline'",
    )  # fmt: skip


def _picture(curves: Curves, name: str, at: int | None) -> str:
    curve, (width, height, margin) = curves[name], _BOX
    if len(curve) < 2:
        return ""
    low, high = min(curve.values), max(curve.values)
    first, last = curve.steps[0], curve.steps[-1]

    def across(step: float) -> float:
        return margin + (width - 2 * margin) * (step - first) / max(1, last - first)

    points = " ".join(
        f"{across(step):.1f},{margin + (height - 2 * margin) * (1 - (value - low) / ((high - low) or 1)):.1f}"
        for step, value in zip(curve.steps, curve.values, strict=True)
    )
    mark = ""
    if at is not None and first <= at <= last and math.isfinite(at):
        mark = f'<line x1="{across(at):.1f}" x2="{across(at):.1f}" y1="{margin}" y2="{height - margin}"/>'
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(name)}">'
        f'<text x="{margin}" y="18">{html.escape(name)}: {low:.4g} to {high:.4g}, steps {first} to {last}</text>'
        f'<polyline points="{points}"/>{mark}</svg>'
    )

"""The verdicts of a plan's gates: pending approvals, refusals, and the exit code of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.planning.plan import Plan, PlannedStage
from lineage.artifact import Kind
from lineage.errors import GateError
from lineage.fingerprint import short
from lineage.promotions import Event, append, decision, locked, read_events
from lineage.record.verdict import VERDICT_TABLE, Verdict, read_verdict
from lineage.store import Manifest
from tasks.recipe import VERDICT


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A finished verdict of this plan.

    Args:
        decided: the last approval or rejection by a person; None: there is none.
    """

    gate: str
    output: Path
    manifest: Manifest
    verdict: Verdict
    decided: Event | None

    @property
    def awaits_approval(self) -> bool:
        """Whether only the approval of a person is missing."""
        demanded = self.verdict.result == "pass" and self.verdict.approval == "required"
        return demanded and not (self.decided and self.decided.action == "approve")

    def table(self) -> str:
        """The evidence as a table."""
        return (self.output / VERDICT_TABLE).read_text(encoding="utf-8")

    def refusal(self) -> str | None:
        """Why the model must not be promoted; None: it may."""
        name = f"gate {self.gate}@{short(self.manifest.fingerprint)}"
        if self.verdict.result == "refuse":
            rules = "\n".join(f"  {line}" for line in self.verdict.complaints())
            return f"{name} refuses {self.verdict.candidate.name}:\n{rules}"
        if not self.awaits_approval:
            return None
        if self.decided is None:
            return f"{name}: {self.verdict.candidate.name} passes, and no person has approved it yet"
        decided = f"was rejected by {self.decided.who}"
        return f"{name}: {self.verdict.candidate.name} passes, and {decided}" + (
            f": {self.decided.why}" if self.decided.why else ""
        )


def judgements(plan: Plan) -> Iterator[Judgement]:
    """The verdicts of the finished gates (ArtifactError: one was modified)."""
    for planned in gates(plan):
        entry = plan.entry(planned)
        manifest = entry.manifest()
        if manifest is None:
            continue
        entry.require_intact()  # a modified verdict is invalid
        decided = decision(read_events(plan.pipeline.store), manifest.fingerprint, manifest.output_digest)
        verdict = read_verdict(entry.output)
        yield Judgement(gate=planned.name, output=entry.output, manifest=manifest, verdict=verdict, decided=decided)


def refusals(plan: Plan) -> list[str]:
    """Why models must not be promoted, by each gate that says so; raises as ``judgements``."""
    return [refusal for each in judgements(plan) if (refusal := each.refusal())]


def why_not_begun(plan: Plan, planned: PlannedStage) -> str | None:
    """Why the gate in a stage's slot ``verdict`` does not let it begin; None: it does, or there is none."""
    if (gate := planned.inputs.get(VERDICT)) is None:
        return None
    why = next((each.refusal() for each in judgements(plan) if each.gate == gate.name), None)
    if why is None:
        return None
    return f"inputs.{VERDICT}: {why}\nso {planned.name} does not begin; change the model, or remove inputs.{VERDICT}"


def began_before(plan: Plan, gate: str) -> str:
    """Which finished stages wait for a verdict that refuses now, as the end of a line; empty: none."""
    slots = {each.name: each.inputs.get(VERDICT) for each in plan.stages if each.state == "reuse"}
    found = [name for name, slot in slots.items() if slot and slot.name == gate]
    if not found:
        return ""
    return f"; {', '.join(found)} began after another verdict and would not begin now, but is finished and reused"


def gates(plan: Plan) -> list[PlannedStage]:
    """The stages that produce a verdict."""
    return [planned for planned in plan.stages if planned.stage.method.produces == Kind.VERDICT]


def may_ask(plan: Plan) -> bool:
    """Whether this run may have to ask a person for approval."""
    stale = {planned.name for planned in plan.stale}
    demanding = {each.name for each in gates(plan) if each.stage.method.recipe().get("approval") == "required"}
    return bool(demanding & stale) or any(each.awaits_approval for each in judgements(plan) if each.gate not in stale)


def blocking_gates(plan: Plan) -> list[str]:
    """A line for each finished gate that refuses or awaits approval, for runs with nothing else to do.

    Raises:
        ArtifactError: a verdict was modified.
    """
    stale = {planned.name for planned in plan.stale}
    lines = []
    for each in judgements(plan):
        candidate = each.verdict.candidate.name
        if each.gate not in stale and each.awaits_approval:
            lines.append(f"{each.gate} passes {candidate}, and awaits a person: a run asks in Prefect")
        elif each.gate not in stale and each.refusal():
            after = began_before(plan, each.gate)
            lines.append(f"{each.gate} refuses {candidate}: a run ends with exit code 3{after}")
    return lines


def record_decision(store: Path, judged: Judgement, *, approved: bool, who: str, why: str) -> None:
    """Records a person's approval or rejection of a verdict."""
    event = Event(
        action="approve" if approved else "reject", fingerprint=judged.manifest.fingerprint, stage=judged.gate,
        digest=judged.manifest.output_digest, who=who, why=why,
    )  # fmt: skip
    with locked(store):
        append(store, event)


def require_passed(plan: Plan) -> None:
    """Fails a command with exit code 3 if a gate or a person refused; every output is kept."""
    if refused := refusals(plan):
        refused += [text[2:] for each in judgements(plan) if each.refusal() and (text := began_before(plan, each.gate))]
        kept = "all outputs are kept; the evidence is in"
        tables = ", ".join(str(each.output / VERDICT_TABLE) for each in judgements(plan))
        raise GateError("\n".join([*refused, f"{kept} {tables}"]))

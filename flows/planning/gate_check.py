"""Checks of gates that need no report: made with the plan, not after hours of training."""

from flows.declare.pipeline import Pipeline, nearest
from lineage.errors import ConfigError
from lineage.verdict import CHAMPION
from tasks.evaluate import Evaluate
from tasks.gate import Gate
from tasks.gate.rule import CANDIDATE, PARENT, Rule

_NAMED_BY_SLOT = (CANDIDATE, PARENT, CHAMPION)


def check_gates(pipeline: Pipeline) -> None:
    """That every rule names a metric and policies which the gate's report will have.

    Raises:
        ConfigError: names the rule and what there is.
    """
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Gate):
            for rule_name, rule in stage.method.rules.items():
                _check_rule(pipeline, name, f"stages.{name}.method.rules.{rule_name}", rule)


def _check_rule(pipeline: Pipeline, gate: str, where: str, rule: Rule) -> None:
    inputs = pipeline.stages[gate].inputs
    if rule.against in (PARENT, CHAMPION) and rule.against not in inputs:
        slot = f"stages.{gate}.inputs.{rule.against}"
        raise ConfigError(f"{where}.against={rule.against}: nothing fills {slot}; state it, or compare with a policy")
    report = pipeline.stages.get(inputs["report"])
    if report is None or not isinstance(report.method, Evaluate):
        return  # what a method of the user's own measures shows when it has
    metrics = report.method.measured_metrics()
    if rule.metric not in metrics:
        raise ConfigError(
            f"{where}.metric={rule.metric}: the report does not measure it; it measures "
            f"{', '.join(metrics)}{nearest(rule.metric, list(metrics))}"
        )
    policies = [slot for slot in report.inputs if slot not in Evaluate.consumes]
    for field, policy in (("policy", rule.policy), ("against", rule.against)):
        if policy is not None and policy not in (*_NAMED_BY_SLOT, *policies, "reward_model"):
            raise ConfigError(
                f"{where}.{field}={policy}: the report measures no such policy; "
                f"there are: {', '.join(policies)}{nearest(policy, policies)}"
            )

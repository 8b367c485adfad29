"""``posttrain diagnose`` from a run to its patch, and from the patch to the next run, which says why it differs."""

import json
import re

import pytest
import yaml

from lineage.store import Entry
from tests.command import Command, call


def diagnose(toy: Command, *overrides: str) -> str:
    result = call(["diagnose", *overrides], toy.folder, toy.environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def slow(toy):
    """A finished run whose stage ``left`` reported a loss that does not fall."""
    made = toy.run("stages.left.method.learning_rate=1e-6")["left"]
    entry = Entry(toy.folder / "artifacts" / "left" / made["fingerprint"][:16])
    lines = [{"step": step, "time": 1.0, "metrics": {"loss": 3.0, "learning_rate": 1e-6}} for step in range(1, 101)]
    entry.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return entry


def test_a_patch_reruns_the_stage_and_diff_names_the_rule(toy, slow):
    node = f"left@{slow.path.name}"
    [found] = json.loads(diagnose(toy, "left", "--json", "--out", "patch.yaml"))["findings"]
    assert (found["rule"], found["overrides"]) == ("flat", ["stages.left.method.learning_rate=1e-05"])
    patch = yaml.safe_load((toy.folder / "patch.yaml").read_text())
    assert patch["overrides"][-2:] == ["stages.left.method.learning_rate=1e-05", f"because.left=flat:{node}"]
    assert patch["overrides"].count("stages.left.method.learning_rate=1e-6") == 0  # the run's own, which it replaces

    states = {"data": "reuse", "model": "reuse", "left": "run", "right": "reuse"}
    assert toy.states("--overrides-from", "patch.yaml") == states
    made = toy.run("--overrides-from", "patch.yaml")["left"]
    after = Entry(slow.path.parent / made["fingerprint"][:16])
    assert after.manifest().provenance.because == f"flat:{node}"
    assert "because" not in after.manifest().recipe
    compared = call(["diff", node, f"left@{after.path.name}"], toy.folder, toy.environment).stdout
    reported = compared.splitlines()
    assert reported[3] == "a diagnosis:"
    assert reported[4] == f"  left: B follows the rule flat, which posttrain diagnose found in {node}"
    record = max((toy.folder / "artifacts" / "runs").glob("*.json"))
    assert f"because.left=flat:{node}" in json.loads(record.read_text())["cli_args"]


def test_the_text_and_the_page_show_evidence_plot_and_overrides(toy, slow):
    text = diagnose(toy, "left", "--html", "page.html")
    assert "flat (high confidence): loss 3 at the start, 3 at step 100, noise 0" in text
    assert "  loss 3..3, steps 1..100\n  " + "▁" * 60 in text
    assert "    stages.left.method.learning_rate=1e-05" in text
    page = (toy.folder / "page.html").read_text()
    assert re.findall(r'aria-label="(\w+)"', page)[0] == "loss" and page.count("<polyline") == page.count("<svg")
    assert "stages.left.method.learning_rate=1e-05" in page

    # What cannot be patched is refused.
    refused = call(["diagnose", "left", "--out", "p.yaml", "--rule", "slow"], toy.folder, toy.environment)
    assert refused.returncode == 2
    assert "slow has no change that overrides can make; rules that have one here: flat" in refused.stderr
    refused = call(["diagnose", "left", "--rule", "flatt"], toy.folder, toy.environment)
    assert refused.returncode == 2
    assert "--rule flatt: no such rule; there are: exploding-margins, " in refused.stderr
    refused = call(["diagnose", "right", "--out", "p.yaml"], toy.folder, toy.environment)
    assert "no finding has a change that overrides can make" in refused.stderr
    assert not (toy.folder / "p.yaml").exists()
    refused = toy("plan", "because.lfet=flat:left@0")
    assert refused.returncode == 2
    assert "because: no stage that trains is named lfet" in refused.stderr


def test_a_failed_stage_without_a_record_in_mlflow_is_judged_by_its_declared_recipe(toy):
    toy("run", "stages.left.method.fail=true", "stages.left.method.learning_rate=1e-6")
    [folder] = (toy.folder / "artifacts" / "left").iterdir()
    lines = [{"step": step, "time": 1.0, "metrics": {"loss": 3.0}} for step in range(1, 101)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = json.loads(diagnose(toy, "left", "--json"))
    assert found["state"] == "failed"
    assert found["findings"][0]["overrides"] == ["stages.left.method.learning_rate=1e-05"]

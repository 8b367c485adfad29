"""Gates in a run, aliases that move behind them, and back: toy stages, real processes, a real Prefect server."""

import json
import shutil
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.promotion.promote import promote, roll_back
from lineage.errors import ArtifactError, ConfigError, GateError
from lineage.graph.index import Index
from lineage.promotions import Event, append, locked, read_events, stacks
from tests.command import CONF, Command, wait_until

BASE = ("pipeline=toy-gated", "model=none", "sources.rows.path=rows.txt")
BETTER = ("stages.left.method.learning_rate=0.2", "stages.evaluate.method.wins.left=36")
WORSE = ("stages.left.method.learning_rate=0.3", "stages.evaluate.method.wins.left=10")


def command(folder: Path, url: str) -> Command:
    return Command(folder, *BASE, environment={"PREFECT_API_URL": url})


@pytest.fixture(scope="module")
def judged(tmp_path_factory, prefect_url) -> Path:
    """A folder in which a model has passed its gate, a better one has, and one was refused."""
    folder = tmp_path_factory.mktemp("judged")
    (folder / "rows.txt").write_text("rows")
    toy = command(folder, prefect_url)
    for overrides, code in (((), 0), (BETTER, 0), (WORSE, 3)):
        result = toy("run", *overrides)
        assert result.returncode == code, result.stderr
    return folder


@pytest.fixture
def toy(judged, tmp_path, prefect_url) -> Command:
    shutil.copytree(judged, tmp_path, dirs_exist_ok=True)
    return command(tmp_path, prefect_url)


@pytest.fixture
def move(toy, monkeypatch):
    """``promote`` and ``rollback`` without the half second of a process."""
    monkeypatch.chdir(toy.folder)

    def call(model: str | None, alias: str = "champion", *overrides: str, force: bool = False):
        pipeline = load_pipeline([*BASE, "tracking=none", *overrides], CONF)
        if model is None:
            return roll_back(pipeline, alias, why="")
        return promote(pipeline, model, alias, why="because", force=force)

    return call


def node(toy: Command, stage: str, *overrides: str) -> str:
    """The name of a stage's output, as ``plan`` has it."""
    rows = json.loads(toy("plan", "--json", *overrides).stdout)["stages"]
    return next(f"{stage}@{row['fingerprint'][:16]}" for row in rows if row["stage"] == stage)


def entry(toy: Command, name: str) -> Path:
    stage, _, digits = name.partition("@")
    return toy.folder / "artifacts" / stage / digits


def test_a_refused_gate_ends_the_run_with_3_fresh_or_reused(toy):
    fresh = toy("run", *WORSE, "stages.gate.method.seed=7")
    reused = toy("run", "--json", *WORSE, "stages.gate.method.seed=7")
    for result in (fresh, reused):
        assert result.returncode == 3
        assert "refuses left:\n  beats_parent: worse: candidate's accuracy gains more than 0" in result.stderr
        assert "Traceback" not in result.stderr
    assert "**refuse**" in fresh.stdout
    rows = {row["stage"]: row for row in json.loads(reused.stdout)["stages"]}
    assert {row["state"] for row in rows.values()} == {"reuse"}
    assert rows["gate"]["metrics"]["passed"] == 0
    assert (Path(rows["left"]["output"]) / "model.txt").exists()


def test_promote_and_rollback_from_the_command_line(toy):
    arguments = ("--config-dir", str(CONF), *BASE, "tracking=none")
    first, second = node(toy, "left"), node(toy, "left", *BETTER)
    done = toy("promote", first, "--alias", "champion", "--why", "the first", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["action"], said["model"], said["before"], said["forced"]) == ("promote", first, None, False)
    assert said["why"] == "the first" and "@" in said["who"] and said["verdict"]
    assert "nothing to do" in toy("run").stdout

    plan = toy("plan", *BETTER)
    assert "input champion: (none) -> source:champion@" in plan.stdout
    assert "source:champion is " in plan.stdout
    assert toy("run", *BETTER).returncode == 0
    moved = toy("promote", second, "--alias", "champion", *arguments)
    assert f"alias champion: {first} -> {second}: " in moved.stdout
    assert "nothing to do" in toy("run", *BETTER).stdout

    back = json.loads(toy("rollback", "--alias", "champion", "--json", *arguments).stdout)
    assert (back["action"], back["model"], back["before"]) == ("rollback", first, second)
    again = toy("rollback", "--alias", "champion", *arguments)
    assert again.returncode == 2 and "there is no holder to go back to" in again.stderr
    assert [event.action for event in read_events(toy.folder / "artifacts")] == ["promote", "promote", "rollback"]


def test_what_the_alias_names_already_is_no_event(move, toy):
    name = node(toy, "left")
    assert move(name).event is not None
    assert move(name).event is None
    assert len(read_events(toy.folder / "artifacts")) == 1


def test_a_model_needs_a_passing_verdict_or_force(move, toy):
    with pytest.raises(GateError, match=r"no gate has judged it.*--force"):
        move("toy-gated/model")
    with pytest.raises(GateError, match=r"refuses left:\n  beats_parent: worse.*\nthe evidence is in "):
        move(node(toy, "left", *WORSE))
    assert read_events(toy.folder / "artifacts") == []
    passing = move(node(toy, "left"), "other", force=True).event
    assert passing is not None and not passing.forced and passing.verdict
    forced = move(node(toy, "left", *WORSE), force=True).event
    assert forced is not None and forced.forced and forced.verdict is None and forced.why == "because"


@pytest.mark.parametrize("force", [False, True])
def test_one_changed_byte_of_the_model_is_refused(move, toy, force):
    name = node(toy, "left")
    (entry(toy, name) / "output" / "model.txt").write_text("0 -> 9.9")
    with pytest.raises(ArtifactError, match=r"model\.txt has SHA-256"):
        move(name, force=force)


def test_one_changed_byte_of_the_verdict_is_refused(move, toy):
    name = node(toy, "gate", *WORSE)
    verdict = entry(toy, name) / "output" / "verdict.json"
    verdict.write_text(verdict.read_text().replace('"refuse"', '"pass"').replace('"worse"', '"better"'))
    with pytest.raises(ArtifactError, match=r"verdict\.json has SHA-256"):
        move(node(toy, "left", *WORSE))


def test_a_damaged_holder_is_not_rolled_back_to(move, toy):
    first = node(toy, "left")
    move(first)
    move(node(toy, "left", *BETTER), force=True)
    (entry(toy, first) / "output" / "model.txt").write_text("0 -> 9.9")
    with pytest.raises(ArtifactError, match=r"model\.txt has SHA-256"):
        move(None)
    assert len(read_events(toy.folder / "artifacts")) == 2


def test_a_verdict_against_another_champion_is_refused(move, toy):
    first, second = node(toy, "left"), node(toy, "left", *BETTER)
    move(first)
    with pytest.raises(GateError, match=rf"compared left with no champion, and alias champion names {first} now"):
        move(second)
    assert toy("run", *BETTER).returncode == 0
    move(second)
    move(None)
    assert move(second).event is not None  # compared with the model that it replaces


@pytest.mark.parametrize("name", ["latest", "v3", "a b", "", "a/b"])
def test_an_alias_has_a_name_that_mlflow_takes_too(move, name):
    with pytest.raises(ConfigError, match="is no name for an alias"):
        move("toy-gated/left", name)


def test_only_models_have_aliases(move):
    with pytest.raises(ConfigError, match="is text; an alias names a model"):
        move("toy-gated/data")
    with pytest.raises(ConfigError, match="is the source"):
        move("source:rows")


def test_every_gate_has_a_say_whichever_ended_last(move, toy):
    second = (
        "stages.gate2.method._target_=tasks.gate.Gate",
        "stages.gate2.method.rules.absolute={metric: accuracy, at_least: 0.95}",
        "stages.gate2.inputs={report: evaluate, candidate: left}",
    )
    assert toy("run", *second).returncode == 3
    gate = entry(toy, node(toy, "gate"))
    shutil.rmtree(gate)
    assert toy("run", *second).returncode == 3  # the passing gate is the newest now
    with pytest.raises(GateError, match=r"gate2@.* refuses left"):
        move(node(toy, "left"))


def test_a_verdict_from_before_there_was_a_champion_serves_no_other_alias_either(move, toy):
    move(node(toy, "left"))
    with pytest.raises(GateError, match="compared left with no champion"):
        move(node(toy, "left", *BETTER), "production")


def test_a_rejection_is_not_passed_over_by_asking_nobody(move, toy):
    name, gate = node(toy, "left"), entry(toy, node(toy, "gate"))
    manifest = json.loads((gate / "manifest.json").read_text())
    store = toy.folder / "artifacts"
    append(
        store,
        Event(
            action="reject", fingerprint=manifest["fingerprint"], digest=manifest["output_digest"], who="ada", why="no"
        ),
    )
    with pytest.raises(GateError, match="was rejected by ada: no"):
        move(name, "other")


def test_an_altered_verdict_ends_a_run_that_reuses_it(toy):
    verdict = entry(toy, node(toy, "gate", *WORSE)) / "output" / "verdict.json"
    verdict.write_text(verdict.read_text().replace('"refuse"', '"pass"'))
    result = toy("run", *WORSE)
    assert result.returncode == 1
    assert "verdict.json has SHA-256" in result.stderr


COMMERCIAL = "aliases.production.commercial=true"


def test_an_alias_that_was_marked_commercial_stays_so_until_it_is_unmarked(move, toy):
    label = "sources.rows.labels=[CC-BY-NC-4.0]"
    move(node(toy, "left"), "production", COMMERCIAL)
    with pytest.raises(GateError, match="alias production is commercial"):
        move(node(toy, "left", *BETTER), "production", label, force=True)
    assert move(
        node(toy, "left", *BETTER), "production", "aliases.production.commercial=false", label, force=True
    ).event


def test_a_commercial_alias_takes_no_model_with_a_non_commercial_label(move, toy):
    name = node(toy, "left")
    label = "sources.rows.labels=[CC-BY-NC-4.0]"
    with pytest.raises(GateError) as refused:
        move(name, "production", COMMERCIAL, label, force=True)
    with Index(toy.folder / "artifacts") as index:
        [source] = index.sources("rows")
    data, model = node(toy, "data"), node(toy, "model")
    ways = [f"{source} -> {data} -> {name}", f"{source} -> {data} -> {model} -> {name}"]
    assert f"{source} has the label CC-BY-NC-4.0: {ways[0]}" in str(refused.value)
    assert read_events(toy.folder / "artifacts") == []
    assert move(name, "staging", COMMERCIAL, label).event.labels == ["CC-BY-NC-4.0"]
    assert move(name, "production", COMMERCIAL, "sources.rows.labels=[mit]").event is not None
    move(node(toy, "left", *BETTER), "production", COMMERCIAL, force=True)
    with pytest.raises(GateError, match="alias production is commercial"):  # the label came later
        move(None, "production", COMMERCIAL, label)
    custom = "non_commercial_labels=[mit]"
    with pytest.raises(GateError, match="has the label mit"):
        move(name, "production", COMMERCIAL, custom, "sources.rows.labels=[mit]")


def test_a_label_that_a_manifest_records_counts_without_being_stated(tmp_path, prefect_url, monkeypatch):
    (tmp_path / "rows.txt").write_text("rows")
    toy = command(tmp_path, prefect_url)
    assert toy("run", "sources.rows.labels=[non-commercial]").returncode == 0
    assert toy.states()["data"] == "reuse"  # a label is no identity
    monkeypatch.chdir(tmp_path)
    pipeline = load_pipeline([*BASE, "tracking=none", COMMERCIAL], CONF)
    with pytest.raises(GateError, match="has the label non-commercial"):
        promote(pipeline, node(toy, "left"), "production", why="", force=False)


def test_of_two_promotions_at_once_one_wins_and_both_are_told(toy):
    arguments = ("--alias", "champion", "--config-dir", str(CONF), *BASE, "tracking=none")
    names = [node(toy, "left"), node(toy, "left", *BETTER)]
    both = [toy.start("promote", name, *arguments) for name in names]
    ends = [process.communicate(timeout=60) for process in both]
    assert sorted(process.returncode for process in both) == [0, 3], ends
    winner = names[[process.returncode for process in both].index(0)]
    [promoted] = stacks(read_events(toy.folder / "artifacts"))["champion"]
    assert promoted.fingerprint.startswith(winner.partition("@")[2])
    assert "alias champion names" in ends[[process.returncode for process in both].index(3)][1]


def test_a_promotion_that_a_kill_cut_short_blocks_nobody(move, toy):
    move(node(toy, "left"))
    path = toy.folder / "artifacts" / "promotions.jsonl"
    path.write_text(path.read_text() + '{"action": "promote", "ali')
    assert toy("run").returncode == 0
    assert move(node(toy, "left", *BETTER), force=True).event is not None
    assert len(read_events(toy.folder / "artifacts")) == 2


def test_a_verdict_that_demands_approval_needs_one(move, toy, prefect_url):
    approval = ("gate.approval=required",)
    name, gate = (node(toy, stage, *approval) for stage in ("left", "gate"))
    store = toy.folder / "artifacts"
    process = toy.start("run", *approval)
    wait_until((entry(toy, gate) / "manifest.json").exists, "the gate ends")
    process.terminate()
    process.communicate(timeout=60)
    with pytest.raises(GateError, match="demands a person's approval, which is not given yet"):
        move(name)
    manifest = json.loads((entry(toy, gate) / "manifest.json").read_text())
    for action in ("reject", "approve"):
        with locked(store):
            event = Event(
                action=action, fingerprint=manifest["fingerprint"], digest=manifest["output_digest"], who="ada", why=""
            )
            append(store, event)
        if action == "reject":
            with pytest.raises(GateError, match="was rejected by ada"):
                move(name)
    assert move(name).event.verdict == manifest["fingerprint"]

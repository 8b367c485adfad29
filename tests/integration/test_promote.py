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
from lineage.record.labels import recorded_labels
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
    assert "refuse: left@" in fresh.stdout
    rows = {row["stage"]: row for row in json.loads(reused.stdout)["stages"]}
    assert {row["state"] for row in rows.values()} == {"reuse"}
    assert rows["gate"]["metrics"]["passed"] == 0
    assert (Path(rows["left"]["output"]) / "model.txt").exists()


def test_promote_and_rollback_from_the_command_line(toy):
    arguments = ("--config-dir", str(CONF), *BASE, "tracking=none")
    first, second = node(toy, "left"), node(toy, "left", *BETTER)
    done = toy("promote", first, "--alias", "champion", "--why", "the first", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert (output["action"], output["model"], output["before"], output["forced"]) == ("promote", first, None, False)
    assert output["why"] == "the first" and "@" in output["who"] and output["verdict"]
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
    assert again.returncode == 2 and "there is no previous model" in again.stderr
    assert [event.action for event in read_events(toy.folder / "artifacts")] == ["promote", "promote", "rollback"]
    asked = ("lineage", "alias:champion", "--config-dir", str(CONF), "store=artifacts")
    moves = toy(*asked).stdout.partition("moves of alias champion:\n")[2].splitlines()
    assert [line[18:].partition(" by ")[0] for line in moves] == [
        f"rollback to {first}", f"promote to {second}", f"promote to {first}",
    ]  # fmt: skip
    assert moves[-1].endswith(": the first")
    assert [each["why"] for each in json.loads(toy(*asked, "--json").stdout)["moves"]] == ["the first", "", ""]


def test_a_model_needs_a_passing_verdict_or_force(move, toy):
    store, name = toy.folder / "artifacts", node(toy, "left")
    with pytest.raises(GateError, match=r"no gate has judged it.*--force"):
        move("toy-gated/model")
    with pytest.raises(GateError, match=r"refuses left:\n  beats_parent: worse.*\nthe evidence is in "):
        move(node(toy, "left", *WORSE))
    assert read_events(store) == []
    passing = move(name, "other", force=True).event
    assert passing is not None and not passing.forced and passing.verdict
    assert move(name, "other").event is None  # what the alias names already is no event
    append(store, event_on(entry(toy, node(toy, "gate")), "reject"))
    with pytest.raises(GateError, match="was rejected by ada: no"):  # nor is it passed over by asking nobody
        move(name, "third")
    forced = move(node(toy, "left", *WORSE), force=True).event
    assert forced is not None and forced.forced and forced.verdict is None and forced.why == "because"
    assert [event.action for event in read_events(store)] == ["promote", "reject", "promote"]


def event_on(gate: Path, action: str) -> Event:
    manifest = json.loads((gate / "manifest.json").read_text())
    return Event(
        action=action, fingerprint=manifest["fingerprint"], digest=manifest["output_digest"], who="ada", why="no"
    )


@pytest.mark.parametrize("force", [False, True])
def test_one_changed_byte_is_refused(move, toy, force):
    first, gate = node(toy, "left"), entry(toy, node(toy, "gate", *WORSE))
    verdict = gate / "output" / "verdict.json"
    verdict.write_text(verdict.read_text().replace('"refuse"', '"pass"').replace('"worse"', '"better"'))
    if not force:
        with pytest.raises(ArtifactError, match=r"verdict\.json has SHA-256"):
            move(node(toy, "left", *WORSE))
        result = toy("run", *WORSE)  # nor is it reused
        assert result.returncode == 1 and "verdict.json has SHA-256" in result.stderr
    model = entry(toy, first) / "output" / "model.txt"
    intact = model.read_text()
    model.write_text("0 -> 9.9")
    with pytest.raises(ArtifactError, match=r"model\.txt has SHA-256"):
        move(first, force=force)
    model.write_text(intact)
    move(first)
    move(node(toy, "left", *BETTER), force=True)
    model.write_text("0 -> 9.9")
    with pytest.raises(ArtifactError, match=r"model\.txt has SHA-256"):  # nor is it rolled back to
        move(None)
    assert len(read_events(toy.folder / "artifacts")) == 2


def test_a_refused_model_passes_by_easier_rules_only_where_its_file_declares_them(move, toy, tmp_path):
    name, conf = node(toy, "left", *WORSE), tmp_path / "conf"
    rule = "stages.gate.method.rules.beats_parent"
    assert toy("run", *WORSE, f"{rule}.min_gain=0.9").returncode == 3  # narrower rules are no way around it
    dropped = toy("run", *WORSE, f"~{rule}")
    assert dropped.returncode == 0, dropped.stderr
    with pytest.raises(GateError, match=r"passes left only since rules .* beats_parent: .*more than 0.* --force"):
        move(name, "released", *WORSE, f"~{rule}")
    forced = move(name, "tried", force=True).event
    assert (forced.forced, forced.verdict, forced.rules) == (True, None, [])

    shutil.copytree(CONF, conf)
    file = conf / "pipeline/toy-gated.yaml"
    text = file.read_text()
    line = next(each for each in text.splitlines() if "beats_parent" in each)
    file.write_text(text.replace(f"{line}\n", ""))
    arguments = ("--config-dir", str(conf), *BASE, "tracking=none")
    moved = toy("promote", name, "--alias", "released", *arguments)
    assert moved.returncode == 0, moved.stderr
    assert "keeps_champion: " in moved.stdout
    assert "refused before by a rule that is gone or less strict now" in moved.stdout
    [event] = [each for each in read_events(toy.folder / "artifacts") if each.alias == "released"]
    assert [each.partition(" ")[2].partition(":")[0] for each in event.rules] == ["keeps_champion"]
    assert not event.forced and event.verdict and {each.split()[1] for each in event.eased} == {"beats_parent:"}


def test_a_verdict_against_another_champion_is_refused(move, toy):
    first, second = node(toy, "left"), node(toy, "left", *BETTER)
    move(first)
    for alias in ("champion", "production"):
        with pytest.raises(GateError, match=rf"compared left with no champion, and alias champion names {first} now"):
            move(second, alias)
    assert toy("run", *BETTER).returncode == 0
    move(second)
    move(None)
    assert move(second).event is not None  # compared with the model that it replaces


@pytest.mark.parametrize("named", [(), ("stages.gate.inputs.champion=model",)])
def test_a_verdict_without_a_champion_is_refused_once_its_own_plan_has_made_one(move, toy, named):
    start, left = node(toy, "model"), node(toy, "left")
    move(start, force=True)
    with pytest.raises(GateError, match=rf"compared left with no champion, and alias champion names {start} now"):
        move(left)
    result = toy("run", "--json", *named)
    assert result.returncode == 0, result.stderr
    states = {row["stage"]: row["state"] for row in json.loads(result.stdout)["stages"]}
    assert {name for name, state in states.items() if state != "reuse"} == {"evaluate", "gate"}
    assert move(left).event.verdict is not None
    assert "nothing to do" in toy("run", *named).stdout


@pytest.mark.parametrize(
    ("model", "alias", "message"),
    [
        *(("toy-gated/left", name, "is not a name for an alias") for name in ("latest", "v3", "a b", "", "a/b")),
        ("toy-gated/data", "champion", "is text; an alias names a model"),
        ("source:rows", "champion", "is the source"),
    ],
)
def test_models_alone_have_aliases_of_names_that_mlflow_takes_too(move, model, alias, message):
    with pytest.raises(ConfigError, match=message):
        move(model, alias)


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


COMMERCIAL = "aliases.production.commercial=true"


LABEL = "sources.rows.labels=[CC-BY-NC-4.0]"


def test_a_commercial_alias_takes_no_model_with_a_non_commercial_label(move, toy):
    name, better, store = node(toy, "left"), node(toy, "left", *BETTER), toy.folder / "artifacts"
    with pytest.raises(GateError) as refused:  # another file of the name: it counts here, and is not kept
        move(name, "production", COMMERCIAL, LABEL, "sources.rows.path=others.txt", force=True)
    with Index(store) as index:
        [source] = index.sources("rows")
    assert f"{source} has the label CC-BY-NC-4.0: {source} -> {node(toy, 'data')} -> {name}" in str(refused.value)
    assert read_events(store) == []
    assert "CC-BY-NC-4.0" not in toy("plan", LABEL).stderr and recorded_labels(store) == {}  # a plan writes nothing
    assert move(name, "production", COMMERCIAL, "sources.rows.labels=[mit]").event.labels == ["mit"]
    move(better, "production", COMMERCIAL, force=True)
    with pytest.raises(GateError, match="alias production is commercial"):  # the label came later
        move(None, "production", LABEL)
    assert recorded_labels(store) == {source.partition("@")[2]: {"CC-BY-NC-4.0", "mit"}}
    with pytest.raises(GateError, match="alias production is commercial"):  # until it is unmarked, and labels are kept
        move(name, "production", force=True)
    assert move(name, "staging", COMMERCIAL).event.labels == ["CC-BY-NC-4.0", "mit"]
    with pytest.raises(GateError, match="has the label mit"):
        move(name, "production", COMMERCIAL, "non_commercial_labels=[mit]")
    assert move(name, "production", "aliases.production.commercial=false", force=True).event


def test_a_label_that_a_manifest_records_counts_without_being_set(tmp_path, prefect_url, monkeypatch):
    (tmp_path / "rows.txt").write_text("rows")
    toy = command(tmp_path, prefect_url)
    assert toy("run", "sources.rows.labels=[non-commercial]").returncode == 0
    assert toy.states()["data"] == "reuse"  # a label is no identity
    monkeypatch.chdir(tmp_path)
    pipeline = load_pipeline([*BASE, "tracking=none", COMMERCIAL], CONF)
    with pytest.raises(GateError, match="has the label non-commercial"):
        promote(pipeline, node(toy, "left"), "production", why="", force=False)


@pytest.mark.slow  # test_promotions.py: writers at once lose no event
def test_of_two_promotions_at_once_one_wins_and_both_are_reported(toy):
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
    for action in ("reject", "approve"):
        with locked(store):
            append(store, event_on(entry(toy, gate), action))
        if action == "reject":
            with pytest.raises(GateError, match="was rejected by ada"):
                move(name)
    manifest = json.loads((entry(toy, gate) / "manifest.json").read_text())
    assert move(name).event.verdict == manifest["fingerprint"]

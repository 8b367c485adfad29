"""A session becomes a stage: its command log is the recipe; replay, lineage, diff and verify know it."""

import json
import secrets
import shutil
import threading
from pathlib import Path

import pytest

from flows.__main__ import main
from flows.steps import command
from flows.steps.commit import _compared
from flows.steps.engine import Engine
from lineage.store import Entry
from tests import training
from tests.steps_server import find

ROW = {"tokens": [5, 6, 7], "target_tokens": [6, 7, 8], "weights": [1.0, 0.5, 1.0]}
SETTINGS = {"learning_rate": 1e-2, "max_length": 64}


def trained(root: Path, model: Path, *rates: float, **settings: object) -> str:
    """A session that took a step at each of these rates, with a saved state that it goes back to."""
    engine = Engine(root, find)
    key = engine.authenticate(engine.records.add_key(secrets.token_hex(8)))
    engine.start()
    name = engine.create(key, {"model": str(model), **SETTINGS, **settings}).session
    for rate in rates:
        engine.accept(key, name, "backward", {"data": [ROW]})
        engine.accept(key, name, "step", {"learning_rate": rate})
    engine.accept(key, name, "save", {"to": "here"})
    engine.accept(key, name, "backward", {"data": [ROW]})
    last = engine.accept(key, name, "load", {"saved": "here", "session": name})
    done = threading.Event()
    engine.when_done(last.request_id, done.set)
    assert done.wait(60) and engine.outcome(last.request_id).status == 200
    engine.close()
    return name


@pytest.mark.parametrize("adapter", [None, {"rank": 2, "alpha": 4, "dropout": 0.3}], ids=["full", "lora"])
def test_a_committed_session_is_replayed_to_the_bit(
    tmp_path: Path, adapter: object, capsys: pytest.CaptureFixture[str]
) -> None:
    training.write_models(tmp_path)
    root, store = tmp_path / "steps", f"store={tmp_path / 'store'}"
    model = tmp_path / "policy"
    first, second = trained(root, model, 1e-2, adapter=adapter), trained(root, model, 1e-2, 3e-3, adapter=adapter)
    for name in (first, second):
        assert main(["steps", "commit", name, "--stage", "rl", "--root", str(root), store]) == 0
    outputs = [Path(line) for line in capsys.readouterr().out.splitlines() if line.startswith("/")]
    assert outputs[0] != outputs[1] and not training.same(*map(training.weights, outputs))
    assert main(["steps", "commit", first, "--stage", "rl", "--root", str(root), store]) == 0, "it is there"
    refs = [f"rl@{output.parent.name}" for output in outputs]
    capsys.readouterr()
    code = main(["replay", refs[0], "--json", store])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["differ"]) == (0, [])
    assert found["equal"] and found["calls"] == 5 and found["files"] == (3 if adapter else 1)
    manifest = json.loads((outputs[1].parent / "manifest.json").read_text())
    assert manifest["method"] == "tasks.steps.Steps" and manifest["metrics"]["steps"] == 2
    assert manifest["metrics"]["calls"] == 7
    assert manifest["inputs"]["policy"]["source"]["files"]
    assert main(["lineage", refs[0], "--json", store]) == 0
    assert "source:policy" in capsys.readouterr().out
    assert main(["impact", "source:policy", store]) == 0
    shown = capsys.readouterr().out
    assert "to do: run the program of the session again" in shown and "pipeline=steps" not in shown
    assert main(["diff", *refs, store]) == 0
    shown = capsys.readouterr().out
    assert "commands" in shown and "calls: 5 -> 7" in shown
    # backward, step, save, backward and load, beside backward, step, backward, step ...
    assert "calls: number 3 of 5 and 7 is the first that differs: save " in shown
    Entry(outputs[0].parent).require_intact()


def test_an_adapters_settings_are_compared_without_the_name_of_its_base(tmp_path: Path) -> None:
    """Commits of earlier versions have none there."""
    found = []
    for number, (base, targets, rank) in enumerate(
        [("", ["a", "b"], 2), ("f" * 64, ["b", "a"], 2), ("", ["a", "b"], 3)]
    ):
        config = {"base_model_name_or_path": base, "target_modules": targets, "r": rank}
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "adapter_config.json").write_text(json.dumps(config))
        found.append(_compared(tmp_path / str(number), {"adapter_config.json": ""}))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("action", ["serve", "key", "commit"])
def test_overrides_reach_each_action(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they stand: the model of a session may be of another store."""
    found = []
    monkeypatch.setattr(command, f"run_{action}", lambda options: found.append(options.overrides) or 0)
    cli_args = {"serve": [], "key": ["me"], "commit": ["mine", "--stage", "rl"]}[action]
    for argv in ([*cli_args, "--root", "x", "store=y"], [*cli_args, "store=y", "--root", "x"]):
        assert main(["steps", action, *argv]) == 0
    assert found == [["store=y"]] * 2


def test_a_log_that_was_changed_is_not_replayed_and_other_weights_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training.write_models(tmp_path)
    root, store = tmp_path / "steps", f"store={tmp_path / 'store'}"
    name = trained(root, tmp_path / "policy", 1e-2)
    assert main(["steps", "commit", name, "--stage", "rl", "--root", str(root), store]) == 0
    output = Path(capsys.readouterr().out.strip())
    manifest = output.parent / "manifest.json"
    found = json.loads(manifest.read_text())
    other = {**found, "files": {**found["files"], "model.safetensors": "0" * 64}}
    manifest.chmod(0o644)
    manifest.write_text(json.dumps(other))
    assert main(["replay", "rl", store]) == 1
    assert "gave other bits: model.safetensors" in capsys.readouterr().out
    log = output / "commands.jsonl"
    log.chmod(0o644)
    log.write_text(log.read_text().replace("0.01", "0.02"))
    assert main(["replay", "rl", store]) == 1
    assert "is not the log of the recipe" in capsys.readouterr().err


def test_a_session_without_a_step_or_of_another_session_is_not_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training.write_models(tmp_path)
    root, store = tmp_path / "steps", f"store={tmp_path / 'store'}"
    name = trained(root, tmp_path / "policy")
    assert main(["steps", "commit", name, "--stage", "rl", "--root", str(root), store]) == 2
    assert "it took no step" in capsys.readouterr().err
    assert main(["steps", "commit", "nothing", "--stage", "rl", "--root", str(root), store]) == 2
    assert f"{name} is there" in capsys.readouterr().err
    assert main(["steps", "commit", name, "--stage", "cache", "--root", str(root), store]) == 2


def test_a_session_that_started_from_others_is_committed_with_their_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that starts from a saved state, and loads another later; replay executes the calls that lead to both."""
    training.write_models(tmp_path)
    root, store = tmp_path / "steps", f"store={tmp_path / 'store'}"
    first, second = trained(root, tmp_path / "policy", 1e-2), trained(root, tmp_path / "policy", 3e-3, seed=1)
    engine = Engine(root, find)
    key = engine.authenticate(engine.records.add_key("both"))
    for name in (first, second):
        engine.records.set_session(name, key="both")
    engine.start()
    other = engine.create(
        key, {"model": str(tmp_path / "policy"), **SETTINGS, "start": {"session": first, "saved": "here"}}
    )
    for call, body in (
        ("backward", {"data": [ROW]}), ("step", {}), ("save", {"to": "mine"}),
        ("load", {"saved": "here", "session": second, "optimizer": False}), ("backward", {"data": [ROW]}), ("step", {}),
    ):  # fmt: skip
        last = engine.accept(key, other.session, call, body)
    done = threading.Event()
    engine.when_done(last.request_id, done.set)
    assert done.wait(60) and engine.outcome(last.request_id).status == 200
    engine.close()
    assert main(["steps", "commit", other.session, "--stage", "rl", "--root", str(root), store]) == 0
    output = Path(capsys.readouterr().out.strip())
    lines = [json.loads(line) for line in (output / "commands.jsonl").read_text().splitlines()]
    # Those of the first session up to its save, then its own, those of the second, and the rest of its own.
    expected = [(1, "backward"), (1, "step"), (1, "save"), (0, "backward"), (0, "step"), (0, "save")]
    expected += [(2, "backward"), (2, "step"), (2, "save"), (0, "load"), (0, "backward"), (0, "step")]
    assert [(each.get("session", 0), each["name"]) for each in lines if "name" in each] == expected
    batches = {each["digest"] for each in lines if each.get("name") == "backward"}
    assert len(batches) == 1, "all of them have the same row"
    assert first not in str(lines) and lines[0]["start"] == {"saved": "here", "session": 1}
    assert main(["replay", "rl", "--json", store]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["calls"] == 12


def test_a_session_is_loaded_from_any_directory_and_with_its_own_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training.write_models(tmp_path)
    root, argv = tmp_path / "steps", ["--stage", "rl", "--root", str(tmp_path / "steps"), f"store={tmp_path / 'store'}"]
    monkeypatch.chdir(tmp_path)
    name = trained(root, Path("policy"), 1e-2, adapter={"rank": 2})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["steps", "commit", name, *argv]) == 0
    (tmp_path / "policy" / "README.md").write_text("of no weight")
    assert main(["steps", "commit", name, *argv]) == 0
    weights = tmp_path / "policy" / "model.safetensors"
    shutil.copy(tmp_path / "teacher" / weights.name, weights)
    assert main(["steps", "commit", name, *argv]) != 0
    assert "policy is not the model that it started from; restore its files" in capsys.readouterr().err


def test_the_state_of_another_model_is_not_committed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training.write_models(tmp_path)
    root, store = tmp_path / "steps", f"store={tmp_path / 'store'}"
    shutil.copytree(tmp_path / "policy", tmp_path / "copy")
    first, second = trained(root, tmp_path / "policy", 1e-2), trained(root, tmp_path / "copy", 1e-2)
    engine = Engine(root, find)
    engine.records.set_session(second, start=json.dumps({"session": first, "saved": "here"}))
    engine.close()
    assert main(["steps", "commit", second, "--stage", "rl", "--root", str(root), store]) == 2
    assert f"loads of session {first}, which has another model" in capsys.readouterr().err

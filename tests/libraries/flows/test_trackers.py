"""TensorBoard, Weights & Biases and trackio: each gets a run per stage, which a resumed stage continues."""

import contextlib
import importlib.util
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.declare.config import load_pipeline
from flows.declare.operation import Tracking
from flows.planning.plan import make_plan
from flows.progress.trackers import OPENERS, StageTracker
from flows.progress.tracking import make_tracker
from lineage.errors import ConfigError, PipelineError
from lineage.record.run_file import RunNames
from lineage.record.tracker import Event
from tests.tracked_stage import Tracked, execution, report, start_of
from tests.written_store import WrittenStore

Seen = dict[str, object]  # status, and of each step its loss


@pytest.fixture
def store(tmp_path: Path) -> WrittenStore:
    return WrittenStore(tmp_path / "artifacts")


def attempt(
    store: WrittenStore, name: str, manifest, *steps: int, resumes: bool = False, error: BaseException | None = None
):
    """One execution with one stage that reports these steps, and ends, or raises."""
    tracker = StageTracker(name, OPENERS[name], RunNames(experiment=store.root.parent.name, tags={"team": "nlp"}))
    with contextlib.suppress(BaseException if error else ()), tracker.execution(execution(store)):  # type: ignore[arg-type]
        stage = Tracked(tracker, start_of(store, manifest, resumes=resumes))
        report(stage.start, *steps)
        if error:
            if isinstance(error, Exception):
                stage.failed(error)
            raise error
        tracker.on(Event(title=manifest.stage, state="done", manifest=replace(manifest, metrics={"accuracy": 0.75})))


# --- what each tracker has, read without it


def of_tensorboard(root: Path) -> dict[str, Seen]:
    from tensorboardX.proto.event_pb2 import Event as Line

    found: dict[str, Seen] = {}
    for path in sorted((root / "logs/tensorboard").rglob("events*")):
        seen = found.setdefault(path.parent.name, {"steps": {}, "status": "running"})
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            line = Line.FromString(content[at + 12 : at + 12 + length])
            at += length + 16
            for value in line.summary.value:
                if value.tag == "loss":
                    steps = seen["steps"]
                    assert isinstance(steps, dict) and line.step not in steps
                    steps[line.step] = round(value.simple_value, 4)
                    assert line.wall_time == 1000.0 + line.step or line.wall_time > 1e9  # written, or of a real stage
                if value.tag.startswith("status"):
                    seen["status"] = value.tensor.string_val[0].decode()
                if value.tag == "final/accuracy":
                    seen["accuracy"] = value.simple_value
    return found


def of_wandb(root: Path) -> dict[str, Seen]:
    """From the transaction logs, whose records are those of LevelDB."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # as at the end of the process: until then a finished run may not be written
    found: dict[str, Seen] = {}
    for path in sorted((root / "logs/wandb").rglob("*.wandb")):
        content, at, parts, lines = path.read_bytes(), 7, b"", list[Record]()
        while at + 7 <= len(content):
            left = 32768 - at % 32768
            if left < 7:
                at += left
                continue
            length, kind = struct.unpack_from("<HB", content, at + 4)
            parts += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or the last part
                lines.append(Record.FromString(parts))
                parts = b""
        (run,) = {line.run.run_id for line in lines if line.HasField("run")}
        seen = found.setdefault(run, {"steps": {}, "status": "running"})
        for line in lines:
            items = {"/".join(each.nested_key) or each.key: each.value_json for each in line.history.item}
            if "loss" in items:
                steps = seen["steps"]
                assert isinstance(steps, dict) and int(items["_step"]) not in steps
                steps[int(items["_step"])] = round(float(items["loss"]), 4)
            for each in line.summary.update:
                if ("/".join(each.nested_key) or each.key) == "final/accuracy":
                    seen["accuracy"] = float(each.value_json)
            if line.HasField("exit"):
                seen["status"] = {0: "finished", 1: "failed", 255: "killed"}[line.exit.exit_code]
    return found


def of_trackio(root: Path) -> dict[str, Seen]:
    from trackio.sqlite_storage import SQLiteStorage

    found: dict[str, Seen] = {}
    project = root.parent.name  # it reads its folder's name once in a process
    for run in SQLiteStorage.get_runs(project):
        lines = SQLiteStorage.get_logs(project, run)
        steps = [(line["step"], round(line["loss"], 4)) for line in lines if "loss" in line]
        assert len(steps) == len(dict(steps))
        alerts = SQLiteStorage.get_alerts(project, run)
        last = max(alerts, key=lambda each: each["timestamp"], default={"title": "running"})
        found[run] = {"steps": dict(steps), "status": last["title"]}
        final = [line["final/accuracy"] for line in lines if "final/accuracy" in line]
        found[run] |= {"accuracy": final[-1]} if final else {}
    return found


READ: dict[str, Callable[[Path], dict[str, Seen]]] = {
    "tensorboard": of_tensorboard, "wandb": of_wandb, "trackio": of_trackio
}  # fmt: skip


@pytest.fixture(params=list(READ))
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    package = {"tensorboard": "tensorboardX"}.get(request.param, request.param)
    pytest.importorskip(package)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return str(request.param)


LOSS = {step: round(1.0 / step, 4) for step in range(1, 7)}


def test_a_stage_is_a_run_with_its_steps_and_final_metrics(store, name):
    attempt(store, name, store.stage("sft", {}, recipe={"learning_rate": 0.1}), *LOSS)
    ((_, seen),) = READ[name](store.root).items()
    assert seen == {"steps": LOSS, "status": "finished", "accuracy": 0.75}


@pytest.mark.parametrize(
    ("error", "status"), [(PipelineError("no memory"), "failed"), (KeyboardInterrupt("stopped"), "killed")]
)
def test_a_crash_is_failed_and_a_cancel_is_killed(store, name, error, status):
    attempt(store, name, store.stage("sft", {}), 1, 2, error=error)
    ((_, seen),) = READ[name](store.root).items()
    assert str(seen["status"]).startswith(status) and seen["steps"] == {1: 1.0, 2: 0.5}


def test_a_resumed_stage_continues_its_run_and_repeats_no_step(store, name):
    made = store.stage("sft", {})
    attempt(store, name, made, 1, 2, 3, 4, error=KeyboardInterrupt())
    metrics = store.root / "sft" / made.fingerprint[:16] / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))  # as a resume from step 2 cuts it
    attempt(store, name, made, 3, 4, 5, 6, resumes=True)
    ((_, seen),) = READ[name](store.root).items()
    assert seen == {"steps": LOSS, "status": "finished", "accuracy": 0.75}


@pytest.mark.parametrize("name", ["wandb", "trackio"], indirect=True)  # TensorBoard writes each step at once
def test_steps_that_a_killed_tracker_had_not_written_are_written_by_the_next_attempt(store, name):
    made = store.stage("sft", {})
    attempt(store, name, made, 1, 2, error=KeyboardInterrupt())
    report(start_of(store, made), 3, 4)
    note = store.root / "sft" / made.fingerprint[:16] / f"{name}.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "step": 4}))  # as if it had taken them
    attempt(store, name, made, 5, 6, resumes=True)
    ((_, seen),) = READ[name](store.root).items()
    assert seen == {"steps": LOSS, "status": "finished", "accuracy": 0.75}
    assert len([*(store.root / "logs/wandb").glob("offline-run-*")]) == (name == "wandb")  # what `wandb sync` uploads


def test_a_stage_that_starts_again_has_a_run_of_its_own(store, name, monkeypatch):
    made, times = store.stage("sft", {}), iter([1e9, 2e9])
    monkeypatch.setattr("tests.tracked_stage.time", SimpleNamespace(time=lambda: next(times)))
    for _ in range(2):
        (store.root / "sft" / made.fingerprint[:16] / "metrics.jsonl").unlink(missing_ok=True)
        attempt(store, name, made, 1)
    assert [seen["steps"] for seen in READ[name](store.root).values()] == [{1: 1.0}] * 2


def test_what_fails_in_a_tracker_is_reported_once_and_stops_nothing(store, capsys):
    def refused(run: object) -> None:
        raise OSError("the server is away")

    tracker = StageTracker("wandb", refused, RunNames())  # type: ignore[arg-type]
    with tracker.execution(execution(store)):
        for each in ("sft", "dpo"):
            Tracked(tracker, start_of(store, store.stage(each, {})))
    message = capsys.readouterr().err
    assert message.count("tracking.wandb: OSError: the server is away; the run continues") == 1


def test_one_tracker_or_a_list_is_chosen_beside_mlflow():
    def tracking(*overrides: str) -> Tracking:
        return load_pipeline(["pipeline=sft", *overrides]).tracking

    alone = tracking("tracking=tensorboard")
    assert (alone.mlflow, alone.dvc, alone.tensorboard, alone.wandb) == (True, True, True, False)
    both = tracking("tracking=[none,tensorboard,wandb]", "tracking.experiment=ours")
    assert (both.mlflow, both.tensorboard, both.wandb, both.experiment) == (False, True, True, "ours")
    listed = tracking("tracking=[mlflow,wandb]")
    assert (listed.mlflow, listed.wandb, tracking("tracking=mlflow").mlflow) == (True, True, True)
    with pytest.raises(ConfigError, match="no such tracking"):
        tracking("tracking=[wandb,comet]")


def test_weights_and_biases_without_a_key_is_refused_before_anything_runs(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    tracking = Tracking(mlflow=False, wandb=True)
    with pytest.raises(ConfigError, match=r"there is no key for api\.wandb\.ai; log in with `wandb login`"):
        make_tracker(tracking)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key")
    for name, value in {"WANDB_MODE": "offline", "WANDB_API_KEY": "k", "NETRC": str(tmp_path / "netrc")}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert make_tracker(tracking)


@pytest.mark.parametrize(
    ("mode", "message"),
    [("", "WANDB_MODE='' is no mode"), ("Offline", "is no mode"), ("run", "no key"), ("dryrun", "")],
)
def test_the_plan_takes_the_modes_of_weights_and_biases(monkeypatch, mode, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        assert Tracking(mlflow=False, wandb=True).others == ["wandb"]


def test_the_plan_names_a_tracker_that_cannot_record(monkeypatch):
    real = importlib.util.find_spec
    for found, why in ((None, "pip install 'posttrain.wandb.'"), (real("json"), "set WANDB_API_KEY")):
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, *rest, found=found: found if name == "wandb" else real(name, *rest)
        )
        with pytest.raises(ConfigError, match=f"tracking.wandb=true: .*{why}"):
            make_plan(load_pipeline(["pipeline=cpt", "tracking=[none,wandb]"]))


def test_a_tracker_that_is_not_installed_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking.wandb=true: the package wandb is not installed; run: pip install"):
        make_tracker(Tracking(mlflow=False, wandb=True))

"""The folder of a sweep: its name, and what lies in it after every trial."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from flows.declare.sweep import Pruning
from flows.reports.sweep import sweep_summary
from flows.sweep.files import SweepFiles
from flows.sweep.folder import TrialResult, read_best, sweep_folder, trial_results
from flows.sweep.study import Study
from lineage.errors import ConfigError
from lineage.store import Store
from tests.sweeps import RANDOM, complete, ended, maximize, minimize, space_of, sweep

GRID = {"a": "1,2,3,4,5", "b": "x"}


def _files(folder: Path, settings, overrides=("pipeline=toy",), config_dir=None) -> SweepFiles:
    folder.mkdir(parents=True, exist_ok=True)
    return SweepFiles(folder, settings, overrides, config_dir)


def _summary(files: SweepFiles, settings) -> list[str]:
    configured = SimpleNamespace(sweep=settings, plan=SimpleNamespace(stages=[]), own=frozenset())
    return sweep_summary(configured, files, 1.0).splitlines()


def _params(number: int) -> dict[str, str]:
    return {"a": str(number + 1), "b": "x"}


def _complete(number: int, *, seconds=2.0, metrics=None, **values: float) -> TrialResult:
    return replace(complete(number, _params(number), **values), seconds=seconds, metrics=metrics or {})


def _failed(number: int, cause="out of memory, twice") -> TrialResult:
    return ended(number, "failed", _params(number), cause)


def _csv(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "trials.csv").open()))


def test_a_line_for_each_trial_that_ended(tmp_path):
    files = _files(tmp_path, sweep(objectives={"best": maximize()}))
    files.add(_failed(1))
    assert [row["number"] for row in _csv(tmp_path)] == ["1"]
    files.add(_complete(0, best=0.5, metrics={"left/score": 0.5}))
    done, failed = _csv(tmp_path)
    names = ["number", "state", "seconds", "a", "b", "best", "left/score", "cause"]
    assert list(done.items()) == list(zip(names, ["0", "complete", "2.0", "1", "x", "0.5", "0.5", ""], strict=True))
    cause = "out of memory, twice"
    assert list(failed.items()) == list(zip(names, ["1", "failed", "1.0", "2", "x", "", "", cause], strict=True))
    assert not list(tmp_path.glob("*.tmp"))


def test_the_last_line_of_a_trial_counts_and_one_cut_by_a_kill_is_skipped(tmp_path):
    settings = sweep(objectives={"best": maximize()})
    _files(tmp_path, settings).add(_complete(0, best=0.5, seconds=100.0))
    _files(tmp_path, settings).add(_failed(1))
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"number": 7, "par')
    again = _files(tmp_path, settings)
    again.add(_complete(0, best=0.5, seconds=100.0))
    again.add(_complete(1, best=0.75))
    assert [(row["state"], row["seconds"]) for row in _csv(tmp_path)] == [("complete", "100.0"), ("complete", "2.0")]


def test_trials_written_before_this_form_of_the_code_are_read(tmp_path):
    line = (
        '{"number": 0, "params": {"a": "1", "b": "x"}, "state": "complete", "seconds": 1.5, "cause": "", '
        '"values": {"best": 0.5}, "metrics": {"left/loss": 0.1}, "fingerprints": {"left": "0a"}}\n'
    )
    (tmp_path / "trials.jsonl").write_text(line)
    [result] = trial_results(tmp_path)
    assert (result.params, result.values, result.fingerprints) == (_params(0), {"best": 0.5}, {"left": "0a"})
    _files(tmp_path, sweep(objectives={"best": maximize()})).add(_complete(1, best=0.1))
    assert (tmp_path / "trials.jsonl").read_text().startswith(line)
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["trial"] == 0


def test_best_yaml_reproduces_the_best_trial(tmp_path):
    settings = sweep(objectives={"best": maximize()})
    files = _files(tmp_path, settings, ["pipeline=toy", "c=3"], Path("own"))
    for result in (_complete(0, best=0.5), _complete(1, best=0.9), _failed(2)):
        files.add(result)
    overrides, config_dir = read_best(tmp_path / "best.yaml")
    assert overrides == ["pipeline=toy", "c=3", "a=2", "b=x"]
    assert config_dir == Path("own").absolute()
    held = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert held["trial"] == 1 and held["values"] == {"best": 0.9}
    assert "best: trial 1: best=0.9  a=2 b=x" in _summary(files, settings)


def test_the_direction_decides_which_is_best(tmp_path):
    files = _files(tmp_path, sweep(objectives={"best": minimize()}))
    files.add(_complete(0, best=0.5)), files.add(_complete(1, best=0.9))
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["trial"] == 0


@pytest.mark.parametrize(
    ("objectives", "why"), [({}, "set sweep.objectives"), ({"best": maximize()}, "no trial was complete")]
)
def test_without_a_best_trial_the_report_says_why(tmp_path, objectives, why):
    files = _files(tmp_path, sweep(objectives=objectives))
    files.add(_failed(0))
    assert not (tmp_path / "best.yaml").exists() and why in "".join(_summary(files, sweep(objectives=objectives)))
    assert (tmp_path / "plots.html").exists() == bool(objectives)


def test_several_objectives_have_a_file_for_each_trial_of_the_front(tmp_path):
    settings = sweep(objectives={"score": maximize(), "loss": minimize()})
    files = _files(tmp_path, settings)
    files.add(_complete(0, score=0.5, loss=2.0))
    assert (tmp_path / "best-0.yaml").exists()
    for number, (score, loss) in enumerate([(0.6, 1.0), (0.9, 3.0), (0.9, 2.5), (0.1, 1.0)], start=1):
        files.add(_complete(number, score=score, loss=loss))
    assert sorted(path.name for path in tmp_path.glob("best*")) == ["best-1.yaml", "best-3.yaml"]
    assert "Pareto front" in (tmp_path / "plots.html").read_text()
    assert [line.partition(":")[0] for line in _summary(files, settings)].count("front") == 2


def _page(folder: Path) -> str:
    """What the page says, without plotly's own four megabytes."""
    head, _, body = (folder / "plots.html").read_text().partition("</head>")
    assert "Plotly.newPlot" not in head and "plotly.js v" in head
    return body


def test_the_page_needs_no_network_and_holds_optunas_plots(tmp_path):
    files = _files(tmp_path, sweep(objectives={"best": maximize()}, sampler=RANDOM, num_trials=9))
    for number in range(4):
        files.add(complete(number, {"lr": f"1e-{number + 2}", "r": str(number + 1)}, best=number / 4))
    page = _page(tmp_path)
    titles = [
        "by trial",
        "importance of each parameter",
        "by parameter",
        "parallel coordinates",
        "by pairs of parameters",
    ]
    assert [title for title in titles if f"<h2>best: {title}</h2>" in page] == titles
    assert page.count("Plotly.newPlot(") == 5
    assert "src=" not in page and "NaN" not in page
    assert (tmp_path / "plots.html").read_text().count("plotly.js v") == 1


def test_choices_of_numbers_have_an_axis_of_numbers(tmp_path):
    params = ("stages.dpo.method.lr", "stages.dpo.method.adapter")
    files = _files(tmp_path, sweep(objectives={"best": maximize()}))
    for number, (rate, adapter) in enumerate([("1e-5", "full"), ("1e-3", "lora"), ("1e-4", "lora")]):
        files.add(complete(number, dict(zip(params, (rate, adapter), strict=True)), best=number / 4))
    page = _page(tmp_path)
    assert '"x":[0.00001,0.001,0.0001]' in page and '"x":["full","lora","lora"]' in page
    assert '"title":{"text":"lr"},"type":"log"' in page


def test_a_plot_without_enough_trials_is_left_out_with_a_sentence(tmp_path):
    _files(tmp_path, sweep(objectives={"best": maximize()})).add(_complete(0, best=0.5))
    page = _page(tmp_path)
    assert "best: importance of each parameter is left out: " in page
    assert "<h2>best: by trial</h2>" in page


def test_the_numbers_in_the_plots_are_those_of_the_trials(tmp_path):
    files = _files(tmp_path, sweep(objectives={"best": maximize()}))
    files.add(_failed(0))
    files.add(_complete(2, best=0.5))
    assert '"x":[2]' in _page(tmp_path)


def test_the_table_by_step_has_a_column_for_each_trial_and_a_long_one_is_thinned(tmp_path):
    folder, field = tmp_path / "sweeps" / "s", "stages.left.method.lr"
    settings = sweep(until="left", by_step="loss")
    files = _files(folder, settings)
    for number, (rate, losses) in enumerate([("0.1", [3.0, 2.5]), ("0.2", [3.0, 2.0, *[1.5] * 43])]):
        path = Store(tmp_path).entry("left", str(number) * 64).metrics
        path.parent.mkdir(parents=True)
        reports = [{"step": step, "time": 0, "metrics": {"loss": loss}} for step, loss in enumerate(losses, start=1)]
        path.write_text("".join(json.dumps(each) + "\n" for each in reports))
        files.add(replace(complete(number, {field: rate}), fingerprints={"left": str(number) * 64}))
    files.add(ended(2, "failed", {field: "0.3"}))
    assert (folder / "by-step.csv").read_text().startswith("step,lr=0.1,lr=0.2\n1,3,3\n2,2.5,2\n3,,1.5\n")
    assert (folder / "by-step.md").read_text().splitlines()[0] == "| step | lr=0.1 | lr=0.2 |"
    shown = [line.split("|")[1].strip() for line in _summary(files, settings) if line.startswith("|")]
    assert shown == ["step", "---:", *map(str, range(3, 46, 3))]  # the last step among them


def test_the_folder_is_named_by_what_is_tried(tmp_path):
    def name(params=GRID, stages=(("left", "0a"), ("data", "1b")), **changes) -> str:
        return sweep_folder(tmp_path, "toy", sweep(**changes), params, stages).name

    objectives = {"best": maximize()}
    sampled = {"sampler": RANDOM, "objectives": objectives}
    assert name().startswith("toy-") and len(name()) == len("toy-") + 8
    assert name(name="mine") == "mine"
    assert name(stages=(("data", "1b"), ("left", "0a"))) == name()
    assert name(num_trials=3, **sampled) == name(num_trials=9, parallel=2, **sampled)
    different = [
        name(), name({"a": "1,2"}), name(objectives=objectives), name(num_trials=3, **sampled),
        name(stages=(("left", "0a"),)), name(stages=(("left", "0a"), ("data", "2b"))),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_another_space_under_the_same_name_is_refused(tmp_path):
    sweep_folder(tmp_path, "toy", sweep(name="s"), {"a": "1,2"}, [])
    assert sweep_folder(tmp_path, "toy", sweep(name="s"), {"a": "1,2"}, []) == tmp_path / "sweeps" / "s"
    with pytest.raises(ConfigError, match=r"it differs in params; choose another sweep\.name"):
        sweep_folder(tmp_path, "toy", sweep(name="s"), {"a": "1,3"}, [])
    with pytest.raises(ConfigError, match="it differs in stages"):
        sweep_folder(tmp_path, "toy", sweep(name="s"), {"a": "1,2"}, [("data", "1b")])


@pytest.mark.parametrize("text", ["a: 1", "overrides: a=1", "overrides: [1]", "[", "- a"])
def test_another_file_than_a_best_yaml_is_refused(tmp_path, text):
    (tmp_path / "best.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"holds no list of overrides .*give the best\.yaml"):
        read_best(tmp_path / "best.yaml")


def test_reports_are_plotted_where_trials_are_pruned(tmp_path):
    pruner = {"_target_": "optuna.pruners.MedianPruner"}
    pruning = Pruning(pruner=pruner, stage="left", metric="loss", direction="minimize")
    settings = sweep(objectives={"best": maximize()}, sampler=RANDOM, num_trials=3, pruning=pruning)
    study, files = Study(settings, space_of(GRID), tmp_path), _files(tmp_path, settings)
    for state in ("complete", "pruned"):
        number, params = study.ask()
        for step in (1, 2):
            study.report(number, step, {"loss": 1.0})
        files.add(complete(number, params, best=1.0) if state == "complete" else ended(number, "pruned", params))
    page = _page(tmp_path)
    assert "<h2>left/loss (negated) by step</h2>" in page and '"y":[-1.0,-1.0]' in page
    assert [row["state"] for row in _csv(tmp_path)] == ["complete", "pruned"]

"""The folder of a sweep: its name, and what lies in it after every trial."""

import csv
import json
from pathlib import Path

import pytest
import yaml

from flows.declare.sweep import Pruning
from flows.sweep.by_step import thinned
from flows.sweep.dimension import dimensions
from flows.sweep.files import SweepFiles, read_best
from flows.sweep.folder import row_of, sweep_folder
from flows.sweep.plots import best_numbers, study_of
from flows.sweep.trial import Outcome, Trial
from lineage.errors import ConfigError
from lineage.store import Store
from tests.sweeps import RANDOM, complete, ended, manifest, maximize, minimize, sweep

GRID = {"a": "1,2,3", "b": "x"}


def _files(folder: Path, stated, params=GRID, words=("pipeline=toy", "sweep.name=s")) -> SweepFiles:
    folder.mkdir(parents=True, exist_ok=True)
    return SweepFiles(folder, stated, dimensions(params), words)


def _trial(number: int, **params: str) -> Trial:
    return Trial(number=number, params=params or {"a": str(number + 1), "b": "x"})


def _csv(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "trials.csv").open()))


def test_a_line_for_each_trial_that_ended(tmp_path):
    files = _files(tmp_path, sweep(objectives={"best": maximize()}))
    files.add(_trial(1), ended("failed", "out of memory, twice"))
    assert [row["number"] for row in _csv(tmp_path)] == ["1"]
    files.add(_trial(0), complete({"best": 0.5}, score=0.5, loss=float("nan")))
    done, failed = _csv(tmp_path)
    names = ["number", "state", "seconds", "a", "b", "best", "left/score", "cause"]
    assert list(done.items()) == list(zip(names, ["0", "complete", "2.0", "1", "x", "0.5", "0.5", ""], strict=True))
    cause = "out of memory, twice"
    assert list(failed.items()) == list(zip(names, ["1", "failed", "1.0", "2", "x", "", "", cause], strict=True))
    assert not list(tmp_path.glob("*.tmp"))


def test_a_continued_sweep_keeps_the_lines_of_what_it_reuses(tmp_path):
    stated = sweep(objectives={"best": maximize()})
    _files(tmp_path, stated).add(_trial(0), complete({"best": 0.5}, seconds=100.0, score=0.5))
    _files(tmp_path, stated).add(_trial(1), ended("failed"))
    with (tmp_path / "trials.jsonl").open("a") as file:
        file.write('{"number": 7, "par')  # cut by a kill
    again = _files(tmp_path, stated)
    again.add(_trial(0), complete({"best": 0.5}, seconds=100.0, score=0.5))
    again.add(_trial(1), complete({"best": 0.75}, score=0.75))
    assert [(row["state"], row["seconds"]) for row in _csv(tmp_path)] == [("complete", "100.0"), ("complete", "2.0")]


def test_best_yaml_reproduces_the_best_trial(tmp_path):
    stated = sweep(objectives={"best": maximize()}, fixed={"c": 3}, name="s")
    files = _files(tmp_path, stated, words=["--config-dir", "own", "pipeline=toy", "sweep=optuna"])
    files.add(_trial(0), complete({"best": 0.5}))
    files.add(_trial(1), complete({"best": 0.9}))
    files.add(_trial(2), ended("failed"))
    overrides, config_dir = read_best(tmp_path / "best.yaml")
    assert overrides == ["pipeline=toy", "c=3", "a=2", "b=x"]
    assert config_dir == Path("own").absolute()
    told = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert told["trial"] == 1 and told["values"] == {"best": 0.9}
    assert "best: trial 1: best=0.9  a=2 b=x" in files.lines()


def test_the_direction_says_what_is_best(tmp_path):
    files = _files(tmp_path, sweep(objectives={"best": minimize()}))
    for number, value in enumerate((0.5, 0.9)):
        files.add(_trial(number), complete({"best": value}))
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["trial"] == 0


def test_without_objectives_there_is_no_best_and_the_report_says_why(tmp_path):
    files = _files(tmp_path, sweep())
    files.add(_trial(0), complete())
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["trials.csv", "trials.jsonl"]
    assert "state sweep.objectives" in files.lines()[-1]


def test_where_no_trial_is_complete_there_is_no_best(tmp_path):
    files = _files(tmp_path, sweep(objectives={"best": maximize()}))
    files.add(_trial(0), ended("failed"))
    assert not (tmp_path / "best.yaml").exists()
    assert "no trial was complete" in files.lines()[-1]


def test_several_objectives_have_a_file_for_each_trial_of_the_front(tmp_path):
    files = _files(tmp_path, sweep(objectives={"score": maximize(), "loss": minimize()}))
    files.add(_trial(0), complete({"score": 0.5, "loss": 2.0}))
    assert (tmp_path / "best-0.yaml").exists()
    files.add(_trial(1), complete({"score": 0.6, "loss": 1.0}))
    files.add(_trial(2), complete({"score": 0.9, "loss": 3.0}))
    assert sorted(path.name for path in tmp_path.glob("best*")) == ["best-1.yaml", "best-2.yaml"]
    assert "Pareto front" in (tmp_path / "plots.html").read_text()
    assert [line.partition(":")[0] for line in files.lines()[:-1]] == ["front", "front"]


def test_the_front_holds_what_nothing_is_better_than_in_all(tmp_path):
    stated = sweep(objectives={"score": maximize(), "loss": minimize()})
    values = [(0.5, 2.0), (0.6, 1.0), (0.9, 3.0), (0.9, 2.5), (0.1, 1.0)]
    rows = [
        row_of(_trial(number, a="1", b="x"), complete({"score": score, "loss": loss}))
        for number, (score, loss) in enumerate(values)
    ]
    assert best_numbers(study_of(stated, dimensions(GRID), rows, tmp_path)) == [1, 3]


def _page(folder: Path) -> str:
    """What the page says, without plotly's own four megabytes."""
    head, _, body = (folder / "plots.html").read_text().partition("</head>")
    assert "Plotly.newPlot" not in head and "plotly.js v" in head
    return body


def test_the_page_needs_no_network_and_holds_optunas_plots(tmp_path):
    params = {"lr": "tag(log,interval(1e-6,1e-2))", "r": "int(interval(1,9))"}
    files = _files(tmp_path, sweep(objectives={"best": maximize()}, sampler=RANDOM, num_trials=9), params)
    for number in range(4):
        files.add(_trial(number, lr=f"1e-{number + 2}", r=str(number + 1)), complete({"best": number / 4}))
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
    params = {"stages.dpo.method.lr": "1e-5,1e-4,1e-3", "stages.dpo.method.adapter": "full,lora"}
    files = _files(tmp_path, sweep(objectives={"best": maximize()}), params)
    for number, (rate, adapter) in enumerate([("1e-5", "full"), ("1e-3", "lora"), ("1e-4", "lora")]):
        trial = _trial(number, **dict(zip(params, (rate, adapter), strict=True)))
        files.add(trial, complete({"best": number / 4}))
    page = _page(tmp_path)
    assert '"x":[0.00001,0.001,0.0001]' in page and '"x":["full","lora","lora"]' in page
    assert '"title":{"text":"lr"},"type":"log"' in page


def test_a_plot_without_enough_trials_is_left_out_with_a_sentence(tmp_path):
    _files(tmp_path, sweep(objectives={"best": maximize()})).add(_trial(0), complete({"best": 0.5}))
    page = _page(tmp_path)
    assert "best: importance of each parameter is left out: " in page
    assert "<h2>best: by trial</h2>" in page


def test_the_numbers_in_the_plots_are_those_of_the_trials(tmp_path):
    files = _files(tmp_path, sweep(objectives={"best": maximize()}))
    files.add(_trial(0), ended("failed"))
    files.add(_trial(2), complete({"best": 0.5}))
    assert '"x":[2]' in _page(tmp_path)


def _with_reports(store: Path, fingerprint: str, losses: list[float]) -> Outcome:
    path = Store(store).entry("left", fingerprint).metrics
    path.parent.mkdir(parents=True)
    lines = [
        json.dumps({"step": step, "time": 0, "metrics": {"loss": loss}}) for step, loss in enumerate(losses, start=1)
    ]
    path.write_text("\n".join(lines) + "\n")
    return Outcome(state="complete", manifests={"left": manifest(fingerprint=fingerprint)}, seconds=1.0)


def test_the_table_by_step_has_a_column_for_each_trial(tmp_path):
    folder = tmp_path / "sweeps" / "s"
    files = _files(folder, sweep(until="left", by_step="loss"), {"stages.left.method.lr": "0.1,0.2,0.3"})
    for number, (rate, losses) in enumerate([("0.1", [3.0, 2.5]), ("0.2", [3.0, 2.0, 1.5])]):
        trial = _trial(number, **{"stages.left.method.lr": rate})
        files.add(trial, _with_reports(tmp_path, str(number) * 64, losses))
    files.add(_trial(2, **{"stages.left.method.lr": "0.3"}), ended("failed"))
    assert (folder / "by-step.csv").read_text() == "step,lr=0.1,lr=0.2\n1,3,3\n2,2.5,2\n3,,1.5\n"
    table = (folder / "by-step.md").read_text()
    assert table.splitlines()[0] == "| step | lr=0.1 | lr=0.2 |"
    assert files.lines()[:5] == table.splitlines()


def test_a_long_table_is_thinned_to_its_last_step():
    table = [["step", "a"], *([str(step), "1"] for step in range(1, 46))]
    assert [row[0] for row in thinned(table)] == ["step", *map(str, range(3, 46, 3))]
    assert thinned(table[:21]) == table[:21]
    assert thinned(table[:1]) == table[:1]


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
    with pytest.raises(ConfigError, match=r'params=.*"1,2".*"1,3".*another sweep\.name'):
        sweep_folder(tmp_path, "toy", sweep(name="s"), {"a": "1,3"}, [])
    with pytest.raises(ConfigError, match="on other data or with other settings"):
        sweep_folder(tmp_path, "toy", sweep(name="s"), {"a": "1,2"}, [("data", "1b")])


@pytest.mark.parametrize("text", ["a: 1", "overrides: a=1", "overrides: [1]", "[", "- a"])
def test_another_file_than_a_best_yaml_is_refused(tmp_path, text):
    (tmp_path / "best.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"give the best\.yaml of a sweep"):
        read_best(tmp_path / "best.yaml")


def test_reports_are_plotted_where_trials_are_pruned(tmp_path):
    from flows.sweep.proposers import make_proposer

    pruner = {"_target_": "optuna.pruners.MedianPruner"}
    pruning = Pruning(pruner=pruner, stage="left", metric="loss", direction="minimize")
    stated = sweep(objectives={"best": maximize()}, sampler=RANDOM, num_trials=3, pruning=pruning)
    study, files = make_proposer(stated, dimensions(GRID), tmp_path), _files(tmp_path, stated)
    for state in ("complete", "pruned"):
        trial = study.ask()
        for step in (1, 2):
            study.report(trial, "left", step, {"loss": 1.0})
        files.add(trial, complete({"best": 1.0}) if state == "complete" else ended("pruned"))
    page = _page(tmp_path)
    assert "<h2>left/loss (negated) by step</h2>" in page and '"y":[-1.0,-1.0]' in page
    assert [row["state"] for row in _csv(tmp_path)] == ["complete", "pruned"]

"""``posttrain report``: what the record says of a model is on its page, and nothing of it is anything but text."""

import base64
import hashlib
import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from flows.reports.model import Report, compared, model_page, model_report
from flows.reports.sweep import write_pages
from flows.sweep.folder import TrialResult
from lineage.errors import ConfigError
from lineage.graph.index import Index
from lineage.record.metrics_file import BENCHMARKS_FILE, RECIPE_FILE
from tasks.data.images import IMAGES
from tasks.evaluate.row_scores import RowScores, write_scores
from tests.command import call
from tests.drawn_graphs import ATTACK, Page
from tests.reported import entry_of, reported
from tests.written_store import WrittenStore, node


def report_of(store: WrittenStore, ref: str):
    with Index(store.root) as index:
        return model_report(ref, index)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> WrittenStore:
    return reported(tmp_path_factory.mktemp("full") / "artifacts")


def sections(page: Page) -> list[str]:
    return [attributes["id"] or "" for tag, attributes in page.elements if tag == "section"]


def test_every_section_has_what_the_record_says(full):
    found = report_of(full, "p/dpo")
    assert found["about"] == (
        "Tunes a policy on preference pairs; its frozen start is the reference. "
        "Made from base by sft, then dpo, on 80 rows."
    )
    assert ("licences and consent", "cc-by-4.0") in found["facts"]
    assert [each["stage"] for each in found["curves"]] == ["dpo", "sft"]
    charts = {chart["title"]: chart["traces"] for chart in found["curves"][0]["charts"]}
    assert list(charts) == ["loss", "gradient norm", "accuracy", "rewards", "learning rate", "score: exact_match"]
    loss, validation = charts["loss"]
    assert (loss["step"][-1], loss["tokens"][-1], loss["values"][1]) == (40, 40_000.0, 1.0)
    assert loss["minutes"][-1] == pytest.approx(39 / 60, abs=0.01)
    assert validation["name"] == "val/loss" and validation["step"] == list(range(5, 41, 5))
    (scored,) = charts["score: exact_match"]  # by the process beside the training
    assert (scored["step"], scored["tokens"], scored["values"]) == ([0, 20, 40], [0.0, 20_000.0, 40_000.0], [0, 0.5, 1])
    (score,) = found["scores"]
    assert score["policies"] == ["base", "sft", "dpo"]
    rows = {row["metric"]: row for row in score["rows"]}
    assert [cell["value"] for cell in rows["exact_match"]["values"]] == [0.1, 0.5, 0.8]
    gain = rows["exact_match"]["gain"]
    assert gain["value"] == pytest.approx(0.3) and gain["low"] < 0.3 < gain["high"]
    assert found["gains"].startswith("Beside sft: ") and "exact match 0.5 to 0.8" in found["gains"], found["gains"]
    assert found["gains"] in Page(model_page([found])).words
    assert rows["text_perplexity"]["better"] == "↓"
    assert rows["lm_eval:arc"]["values"] == [
        None,
        None,
        {"value": 0.4, "low": 0.4 - 1.96 * 0.02, "high": 0.4 + 1.96 * 0.02},
    ]
    assert found["answers"]["policies"] == ["sft", "dpo"]
    assert found["answers"]["rows"][0] == {
        "prompt": "What is a list?", "right": "A type.", "sft": "sft says What is a list?",
        "dpo": "dpo says What is a list?",
    }  # fmt: skip
    row = [("user: What is a list?\n", False), ("A list.\nIt is mutable.", True), (" end", False)]
    pair = [("One.", True), ("\n", False), ("Two.", True)]
    assert [each["rows"] for each in found["samples"]] == [[row], [row, pair]]  # those that each of them was trained on
    assert found["samples"][1]["what"].startswith("of each pair the chosen answer, then the rejected one; ")
    assert found["verdicts"][0]["intervals"] == ["+0.3 [+0.1, +0.5], n=20"]
    cost = found["costs"][-1]
    assert (cost["memory"], cost["predicted_memory"], cost["predicted_seconds"]) == (2**30, 2**29, 12.0)
    assert cost["cost"] == pytest.approx(0.01) and cost["currency"] == "EUR"
    assert (found["costs"][0]["seconds"], cost["seconds"]) == (20.0, 10.0)  # all attempts of one; the last of a stage
    assert cost["predicted_cost"] == pytest.approx(12.0 / 3600 * 3.6)
    assert ("commit", f"{'c' * 40} with changes that are not committed") in found["versions"]
    assert [each["name"] for each in found["data"]] == ["chats", "corpus"]
    assert found["data"][0] == {
        "name": "chats", "kind": "conversations", "train_rows": 80, "held_out_rows": 10, "labels": ["cc-by-4.0"],
        "sources": ["chats: /data/chats.jsonl"],
    }  # fmt: skip


def test_a_diff_of_two_models_has_their_scores_beside_their_settings(full):
    done = call(["diff", "p/sft", "p/dpo", "store=artifacts"], full.root.parent, {})
    assert "evaluated:\n  exact match ↑: 0.5 -> 0.8\n" in done.stdout, done.stdout
    done = call(["diff", "p/sft", "p/dpo", "store=artifacts", "--json"], full.root.parent, {})
    assert json.loads(done.stdout)["scores"]["exact_match"] == [0.5, 0.8]


def test_scores_beside_the_training_stand_beside_those_of_its_start(full):
    (_, found) = report_of(full, "p/sft")["scores"]
    assert (found["stage"], found["policies"]) == ("beside the training", ["base", "sft"])
    ((name, before, after),) = [(row["metric"], *row["values"]) for row in found["rows"]]
    assert (name, before) == ("f1", {"value": 0.25})
    assert after == {"value": 0.5, "low": pytest.approx(0.304), "high": pytest.approx(0.696)}


def test_a_reward_model_has_its_accuracy_with_an_interval_and_by_kind(tmp_path):
    store = WrittenStore(tmp_path / "artifacts")
    base = store.stage("base", {})
    reward = store.stage("reward", {"policy": base}, produces="reward_model")
    metrics = {"base/reward_score": 0.1, "reward_model/accuracy": 0.75, "reward_model/accuracy/added": 1.0}
    made = store.stage("evaluate", {"reference": base, "base": base, "reward_model": reward}, metrics=metrics)
    ids, right = [str(row) for row in range(20)], [float(row < 15) for row in range(20)]
    scores = RowScores(metric="accuracy", row_ids=ids, groups=ids, weights=[1.0] * 20, scores={"reward_model": right})
    write_scores(entry_of(store, made).output, [scores], {"base": base.fingerprint})
    (found,) = report_of(store, node(reward))["scores"]
    assert found["policies"] == ["reward_model"]
    whole, added = found["rows"]
    assert (whole["metric"], added["metric"], added["values"]) == ("accuracy", "accuracy/added", [{"value": 1.0}])
    assert whole["values"][0]["value"] == 0.75 and whole["values"][0]["low"] < 0.75 < whole["values"][0]["high"]


def test_what_has_no_score_is_on_the_page_with_its_reason(tmp_path):
    store, why = WrittenStore(tmp_path / "artifacts"), "its process ended by SIGKILL"
    base = store.stage("base", {})
    for metrics in ({}, {"evaluation/base/f1": 0.25}):
        sft = store.stage("sft", {"policy": base}, metrics=metrics, failed_scores={"step 4": why})
        found = report_of(store, node(sft))
        (scores,) = found["scores"]
        assert scores["failed"] == [("step 4", why)] and len(scores["rows"]) == len(metrics)
        page = Page(model_page([found]))
        overrides = [word.strip() for word in page.words if word.strip()]
        assert overrides[overrides.index("no score") :][1:3] == ["step 4", why] and ("metric" in overrides) == bool(
            metrics
        )


def test_a_value_has_its_origin(full, tmp_path):
    found = {name: origin for name, _, origin in report_of(full, "p/dpo")["recipe"]}
    assert found == {
        "learning_rate": "pipeline p",
        "beta": "default",
        "max_length": "pipeline p",
        "schedule.name": "default",
    }
    store = reported(tmp_path / "artifacts")
    dpo = next(manifest for name, each in _entries(store) if (manifest := each.manifest()) and name == "dpo")
    from flows.progress.run_record import RunRecord, StageRecord
    from lineage.filesystem.owner import Owner

    stage = StageRecord(state="done", since=1.0, directory=str(entry_of(store, dpo).path))
    overrides = ["stages.dpo.method.learning_rate=0.1", "schedule=cosine"]
    (store.root / "runs").mkdir()
    record = RunRecord(
        id="1", pipeline="p", cli_args=overrides, driver=Owner.here(), started=1.0, stages={"dpo": stage}
    )
    record.write(store.root)
    found = {name: origin for name, _, origin in report_of(store, "p/dpo")["recipe"]}
    assert (found["learning_rate"], found["schedule.name"]) == ("command line", "command line: schedule=cosine")
    origins = {
        "stages.dpo.method.learning_rate": "posttrain.yaml",
        "stages.dpo.method.max_length": "conf/stage/dpo.yaml",
    }
    replace(record, origins=origins | {"stages.sft.method.beta": "other.yaml"}).write(store.root)
    found = {name: origin for name, _, origin in report_of(store, "p/dpo")["recipe"]}
    assert found == {
        "learning_rate": "posttrain.yaml", "beta": "default", "max_length": "conf/stage/dpo.yaml",
        "schedule.name": "command line: schedule=cosine",
    }  # fmt: skip


def _entries(store: WrittenStore):
    from lineage.store import Store

    return Store(store.root).entries()


def test_a_trial_of_a_sweep_has_a_page(full, tmp_path):
    made = {manifest.stage: manifest.fingerprint for _, each in _entries(full) if (manifest := each.manifest())}
    folder = full.root / "sweeps" / "rates"
    folder.mkdir(parents=True)
    stages = {name: made[name] for name in ("chats", "sft", "dpo")}
    trials = [TrialResult(number=1, params={}, state="complete", fingerprints=stages)]
    trials.append(TrialResult(number=2, params={}, state="failed"))
    (folder / "trials.jsonl").write_text("".join(json.dumps(asdict(each)) + "\n" for each in trials))
    files = SimpleNamespace(folder=folder, best=lambda: {folder / "best.yaml": {"trial": 1}})
    plan = SimpleNamespace(pipeline=SimpleNamespace(store=full.root))
    write_pages(SimpleNamespace(plan=plan), files)  # type: ignore[arg-type]
    model = f"dpo@{made['dpo'][:16]}"
    assert f"<title>{model}</title>" in (folder / "best.html").read_text()
    done = [call(["report", f"rates/{number}", f"store={full.root}", "--json"], tmp_path, {}) for number in (1, 2)]
    assert json.loads(done[0].stdout)["id"] == model and done[1].returncode == 2


def test_the_page_has_every_section_and_one_without_content_is_left_out(full, tmp_path):
    page = Page(model_page([report_of(full, "p/dpo")]))
    after = ["curves", "findings", "lineage", "data", "recipe", "costs", "versions"]
    assert sections(page) == ["scores", "facts", "verdicts", "answers", *after]
    assert page.count("class", "chart") == 6 + 3
    store = WrittenStore(tmp_path / "artifacts")
    base = store.stage("base", {})
    bare = Page(model_page([report_of(store, node(base))]))
    assert sections(bare) == ["facts", "lineage", "versions"]
    assert "script" not in bare.tags()


def test_the_model_stands_first_among_scores_then_its_gain_and_its_ancestors(full):
    page = Page(model_page([report_of(full, "p/dpo")]))
    overrides = [word.strip() for word in page.words if word.strip()]
    at = overrides.index("metric")
    assert overrides[at : at + 5] == ["metric", "dpo", "gain over sft", "sft", "base"]
    row = overrides[overrides.index("exact match ↑") :]
    assert row[1:8:2] == ["0.8", "+0.3", "0.5", "0.1"]


def test_what_no_training_has_has_no_column(full, tmp_path):
    store = WrittenStore(tmp_path / "artifacts")
    plain = Page(model_page([report_of(store, node(store.stage("sft", {}, metrics={"num_tokens": 5.0})))]))
    whole = Page(model_page([report_of(full, "p/dpo")]))
    assert {"time", "GPU-hours", "cost, EUR", "0.01", "1.00 GiB", "0.50 GiB", "0:12"} <= set(whole.words)
    assert "time" in plain.words and not {"GPU-hours", "peak memory", "kWh"} & set(plain.words)


def test_an_answer_of_blanks_is_reported_to_be_nothing(tmp_path):
    page = Page(model_page([report_of(reported(tmp_path / "artifacts", "\n \n"), "p/dpo")]))
    assert "dpo says" in page.words  # without the blanks around it
    assert not [word for word in page.words if word.startswith("dpo says") and word != word.strip()]


def test_a_page_loads_nothing_and_runs_only_its_scripts(full):
    page = Page(model_page([report_of(full, "p/dpo")]))
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags())
    (policy,) = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    data, *scripts = page.raw["script"]
    assert [chart["title"] for chart in json.loads(data)["charts"]][:2] == ["loss", "gradient norm"]
    for code in scripts:
        assert base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() in policy


def test_hostile_text_makes_no_element(full, tmp_path):
    harmless = Page(model_page([report_of(full, "p/dpo")]))
    attacked = Page(model_page([report_of(reported(tmp_path / "artifacts", ATTACK), "p/dpo")]))
    assert attacked.tags() == harmless.tags()
    assert sum(ATTACK in word for word in attacked.words) >= 3


def test_two_models_stand_beside_each_other(full, tmp_path):
    done = call(
        ["report", "--compare", "p/sft", "p/dpo", "store=artifacts", "--html", "two.html"], full.root.parent, {}
    )
    assert done.returncode == 0, done.stderr
    page = Page((full.root.parent / "two.html").read_text())
    assert {"differences", "recipe", "curves", "scores", "answers"} <= set(sections(page))
    traces = [trace["name"] for chart in json.loads(page.raw["script"][0])["charts"] for trace in chart["traces"]]
    assert traces[:4] == ["A loss", "A val/loss", "B loss", "B val/loss"]
    assert "A: sft" in page.words and "sft says What is a list?" in page.words


def test_the_settings_of_a_benchmark_beside_the_training_tell_two_scores_apart(tmp_path):
    reports, name = list[Report](), "lm_eval/arc"
    for side, chat_template in (("a", False), ("b", True)):
        store = WrittenStore(tmp_path / side)
        metrics = {"steps": 6.0, f"evaluation/{name}/acc": 0.5, f"evaluation/base/{name}/acc": 0.4}
        sft = store.stage("sft", {"policy": store.stage("base", {})}, metrics=metrics)
        folder = entry_of(store, sft).path / "evaluation" / "step-6"
        folder.mkdir(parents=True)
        (folder / BENCHMARKS_FILE).write_text(json.dumps({name: {"num_fewshot": 0, "chat_template": chat_template}}))
        reports.append(report_of(store, node(sft)))
        (folder / RECIPE_FILE).write_text(json.dumps({"method": "Evaluate", "version": 3, "max_new_tokens": 8}))
        (scores,) = report_of(store, node(sft))["scores"]
        assert scores["protocol"][0] == ("max_new_tokens", "8")
        assert (f"{name}.chat_template", str(chat_template)) in scores["protocol"]
    for other, how in ((reports[1], ", on other rows or other settings"), (reports[0], "")):
        (found,) = compared([reports[0], other])[0]
        assert [row["metric"] for row in found["rows"]] == [f"{name}/acc{how}"]


@pytest.mark.parametrize("change", ["rows", "settings", "reference"])
def test_two_scores_that_were_measured_otherwise_are_marked(full, change):
    first, second = report_of(full, "p/sft"), report_of(full, "p/dpo")
    if change == "reference":
        for each, reference in ((first, "sft@1"), (second, "cpt@2")):
            scores = each["scores"][0]
            scores["protocol"] = [*scores["protocol"], ("reference", reference)]
            scores["rows"] = [dict(scores["rows"][0], metric=name) for name in ("answer_perplexity", "win_rate")]
        marked = [row["metric"] for row in compared([first, second])[0][0]["rows"]]
        assert marked == ["answer_perplexity", "win_rate, on other rows or other settings"]
        return
    names = [row["metric"] for row in compared([first, second])[0][0]["rows"]]
    scores = second["scores"][0]
    if change == "rows":
        scores["rows"][0]["rows"] = "of others"
    else:
        scores["protocol"] = [*scores["protocol"], ("max_new_tokens", "8")]
    marked = [row["metric"] for row in compared([first, second])[0][0]["rows"]]
    how = ", on other rows or other settings"
    assert marked == [f"{name}{how}" if change == "settings" or not at else name for at, name in enumerate(names)]


@pytest.mark.parametrize(
    ("overrides", "output"),
    [
        (("p/chats",), "is conversations; a model (checkpoint or reward_model) is accepted"),
        (("source:chats",), "is a source or deleted"),
        (("p/none",), "p/none: no such artifact"),
        ((), "no REF is given"),
        (
            ("--compare", "p/sft", "p/dpo", "--compare", "p/sft", "p/dpo"),
            "4 REFs are given (p/sft, p/dpo, p/sft, p/dpo)",
        ),
        (("--compare", "p/sft", "p/dpo", "--card"), "a card is of one model"),
        (("p/dpo", "--repo", "owner/name"), "--repo owner/name: names the model in its card alone; add --card"),
    ],
)
def test_what_names_no_model_is_refused(full, overrides, output):
    done = call(["report", *overrides, "store=artifacts"], full.root.parent, {})
    assert done.returncode == 2 and output in done.stderr, done.stderr


def test_json_is_what_the_page_shows(full):
    done = call(["report", "p/dpo", "store=artifacts", "--json"], full.root.parent, {})
    found = json.loads(done.stdout)
    assert found["id"].startswith("dpo@") and found["scores"][0]["policies"] == ["base", "sft", "dpo"]
    with pytest.raises(ConfigError):
        report_of(full, "p/evaluate")


def test_a_gap_between_attempts_does_not_count_as_minutes(tmp_path: Path):
    from lineage.record.attempts import FILE

    store = WrittenStore(tmp_path / "artifacts")
    made = store.stage("sft", {})
    entry = entry_of(store, made)
    attempt = {"host": "h", "pid": 1, "step": 0, "code_digest": "c"}
    times = [(1, 60.0), (2, 120.0), (3, 100_060.0)]
    (entry.path / FILE).write_text("".join(json.dumps({**attempt, "time": at}) + "\n" for at in (0.0, 100_000.0)))
    lines = [json.dumps({"step": step, "time": at, "metrics": {"loss": 1.0}}) + "\n" for step, at in times]
    entry.metrics.write_text("".join(lines))
    (trace,) = report_of(store, node(made))["curves"][0]["charts"][0]["traces"]
    assert trace["minutes"] == [1.0, 2.0, 3.0]


def test_an_image_is_beside_the_answers_and_one_that_is_gone_is_named(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (600, 300), "red").save(file, "BMP")
    store = reported(tmp_path / "artifacts", image=file.getvalue())
    html = model_page([report_of(store, "p/dpo")])
    (url,) = re.findall(r'<img alt="image" src="data:image/png;base64,([^"]+)">What is a list\?', html)
    with Image.open(io.BytesIO(base64.b64decode(url))) as shown:
        assert shown.size == (256, 128) and shown.getpixel((9, 9)) == (255, 0, 0)
    next(store.root.glob(f"chats/*/output/{IMAGES}")).unlink()
    assert "[image]What is a list?" in model_page([report_of(store, "p/dpo")])

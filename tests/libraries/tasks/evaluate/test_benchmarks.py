"""lm-eval's tasks in local files: stubs that are right and wrong, a tiny model, and what is refused."""

import json
import math
import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.evaluate import Evaluate, benchmarks
from tasks.evaluate.benchmarks import (
    Measurement,
    load_benchmarks,
    measure,
    small_without_rows,
    stub_scores,
    write_settings,
)
from tasks.evaluate.scoring import Batches
from tasks.method import Adapter, Input
from tasks.model.fetch_model import PARTS_FILE
from tasks.reward_functions.metric import Metric

pytest.importorskip("lm_eval")

CHOICE = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""
WRITTEN = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""
TEXT = """
task: pages
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
metadata: {version: 1.0}
"""

INPUTS = CHOICE.replace("{{question}}", "{{answer}}").replace(
    "doc_to_target: answer", "doc_to_target: of it"
)  # WinoGrande
SEVERAL = CHOICE.replace("doc_to_target: answer", 'doc_to_target: "{{[answer, (answer + 1) % 3]}}"')
SPELLED = WRITTEN.replace('doc_to_target: "{{choices[answer]}}"', "doc_to_target: answer\ndoc_to_choice: '{{choices}}'")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def local(folder: Path, content: str = CHOICE, count: int = 6, **options: object) -> Metric:
    folder.mkdir(exist_ok=True, parents=True)
    rows = [
        {"question": f"colour of {index}?", "choices": ["red", "green", "blue"], "answer": index % 3}
        for index in range(count)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "task.yaml").write_text(content)
    return Metric(function=f"lm_eval:{folder / 'task.yaml'}", **options)


@pytest.mark.parametrize(
    ("content", "metric", "right", "wrong"),
    [
        (CHOICE, "acc", 1, 0),
        (INPUTS, "acc", 1, 0),
        (SEVERAL, "acc", 1, 0),
        (CHOICE.replace("metric: acc", "metric: acc_mutual_info"), "acc_mutual_info", 1, 0),
        (SPELLED, "exact_match", 1, 0),
        (WRITTEN, "exact_match", 1, 0),
        (TEXT, "word_perplexity", 1, pytest.approx(math.exp(100 / 3))),
    ],
)
def test_a_known_right_and_a_known_wrong_model(tmp_path, content, metric, right, wrong):
    (benchmark,) = load_benchmarks([local(tmp_path, content)])
    (scores,) = stub_scores(benchmark)
    assert scores.metric == f"lm_eval/task/{metric}" and len(scores.row_ids) == 6
    assert (scores.value("right"), scores.value("wrong")) == (right, wrong)
    assert scores.lower_is_better == (content == TEXT) and scores.is_bounded == (content != TEXT)


@pytest.mark.slow
def test_a_model_is_measured_per_row_as_by_hand_and_options_change_it(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.tiny import write_policy

    place = write_policy(tmp_path / "model", seed=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    (benchmark,) = load_benchmarks([local(tmp_path / "a", name="colours")])
    found = measure(benchmark, "sft", model, tokenizer, Batches(rows=4))
    (scores,) = found.scores
    assert scores.metric == "colours/acc" and not found.failed

    def logp(question: str, choice: str) -> float:
        before = tokenizer(question, add_special_tokens=False)["input_ids"]
        whole = tokenizer(f"{question} {choice}", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logps = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(float(logps[at - 1, whole[at]]) for at in range(len(before), len(whole)))

    by_hand = []
    for index in range(6):
        each = [logp(f"colour of {index}?", choice) for choice in ("red", "green", "blue")]
        by_hand.append(float(each.index(max(each)) == index % 3))
    assert list(scores.scores["sft"]) == by_hand
    assert benchmark.settings()["colours"]["chat_template"] is False
    fewer, shots, chat = (
        load_benchmarks([replace(benchmark.metric, **change)])[0]
        for change in ({"limit": 2}, {"num_fewshot": 1}, {"chat_template": True})
    )
    assert len(measure(fewer, "sft", model, tokenizer, Batches(rows=4)).scores[0].row_ids) == 2
    seen = []
    for each in (benchmark, shots, chat):
        asked: list[str] = []
        keep(each, asked, model, tokenizer)
        seen.append(asked[0])
    assert len(set(seen)) == 3 and seen[1].count("colour of") == 2
    assert shots.settings()["colours"]["num_fewshot"] == 1


def measure_as(rank: int, folder: Path, model: Path) -> None:
    """Measures as one of two workers; the first writes what it has."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    (benchmark,) = load_benchmarks([Metric(function=f"lm_eval:{folder / 'task.yaml'}")])
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    found = measure(benchmark, "sft", loaded, tokenizer, Batches(rows=4, rank=rank, world_size=2))
    assert bool(found.scores) == (rank == 0)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found.to_json()))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_workers_divide_the_rows_of_a_benchmark_and_give_what_one_gives(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.tiny import write_policy

    place = write_policy(tmp_path / "model", seed=1)
    (benchmark,) = load_benchmarks([local(tmp_path / "task", count=7)])
    workers = [
        multiprocessing.get_context("spawn").Process(target=measure_as, args=(rank, tmp_path / "task", place))
        for rank in range(2)
    ]
    for each in workers:
        each.start()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    alone = measure(benchmark, "sft", model, tokenizer, Batches(rows=4))
    for each in workers:
        each.join()
    assert [each.exitcode for each in workers] == [0, 0] and len(alone.scores[0].row_ids) == 7
    assert json.loads((tmp_path / "task" / "found.json").read_text()) == json.loads(json.dumps(alone.to_json()))


@pytest.mark.slow
def test_an_adapter_is_measured_on_its_base_as_lm_eval_does_with_peft_and_as_the_merged_model(tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tasks.train.models.load import load_model
    from tests import training

    root = training.write_inputs(tmp_path / "inputs")
    adapter = Adapter(rank=4, alpha=64)
    stage = training.method("sft", num_steps=6, learning_rate=0.05, adapter=adapter, save="adapter")
    output = training.train(stage, root, tmp_path / "output").output
    assert not list(output.glob("model*.safetensors"))
    parts = Path(shutil.copytree(root / "policy", tmp_path / "parts", ignore=shutil.ignore_patterns("*.safetensors")))
    (parts / PARTS_FILE).write_text(json.dumps({"weights": str(root / "policy"), "adapter": str(output)}))
    model = Input(name="sft", kind=Kind.CHECKPOINT, fingerprint="a", path=parts)
    tokenizer = AutoTokenizer.from_pretrained(output)
    (benchmark,) = load_benchmarks([local(tmp_path / "task", count=30, name="colours")])
    (own,) = measure(benchmark, "sft", load_model(model), tokenizer, Batches(rows=4)).scores
    options = {"tasks": [*benchmark.tasks.values()], "task_manager": TaskManager(include_defaults=False)}
    place = str(root / "policy")
    beside = HFLM(pretrained=place, peft=str(output), tokenizer=str(output), batch_size=4, device="cpu")
    assert isinstance(beside.model, PeftModel)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place), output).merge_and_unload()
    base = AutoModelForCausalLM.from_pretrained(place)
    theirs = [
        simple_evaluate(model=each, log_samples=True, **options)["samples"]["colours"]
        for each in (beside, *(HFLM(pretrained=each, tokenizer=tokenizer, batch_size=4) for each in (merged, base)))
    ]
    by_peft, by_merged, by_base = ([each["acc"] for each in sorted(of, key=lambda row: row["doc_id"])] for of in theirs)
    assert list(own.scores["sft"]) == by_peft == by_merged != by_base


def test_a_metric_without_rows_keeps_its_value_and_says_which_values_are_good(tmp_path):
    (benchmark,) = load_benchmarks([local(tmp_path, TEXT.replace("word_perplexity", "bits_per_byte"))])
    found = measured(benchmark)
    assert found.values == {"sft/lm_eval/task/bits_per_byte": pytest.approx(100 / 12 / math.log(2))}
    assert found.small_is_good == ["lm_eval/task/bits_per_byte"] and not found.scores and not found.failed
    write_settings(tmp_path, [benchmark], Batches(), "fp32", found.small_is_good)
    assert small_without_rows(tmp_path) == ["lm_eval/task/bits_per_byte"]
    assert (
        Measurement.from_json(json.loads(json.dumps(found.named("b").to_json()))).small_is_good == found.small_is_good
    )
    not_finite = measured(benchmark, math.nan)
    assert not not_finite.values and "lm-eval gives nan" in not_finite.failed["sft/lm_eval/task/bits_per_byte"]


def measured(benchmark, logp: float = -100.0) -> Measurement:
    """What a model gets that gives this log-probability to every text."""
    from lm_eval.api.model import LM

    class Constant(LM):
        def loglikelihood_rolling(self, requests):
            return [logp for _ in requests]

        loglikelihood = generate_until = loglikelihood_rolling

    with benchmarks._quiet():
        return benchmarks._measured(benchmark, "sft", Constant())


def keep(benchmark, asked: list[str], model, tokenizer) -> None:
    """Runs a benchmark and keeps what the model was asked."""
    from lm_eval.models.huggingface import HFLM

    inner = HFLM.loglikelihood

    def noted(self, requests, **options):
        asked.extend(each.args[0] for each in requests)
        return inner(self, requests, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFLM, "loglikelihood", noted)
        measure(benchmark, "sft", model, tokenizer, Batches(rows=4))


def test_identity_is_of_the_files_content_and_not_of_their_place(tmp_path):
    one, same = local(tmp_path / "a"), local(tmp_path / "b")
    assert one.identity() == same.identity()
    assert local(tmp_path / "c", count=7).identity() != one.identity()
    assert local(tmp_path / "d", CHOICE.replace("question", "question ")).identity() != one.identity()
    assert replace(one, limit=3).identity() != one.identity() == replace(one, batch_size=3).identity()
    assert Evaluate(metrics=(one,)).recipe() == Evaluate(metrics=(same,)).recipe()
    assert Evaluate(metrics=("lm_eval:arc_easy",)).recipe()["metrics"] == {
        "lm_eval/arc_easy": {"function": "lm_eval:arc_easy"}
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("task: [", "is not YAML"), ("group: a", "a task of lm-eval in one file"),
        (CHOICE.replace("rows.jsonl", "gone.jsonl"), "there is no file .*gone.jsonl"),
        (CHOICE + "process_docs: !function code.process\n", "set allow_code=true"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_task_is_refused_by_the_plan(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        Evaluate(metrics=(local(tmp_path, content),))


def test_a_benchmark_that_is_not_reached_is_named_before_any_model_is_loaded(tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    with pytest.raises(ConfigError, match="there is no such file"):
        Evaluate(metrics=(f"lm_eval:{tmp_path}/gone.yaml",))
    # The index of the tasks that come with lm-eval takes it ten seconds.
    monkeypatch.setattr(TaskManager, "__init__", lambda self: None)
    monkeypatch.setattr(TaskManager, "load", lambda self, tasks: {"tasks": {}}[tasks[0]])
    with pytest.raises(DataError, match=r"metrics.lm_eval/no_such_task: lm-eval could not load the task"):
        load_benchmarks([Metric(function="lm_eval:no_such_task")])

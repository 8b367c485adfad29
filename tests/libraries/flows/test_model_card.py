"""The card and the program of a model: huggingface_hub reads the one back, and the other runs as it is printed."""

import io
import math
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, metadata_eval_result

from flows.reports.model import model_report
from flows.serving.export import model_card
from lineage.graph.index import Index
from tasks.model.adapter_files import Base
from tests import tiny
from tests.command import call
from tests.integration.test_composite_models import write_composite
from tests.model_directories import write_adapter
from tests.reported import entry_of, reported
from tests.written_store import WrittenStore, node


def report_of(store: WrittenStore, ref: str):
    with Index(store.root) as index:
        return model_report(ref, index)


def printed(program: str) -> str:
    message = io.StringIO()
    with redirect_stdout(message):
        exec(program, {})
    return message.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> WrittenStore:
    return WrittenStore(tmp_path / "artifacts")


def model(store: WrittenStore, name: str, inputs: dict, write, **fields: object):
    """An artifact whose output ``write`` fills."""
    made = store.stage(name, inputs, **fields)
    write(entry_of(store, made).output)
    return store.stage(name, inputs, **fields)


@pytest.mark.parametrize("template", [tiny.CHATML, None], ids=["chat", "text"])
def test_the_program_of_a_whole_model_runs_as_it_is_printed(store, template):
    made = model(store, "sft", {}, lambda place: tiny.write_policy(place, chat_template=template))
    use = report_of(store, node(made))["use"]
    assert ("apply_chat_template" in use["snippet"]) is bool(template)
    assert printed(use["snippet"]).endswith("\n")
    facts = dict(use["facts"])
    assert facts["sampling"] == "greedy" and facts["architecture"] == "LlamaForCausalLM"
    assert facts["stop tokens"] == "<|im_end|> (2)"


@pytest.mark.parametrize("rounding", [None, {"format": "nf4"}], ids=["full", "nf4"])
def test_the_program_of_an_adapter_loads_its_base_first(store, rounding):
    import torch
    from transformers import AutoModelForCausalLM

    base = model(store, "base", {}, lambda place: tiny.write_policy(place, initializer_range=0.3))
    place = entry_of(store, base).output

    def write(output: Path) -> None:
        write_adapter(output, place)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(place / name, output / name)
        found = Base(name="base", fingerprint=base.fingerprint, digest=base.output_digest, rounding=rounding)
        found.write(output)

    made = model(store, "sft", {"policy": base}, write)
    use = report_of(store, node(made))["use"]
    program, message = use["snippet"], dict(use["facts"]).get("exactly", "")
    assert ("posttrain export merged" in message) is bool(rounding)
    assert str(place) in program and "PeftModel" in program
    names: dict[str, object] = {}
    with redirect_stdout(io.StringIO()):
        exec(program, names)
    ids, plain = torch.arange(3, 9)[None], AutoModelForCausalLM.from_pretrained(place)
    assert not torch.equal(names["model"](ids).logits, plain(ids).logits)


def test_the_program_of_an_adapter_without_its_base_is_left_out(store):
    def write(output: Path) -> None:
        (output / "config.json").write_text("{}")
        Base(name="base", fingerprint="f" * 64).write(output)

    assert "use" not in report_of(store, node(model(store, "sft", {}, write)))


def test_the_program_of_a_model_that_reads_images_loads_all_of_it(store):
    made = model(store, "sft", {}, lambda place: write_composite(place, "mistral3"))
    found = report_of(store, node(made))
    assert found["use"]["auto"] == "AutoModelForImageTextToText"
    assert printed(found["use"]["snippet"]).endswith("\n")
    assert ModelCard(model_card(found, "us/chat")).data.pipeline_tag == "image-text-to-text"


def test_the_program_of_a_model_with_code_of_its_own_lets_it_run(store):
    source = store.source("base", kind="checkpoint", revision="r" * 40, reading={"trust_remote_code": True})
    made = model(store, "sft", {"policy": source}, lambda place: tiny.write_policy(place))
    assert report_of(store, node(made))["use"]["snippet"].count("trust_remote_code=True") == 2


def test_the_program_of_a_reward_model_prints_a_score(store):
    from transformers import AutoModelForSequenceClassification

    def write(output: Path) -> None:
        tiny.write_policy(output)
        judge = AutoModelForSequenceClassification.from_pretrained(output, num_labels=1)
        judge.config.pad_token_id = 0
        judge.save_pretrained(output)

    made = model(store, "reward", {}, write, produces="reward_model")
    assert math.isfinite(float(printed(report_of(store, node(made))["use"]["snippet"])))


def test_huggingface_hub_reads_the_card_back(tmp_path):
    reported(tmp_path / "artifacts")
    done = call(["report", "p/dpo", "store=artifacts", "--card", "--repo", "us/chat"], tmp_path, {})
    assert done.returncode == 0, done.stderr
    (tmp_path / "README.md").write_text(done.stdout)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.tags == ["posttrain"] and card.data.model_name == "chat"
    results = {each.metric_type: each for each in card.data.eval_results}
    assert results["exact_match"].metric_value == pytest.approx(0.8)
    one = results["exact_match"]
    assert one.dataset_name == "held-out rows (evaluate)"
    again = metadata_eval_result(
        model_pretty_name="chat", task_pretty_name="text", task_id=one.task_type, metrics_pretty_name=one.metric_name,
        metrics_id=one.metric_type, metrics_value=one.metric_value, dataset_pretty_name=one.dataset_name,
        dataset_id=one.dataset_type,
    )  # fmt: skip
    assert again["model-index"][0]["name"] == "chat"
    for shown in (
        "# chat",
        "Made from base by sft, then dpo",
        '"us/chat"',
        "0.8 [",
        "learning_rate",
        "cc-by-4.0",
        "pass",
    ):
        assert shown in card.text, shown
    assert str(tmp_path) not in card.text and "/data/" not in card.text


def test_scores_of_other_rows_are_results_of_other_data_sets(tmp_path):
    report = report_of(reported(tmp_path / "artifacts"), "p/sft")
    rows = report["scores"][0]["rows"]
    rows.append({**rows[0], "metric": "lm_eval/arc/acc"})
    found = {
        (each.dataset_name, each.metric_type) for each in ModelCard(model_card(report, "us/chat")).data.eval_results
    }
    expected = {("held-out rows (evaluate)", "exact_match"), ("arc", "lm_eval/arc/acc")}
    assert found >= {*expected, ("held-out rows (beside the training)", "f1")}


def test_a_model_of_no_store_has_a_card_that_says_how_it_is_loaded():
    card = ModelCard(model_card(None, "us/chat", "A note."))
    assert card.data.pipeline_tag == "text-generation" and "A note." in card.text and '"us/chat"' in card.text

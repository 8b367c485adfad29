"""``posttrain chat``: the tokens are those of transformers with the model's template, and conversations go on."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lineage.store import Store
from tasks.model.adapter_files import Base
from tests import tiny
from tests.command import call
from tests.model_directories import edit, write_adapter
from tests.written_store import WrittenStore

N = 12  # new tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models whose answers differ."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("left", "right")):
        tiny.write_policy(folder / name, seed=seed, initializer_range=0.5)
    return folder


def chat(folder: Path, *overrides: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        return call(["chat", *overrides], folder, {})


def message(folder: Path, *overrides: str, stdin: str | None = None) -> list[list[str]]:
    """The answers of each turn."""
    ran = chat(folder, *overrides, "--json", "--max-new-tokens", str(N), stdin=stdin)
    assert ran.returncode == 0, ran.stderr
    return [[each["text"] for each in turn["answers"]] for turn in json.loads(ran.stdout)["turns"]]


def expected(directory: Path, *messages: str, system: str | None = None, model=None) -> str:
    """What plain transformers answers, greedily."""
    model, tokenizer = (
        model or AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    roles = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(messages)]
    roles = [{"role": "system", "content": system}, *roles] if system else roles
    inputs = tokenizer.apply_chat_template(roles, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    found = model.generate(**inputs, max_new_tokens=N, do_sample=False)
    return tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_an_answer_is_that_of_transformers_with_the_models_template(models):
    for overrides, system in (((), None), (("--system", "sort the list"), "sort the list")):
        reported = chat(models, "left", "--once", "the list", "--max-new-tokens", str(N), *overrides)
        assert reported.stdout == expected(models / "left", "the list", system=system) + "\n", reported.stderr
    assert chat(models, "left", "--once", "-", "--max-new-tokens", str(N), stdin="the list\n").stdout == (
        expected(models / "left", "the list") + "\n"
    )


def test_each_line_of_a_script_continues_the_conversation_until_it_is_cleared(models):
    first = expected(models / "left", "the list")
    second = expected(models / "left", "the list", first, "in order")
    assert second != expected(models / "left", "in order")
    script = "the list\nin order\n/clear\nin order\n"
    assert message(models, "left", stdin=script) == [[first], [second], [expected(models / "left", "in order")]]


def test_two_models_answer_side_by_side_each_in_its_own_conversation(models):
    alone = [message(models, name, stdin="the list\nin order\n") for name in ("left", "right")]
    assert message(models, "left", "right", stdin="the list\nin order\n") == [
        [left, right] for (left,), (right,) in zip(*alone, strict=True)
    ]
    shown = chat(models, "left", "right", "--once", "the list", "--max-new-tokens", str(N)).stdout
    assert shown == f"left: {alone[0][0][0]}\nright: {alone[1][0][0]}\n"


def test_an_answer_ends_where_the_template_ends_a_turn_though_no_config_says_so(models, tmp_path):
    """The model's fourth token is the one that ends a turn."""
    shutil.copytree(models / "left", tmp_path / "model")
    tokenizer, model = (each.from_pretrained(models / "left") for each in (AutoTokenizer, AutoModelForCausalLM))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the list"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    end, last = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokens[-1]
    assert last not in tokens[:-1] and end not in tokens
    weights = model.lm_head.weight.detach().clone()
    weights[[end, last]] = weights[[last, end]]
    model.config.tie_word_embeddings, model.lm_head.weight = False, torch.nn.Parameter(weights)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    edit(tmp_path / "model" / "tokenizer_config.json", eos_token="<|endoftext|>")
    ran = chat(tmp_path, "model", "--once", "the list", "--max-new-tokens", str(N), "--json")
    (answer,) = json.loads(ran.stdout)["turns"][0]["answers"]
    assert answer == {"model": "model", "text": tokenizer.decode(tokens[:-1]), "finished": True, "num_tokens": 3}


def test_an_adapter_talks_without_a_merge_by_its_name_in_the_store_or_its_directory(models, tmp_path):
    store = WrittenStore(tmp_path / "artifacts")
    base = Store(store.root).entry("base", store.stage("base", {}).fingerprint).output
    shutil.copytree(models / "left", base, dirs_exist_ok=True)
    made = store.stage("base", {})
    place = Store(store.root).entry("sft", store.stage("sft", {"policy": made}).fingerprint).output
    write_adapter(place, base)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(base / name, place / name)
    Base(name="base", fingerprint=made.fingerprint, digest=made.output_digest).write(place)
    store.stage("sft", {"policy": made})
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), place)
    answer = expected(base, "the list", model=adapted)
    assert answer != expected(base, "the list")
    peft = shutil.copytree(place, tmp_path / "peft")
    (peft / "base.json").unlink()
    assert message(tmp_path, "p/sft", str(peft), "--once", "the list") == [[answer, answer]]
    gone = chat(tmp_path, "p/nothing", "--once", "the list")
    assert gone.returncode == 2 and "p/sft" in gone.stderr
    reward = store.stage("reward", {"policy": made}, produces="reward_model")
    refused = chat(tmp_path, f"reward@{reward.fingerprint[:16]}", "--once", "the list")
    assert refused.returncode == 2 and "is reward_model" in refused.stderr


def test_sampling_follows_the_seed_and_the_temperature(models):
    hot = ("left", "--once", "the list", "--temperature", "5")
    assert message(models, *hot) == message(models, *hot) != message(models, *hot, "--seed", "1")
    assert message(models, *hot[:3], "--temperature", "0") == [[expected(models / "left", "the list")]]
    edit(shutil.copytree(models / "left", models / "warm") / "generation_config.json", do_sample=True, temperature=5.0)
    assert message(models, "warm", *hot[1:3]) == message(models, *hot)  # what the model's own config says


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        (("left", "right", "left"), "3 REFs"),
        (("left", "--temperature", "-1"), "--temperature -1.0: 0 or more"),
        (("left", "--temperature", "0", "--top-p", "0.5"), "--top-p samples"),
        (("nowhere",), "nowhere"),
        (("left", "--once", "the " * 600), "reads 512"),
        (("plain", "--system", "be kind"), "no chat template"),
    ],
)
def test_what_is_wrong_ends_with_2(models, overrides, reported):
    if not (models / "plain").exists():
        tiny.write_policy(models / "plain", chat_template=None)
    ran = chat(models, *overrides, *(() if "--once" in overrides else ("--once", "x")))
    assert ran.returncode == 2 and reported in ran.stderr, ran.stderr


def test_a_model_without_a_template_continues_the_text_and_says_so(models):
    if not (models / "plain").exists():
        tiny.write_policy(models / "plain", chat_template=None)
    tokenizer, model = (each.from_pretrained(models / "plain") for each in (AutoTokenizer, AutoModelForCausalLM))
    ids = tokenizer("the list", return_tensors="pt")
    found = model.generate(**ids, max_new_tokens=N, do_sample=False)[0, ids["input_ids"].shape[1] :]
    ran = chat(models, "plain", "--once", "the list", "--max-new-tokens", str(N))
    assert ran.stdout == tokenizer.decode(found, skip_special_tokens=True) + "\n"
    assert "continues each text" in ran.stderr

"""The evaluation's numbers, on tiny models, against a computation by hand; and what it writes."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from lineage.artifact import Kind
from lineage.errors import ArtifactError, ConfigError, DataError
from lineage.filesystem.digest import digest_files, digest_of
from lineage.store import Store
from tasks.context import Metrics, Resources, TrainContext
from tasks.data.tokens.template import Thinking
from tasks.evaluate import Evaluate
from tasks.evaluate.evaluate import EvaluationCheck
from tasks.evaluate.measured import AnswerForm, is_one_sentence
from tasks.evaluate.row_scores import WEIGHTS_FILE, read_policies, read_scores
from tasks.evaluate.stubs import Stubs
from tasks.method import Input
from tasks.prepare_data import PrepareText
from tasks.reward_functions import RewardFunction, Rewards
from tasks.reward_functions.metric import Metric
from tests.prepared import named, prepare, side
from tests.tiny import (
    conversation_rows,
    preference_rows,
    prompt_rows,
    swap_tokens,
    text_rows,
    unpaired_rows,
    write_policy,
    write_rows,
    write_tokenizer,
)
from tests.written_store import WrittenStore

SIDES = ("chosen", "rejected")
SMALL = Evaluate(num_rows=12, num_prompts=4, max_new_tokens=5, max_length=128, max_cut=1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    import torch
    from transformers import AutoModelForSequenceClassification

    root = tmp_path_factory.mktemp("evaluate")
    sft = write_policy(root / "sft", seed=1)
    torch.manual_seed(0)
    reward = AutoModelForSequenceClassification.from_pretrained(sft, num_labels=1)
    reward.save_pretrained(root / "reward")
    write_tokenizer(root / "reward")
    write_policy(root / "dpo", seed=2)
    rows = {
        "text": write_rows(root / "text", text_rows(1), text_rows(12)),
        "conversations": write_rows(root / "conversations", conversation_rows(1), conversation_rows(12)),
        "pairs": write_rows(root / "pairs", preference_rows(1), preference_rows(12)),
    }
    models = {"reward_model": root / "reward", "reference": sft, "sft": sft, "dpo": root / "dpo"}
    return {
        slot: Input(name=slot, kind=Evaluate.consumes.get(slot, Kind.CHECKPOINT), fingerprint=str(path), path=path)
        for slot, path in {**rows, **models}.items()
    }


def evaluate(
    directory: Path, inputs: Mapping[str, Input], method: Evaluate = SMALL, resources: Resources | None = None
) -> dict[str, float]:
    context = TrainContext(output_dir=directory, work_dir=directory, resources=resources or Resources())
    return named(method, inputs, method.run(inputs, context))


@pytest.fixture(scope="module")
def plain(inputs: dict[str, Input], tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One evaluation of all that can be measured: its metrics, what it reported, and where it wrote."""
    folder, seen, parts = tmp_path_factory.mktemp("plain"), list[tuple[int, Metrics]](), list[tuple[str, int, int]]()
    context = TrainContext(
        output_dir=folder, work_dir=folder, report=lambda *report: seen.append(report),
        part=lambda *part: parts.append(part),
    )  # fmt: skip
    metrics = named(SMALL, inputs, SMALL.run(inputs, context))
    return SimpleNamespace(metrics=metrics, seen=seen, folder=folder, parts=parts)


def held_out(inputs: Mapping[str, Input], slot: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(inputs[slot].path / "held_out.parquet").to_pylist()
    return rows


def answer_logp(directory: Path, prompt: object, answer: object) -> tuple[float, int]:
    """Log-probability of an answer with its end of turn, and its tokens: one row, no batch, no padding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*prompt, *answer])["input_ids"]  # type: ignore[misc]
    with torch.no_grad():
        logps = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    places = range(len(before), len(whole))
    return sum(float(logps[place - 1, whole[place]]) for place in places), len(places)


def test_the_rows_that_a_model_has_read_and_answered_are_counted(plain: SimpleNamespace) -> None:
    names = [name for name, _, _ in plain.parts]
    assert list(dict.fromkeys(names)) == ["dpo", "sft", "reward_model"] and len(names) > len({*names})
    for name in {*names}:
        done = [done for its, done, _ in plain.parts if its == name]
        (of,) = {of for its, _, of in plain.parts if its == name}
        assert done == sorted(done) and 0 < done[0] < done[-1] == of


def test_accuracies_and_perplexities_are_those_computed_by_hand(
    inputs: dict[str, Input], plain: SimpleNamespace
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    metrics, pairs = plain.metrics, held_out(inputs, "pairs")
    scored = {
        name: [[answer_logp(inputs[name].path, row["prompt"], row[side]) for side in SIDES] for row in pairs]
        for name in ("sft", "dpo")
    }
    margins = {name: [chosen[0] - rejected[0] for chosen, rejected in found] for name, found in scored.items()}
    implicit = [dpo > sft for sft, dpo in zip(margins["sft"], margins["dpo"], strict=True)]
    assert metrics["dpo/preference_accuracy"] == pytest.approx(sum(implicit) / len(implicit))
    for name, values in margins.items():
        assert metrics[f"{name}/logp_accuracy"] == pytest.approx(sum(value > 0 for value in values) / len(values))
    means = [[logp / count for logp, count in sides] for sides in scored["dpo"]]
    share = sum(chosen > rejected for chosen, rejected in means) / len(means)
    assert metrics["dpo/mean_logp_accuracy"] == pytest.approx(share)
    assert metrics["dpo/mean_logp_accuracy"] != metrics["dpo/logp_accuracy"]  # which prefers short answers

    scores = [
        answer_logp(inputs["dpo"].path, row["messages"][:-1], row["messages"][-1:])  # type: ignore[index]
        for row in held_out(inputs, "conversations")
    ]
    perplexity = math.exp(-sum(logp for logp, _ in scores) / sum(count for _, count in scores))
    assert metrics["dpo/answer_perplexity"] == pytest.approx(perplexity, rel=1e-4)

    tokenizer = AutoTokenizer.from_pretrained(inputs["sft"].path)
    model = AutoModelForCausalLM.from_pretrained(inputs["sft"].path)
    total = count = 0.0
    for row in held_out(inputs, "text"):  # each document with its end
        ids = [*tokenizer(str(row["text"]))["input_ids"], tokenizer.pad_token_id]
        with torch.no_grad():
            total += float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss) * (len(ids) - 1)
        count += len(ids) - 1
    assert metrics["sft/text_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_single_answers_are_distinguished_as_computed_by_hand(tmp_path: Path, inputs: dict[str, Input]) -> None:
    rows = unpaired_rows(12)
    path = write_rows(tmp_path / "unpaired", rows[:1], rows)
    given = {**inputs, "unpaired": replace(inputs["text"], name="unpaired", kind=Kind.UNPAIRED, path=path)}
    del given["text"], given["conversations"], given["pairs"], given["reward_model"]
    metrics = evaluate(tmp_path / "out", given)
    scored = {
        name: [answer_logp(inputs[name].path, row["prompt"], row["completion"]) for row in rows]
        for name in ("sft", "dpo")
    }
    labels = [bool(row["label"]) for row in rows]
    ratios = [dpo - sft for (sft, _), (dpo, _) in zip(scored["sft"], scored["dpo"], strict=True)]
    right = [(ratio > 0) == label for ratio, label in zip(ratios, labels, strict=True)]
    assert metrics["dpo/unpaired_accuracy"] == pytest.approx(sum(right) / len(right))
    assert metrics["sft/unpaired_accuracy"] == 0.5
    means = [logp / count for logp, count in scored["dpo"]]
    ranked = [
        means[good] > means[bad]
        for good in range(len(rows))
        for bad in range(len(rows))
        if labels[good] and not labels[bad]
    ]
    assert metrics["dpo/unpaired_auc"] == pytest.approx(sum(ranked) / len(ranked))
    assert metrics["unpaired/rows_dropped"] == 0
    found = read_scores(tmp_path / "out")
    assert set(found["unpaired_accuracy"].row_ids) == {row["row_id"] for row in rows}
    assert "single answers acc." in (tmp_path / "out" / "table.md").read_text()
    answered = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    assert len(answered) == SMALL.num_prompts  # to the prompts of the single answers


def greedy_text(directory: Path, prompt: object, max_new_tokens: int) -> tuple[str, bool]:
    """What plain transformers answers, one row and no padding; and whether it ended by itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(directory)
    new = model.generate(ids, do_sample=False, max_new_tokens=max_new_tokens)[0, ids.shape[1] :].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), tokenizer.eos_token_id in new


def write_talker(directory: Path, seed: int) -> Path:
    """A random policy that answers in many tokens: tied embeddings repeat the last one."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig.from_pretrained(write_policy(directory), tie_word_embeddings=False, initializer_range=0.5)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_an_exact_match_is_an_answer_that_is_the_reference_to_the_letter(
    tmp_path: Path, inputs: dict[str, Input]
) -> None:
    dpo, sft = (write_talker(tmp_path / name, seed) for seed, name in enumerate(("dpo", "sft")))
    rows = conversation_rows(6)
    for index, row in enumerate(rows):
        messages: list[dict[str, str]] = row["messages"]  # type: ignore[assignment]
        messages[:0] = [{"role": "user", "content": f"a turn before, {index}"}, {"role": "assistant", "content": "yes"}]
        text, _ = greedy_text(dpo, messages[:-1], 5)
        messages[-1]["content"] = f" {text}\n" if index < 4 else f"{text} and more"
    own = write_rows(tmp_path / "rows", conversation_rows(1), rows)
    given = {
        **inputs,
        "conversations": replace(inputs["conversations"], path=own),
        **{path.name: replace(inputs[path.name], path=path) for path in (dpo, sft)},
    }
    metrics = evaluate(tmp_path / "all", given, replace(SMALL, num_prompts=6))
    assert metrics["dpo/exact_match"] == pytest.approx(4 / 6)
    assert metrics["sft/exact_match"] == 0
    scores = read_scores(tmp_path / "all")["exact_match"]
    assert dict(zip(scores.row_ids, scores.scores["dpo"], strict=True)) == {f"c{i}": float(i < 4) for i in range(6)}
    evaluate(tmp_path / "some", given, replace(SMALL, num_questions=5))
    assert len(read_scores(tmp_path / "some")["exact_match"].row_ids) == 5
    columns = (tmp_path / "all" / "table.md").read_text().splitlines()[0]
    assert "exact match ↑" in columns


def test_answers_that_the_limit_cuts_off_are_counted(
    tmp_path: Path, inputs: dict[str, Input], plain: SimpleNamespace
) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    scores = read_scores(plain.folder)["unfinished_share"]
    assert len(scores.row_ids) == 2 * SMALL.num_prompts
    assert plain.metrics["dpo/unfinished_share"] == 1  # random models do not end their turn
    # Every token is a stop token now.
    ending = write_policy(tmp_path / "ending", seed=2)
    GenerationConfig(eos_token_id=list(range(len(AutoTokenizer.from_pretrained(ending))))).save_pretrained(ending)
    metrics = evaluate(tmp_path / "ended", {**inputs, "ending": replace(inputs["dpo"], path=ending, fingerprint="e")})
    assert (metrics["dpo/unfinished_share"], metrics["ending/unfinished_share"]) == (1, 0)


def test_the_report_holds_metrics_answers_and_a_table_and_progress_is_reported_by_policy(
    plain: SimpleNamespace,
) -> None:
    metrics, folder = plain.metrics, plain.folder
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [list(row) for row in answers] == [["prompt", "sft", "dpo"]] * 4 + [
        ["prompt", "right answer", "sft", "dpo"]
    ] * 4
    table = re.sub(" +", " ", (folder / "table.md").read_text())  # whatever the columns are padded to
    of_sft = next(line for line in table.splitlines() if line.startswith("| sft | "))
    assert of_sft.startswith(f"| sft | {metrics['sft/exact_match']:.2f} |")  # what matters stands first
    assert f" {metrics['sft/text_perplexity']:.1f} |" in of_sft
    assert table.count("| right answer | ") == 4  # a sample of each conversation that is asked, with what is right
    kinds = [metrics["reward_model/accuracy/cut"], metrics["reward_model/accuracy/wrong"]]
    assert metrics["reward_model/accuracy"] == pytest.approx(sum(kinds) / 2)
    assert f"| accuracy ↑ | {metrics['reward_model/accuracy']:.2f} | {kinds[0]:.2f} | {kinds[1]:.2f} |" in table
    assert [step for step, _ in plain.seen] == [1, 2, 3]
    assert set(plain.seen[0][1]) == {"dpo/text_perplexity", "dpo/answer_perplexity"}  # sft is the reference too
    assert plain.seen[-1][1] == metrics


def test_the_scores_of_the_rows_make_up_the_metrics(tmp_path: Path, inputs: dict[str, Input]) -> None:
    metrics = evaluate(tmp_path, inputs, replace(SMALL, answer_form="one_sentence"))
    scores = read_scores(tmp_path)
    named_before = replace(SMALL, answer_form="one_sentence").policy_metrics(inputs)
    assert set(scores) == {*(each for each in named_before if not each.endswith("/*")), "accuracy"}
    made = {name: value for each in scores.values() for name, value in each.metrics().items()}
    counts = ("rows_dropped", "rows_cut", "prompts_cut", "max_length")
    notes = ("reward_model/accuracy/", "weights/")
    others = [name for name in metrics if name.startswith(notes) or name.endswith(counts)]
    assert made == {name: value for name, value in metrics.items() if name not in others}
    assert read_policies(tmp_path) == {name: inputs[name].fingerprint for name in ("sft", "dpo")}
    for metric, slot in (("text_perplexity", "text"), ("answer_perplexity", "conversations"), ("accuracy", "pairs")):
        assert sorted(scores[metric].row_ids) == sorted(str(row["row_id"]) for row in held_out(inputs, slot))
    prompts = [str(row["prompt"]) for row in held_out(inputs, "pairs")]
    assert len(set(scores["logp_accuracy"].groups)) == len(set(prompts))
    assert sum(scores["text_perplexity"].weights) > len(scores["text_perplexity"].weights)


def test_perplexities_of_labels_are_those_of_their_rows(tmp_path: Path, inputs: dict[str, Input]) -> None:
    labels = ("law", 7, "ends in accuracy")
    rows = [{"text": row["text"], "meta": {"topic": labels[i % 3]}} for i, row in enumerate(text_rows(24))]
    rows += [{"text": "It has no label.", "meta": {}}]
    prepare(tmp_path, PrepareText(held_out=0.8), rows, columns={"domain": "meta.topic"})
    folder = tmp_path / "report"
    few = {
        **{slot: inputs[slot] for slot in ("reference", "sft")},
        "text": replace(inputs["text"], path=tmp_path / "out"),
    }
    metrics, held = evaluate(folder, few, replace(SMALL, num_rows=25)), side(tmp_path, "held_out")
    scores = read_scores(folder)
    found = {each.partition("/")[2]: scores[each] for each in scores if each.startswith("text_perplexity/")}
    assert set(found) == set(map(str, labels))
    for label, each in found.items():
        assert sorted(each.row_ids) == sorted(str(row["row_id"]) for row in held if row["domain"] == label)
        assert each.lower_is_better and not each.is_bounded
        assert f"| text_perplexity/{label} " in (folder / "table.md").read_text()
        logs = -sum(each.scores["sft"]) / sum(each.weights)
        assert metrics[f"sft/text_perplexity/{label}"] == pytest.approx(math.exp(logs))
    whole = dict(zip(scores["text_perplexity"].row_ids, scores["text_perplexity"].scores["sft"], strict=True))
    parts = {row: score for each in found.values() for row, score in zip(each.row_ids, each.scores["sft"], strict=True)}
    assert parts.items() < whole.items()
    stubs = Stubs.read(folder)
    assert stubs and set(stubs.scores) >= {f"text_perplexity/{label}" for label in found}


@pytest.mark.parametrize("wrong", ["path", "files"])
@pytest.mark.parametrize("slot", ["dpo", "reward_model"])
def test_another_checkpoint_than_the_input_is_not_measured(
    tmp_path: Path, inputs: dict[str, Input], monkeypatch: pytest.MonkeyPatch, wrong: str, slot: str
) -> None:
    given = dict(inputs)
    for name in ("reference", "sft", "dpo", "reward_model"):
        output = Path(shutil.copytree(inputs[name].path, tmp_path / "store" / name / "f" / "output"))
        given[name] = replace(inputs[name], path=output, digest=digest_of(digest_files(output)))
    method = replace(SMALL, num_rows=2, num_prompts=1, max_new_tokens=1)
    metrics = evaluate(tmp_path / "report", given, method)
    found = json.loads((tmp_path / "report" / WEIGHTS_FILE).read_text())
    assert found == {name: each.digest for name, each in given.items() if each.digest} and len(found) == 4
    assert {name: int(each[:10], 16) for name, each in found.items()} == {
        name.removeprefix("weights/"): value for name, value in metrics.items() if name.startswith("weights/")
    }
    if wrong == "path":
        given[slot] = replace(given[slot], path=given["sft"].path)
    else:
        shutil.copy(inputs["sft"].path / "model.safetensors", given[slot].path)
    monkeypatch.setattr(Evaluate, "_measure_all", lambda *_args: pytest.fail("measured"))
    with pytest.raises(ArtifactError, match=rf"inputs\.{slot}: .*/output has the digest \w+, and the input {slot} has"):
        evaluate(tmp_path / "wrong", given, method)
    assert not (tmp_path / "wrong").exists()


def test_a_model_that_changes_after_it_was_loaded_changes_nothing(tmp_path: Path, inputs: dict[str, Input]) -> None:
    """Each is loaded once, also where samples of all policies are scored by the reference."""
    method = replace(SMALL, num_rows=2, num_prompts=1, kl_samples=2)
    models = {slot: each for slot, each in inputs.items() if (each.path / "config.json").exists()}
    given = {
        slot: replace(each, path=Path(shutil.copytree(each.path, tmp_path / slot))) for slot, each in models.items()
    }
    loaded = list[tuple[str, ...]]()

    def change(*slots: str) -> None:
        loaded.append(slots)
        for slot in slots:
            shutil.rmtree(given[slot].path)

    ctx = TrainContext(output_dir=tmp_path / "report", work_dir=tmp_path, loaded=change)
    found = method.run({**inputs, **given}, ctx)
    assert found == evaluate(tmp_path / "expected", inputs, method)
    assert loaded == [("dpo",), ("sft", "reference"), ("reward_model",)]


def test_each_field_changes_the_report(tmp_path: Path, inputs: dict[str, Input]) -> None:
    changes = {
        "": 0, "num_rows": 5, "num_prompts": 2, "num_questions": 1, "max_new_tokens": 1, "max_length": 40, "seed": 1,
    }  # fmt: skip
    found = {}
    for field, value in changes.items():
        fewer = replace(SMALL, **{"num_rows": 6, **({field: value} if field else {})})  # of 12: the seed decides which
        folder = tmp_path / (field or "plain")
        metrics = evaluate(folder, inputs, fewer)
        found[field] = metrics, *((folder / file).read_text() for file in ("answers.jsonl", "scores.jsonl"))
    assert [field for field in found if field and found[field] == found[""]] == []


def test_models_with_other_tokens_or_turns_are_not_compared(tmp_path: Path, inputs: dict[str, Input]) -> None:
    champion = write_policy(tmp_path / "champion", seed=3)
    given = Input(name="source:champion", kind=Kind.CHECKPOINT, fingerprint="c", path=champion)
    swap_tokens(champion)
    with pytest.raises(ConfigError, match=r"champion \(source:champion\) and reference have different tokenizers"):
        evaluate(tmp_path, {**inputs, "champion": given})
    file = write_tokenizer(champion) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1))  # other bytes, the same tokens
    assert "champion/answer_perplexity" in evaluate(tmp_path, {**inputs, "champion": given})

    other = shutil.copytree(inputs["reward_model"].path, tmp_path / "reward")
    judged = {**inputs, "reward_model": replace(inputs["reward_model"], path=other)}
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + "{# #}")
    with pytest.raises(ConfigError, match=r"reward_model .* have different chat templates"):
        evaluate(tmp_path, judged)
    swap_tokens(other)
    with pytest.raises(ConfigError, match=r"reward_model .* different tokenizers.*train the reward model from"):
        evaluate(tmp_path, judged)


def asked(row: Mapping[str, object]) -> str:
    prompt = row["prompt"]
    assert isinstance(prompt, list)
    return str(prompt[0]["content"])


def test_reward_functions_score_greedy_answers_to_the_prompts(tmp_path: Path, inputs: dict[str, Input]) -> None:
    """Each policy's own answer is the right one for half of the prompts."""
    prompts = [{**row, "columns": json.dumps({"answer": "a"})} for row in prompt_rows(9)]
    rows = write_rows(tmp_path / "prompts", prompts[:1], prompts[1:])
    given = {**inputs, "prompts": replace(inputs["text"], kind=Kind.PROMPTS, path=rows)}
    functions: Rewards = {
        "regex": RewardFunction(), "brief": RewardFunction(function="length", target_tokens=1, bound="upper"),
    }  # fmt: skip
    method = replace(SMALL, num_prompts=8, rewards=functions)
    evaluate(tmp_path / "first", given, method)
    lines = [json.loads(line) for line in (tmp_path / "first" / "answers.jsonl").read_text().splitlines()]
    reported = [line for line in lines if "right answer" not in line]  # without those to the conversations
    assert len(reported) == 8
    right = {answer["prompt"][0]["content"]: rf"\A{re.escape(answer['dpo'])}\Z" for answer in reported[::2]}
    answered = [
        {**row, "columns": json.dumps({"answer": right.get(asked(row), "(?!)")})} for row in prompts
    ]  # fmt: skip
    write_rows(rows, answered[:1], answered[1:])
    metrics = evaluate(tmp_path, given, method)
    same = [each for each in reported[::2] if each["sft"] == each["dpo"]]
    assert metrics["dpo/reward/regex"] == 0.5 and metrics["sft/reward/regex"] == len(same) / 8
    assert 0 <= metrics["sft/reward/brief"] < 1
    scores = read_scores(tmp_path)["reward/regex"]
    assert sorted(scores.scores["dpo"]) == [0] * 4 + [1] * 4 and len(set(scores.row_ids)) == 8
    assert "| regex ↑" in (tmp_path / "table.md").read_text().replace("  ", " ")
    plain = evaluate(tmp_path / "plain", given, replace(method, rewards=None))
    assert plain == {name: value for name, value in metrics.items() if "/reward/" not in name}


def test_the_kl_is_that_of_the_distributions_which_answers_are_sampled_from(
    tmp_path: Path, inputs: dict[str, Input]
) -> None:
    """Of answers of one token, the exact KL is a sum over the vocabulary."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    method = replace(SMALL, max_new_tokens=1, kl_samples=200)
    metrics = evaluate(tmp_path, inputs, method, Resources(micro_batch_size=100))
    scores = read_scores(tmp_path)["kl"]
    asked = dict(zip(scores.groups, scores.row_ids, strict=True))
    assert metrics["sft/kl"] == 0.0 and len(scores.row_ids) == 4 * 200 and len(asked) == 4
    tokenizer = AutoTokenizer.from_pretrained(inputs["sft"].path)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    exact = []
    for prompt in prompts:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in prompt]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            policy, reference = (
                AutoModelForCausalLM.from_pretrained(inputs[name].path)(**ids).logits[0, -1].log_softmax(-1)
                for name in ("dpo", "sft")
            )
        exact.append(float((policy.exp() * (policy - reference)).sum()))
    own = torch.tensor(scores.scores["dpo"])
    assert metrics["dpo/kl"] == pytest.approx(sum(exact) / 4, abs=4 * float(own.std()) / len(own) ** 0.5)
    assert "KL to the reference" in (tmp_path / "table.md").read_text()


def test_reward_functions_need_prompts_with_their_columns(tmp_path: Path, inputs: dict[str, Input]) -> None:
    method = replace(SMALL, rewards={"exact": RewardFunction()})
    with pytest.raises(ConfigError, match=r"rewards.exact scores answers to prompts, and no input prompts is set"):
        evaluate(tmp_path, inputs, method)
    rows = write_rows(tmp_path / "prompts", prompt_rows(1), prompt_rows(5))
    given = {**inputs, "prompts": replace(inputs["text"], kind=Kind.PROMPTS, path=rows)}
    with pytest.raises(DataError, match=r"rewards.exact: row \d of the prompts: answer is None; text or a number"):
        evaluate(tmp_path, given, method)
    alone = {slot: given[slot] for slot in ("prompts", "reference", "sft")}
    numbers = [{**row, "columns": '{"answer": 1}'} for row in prompt_rows(5)]
    write_rows(rows, numbers[:1], numbers)
    assert evaluate(tmp_path / "alone", alone, method)["sft/reward/exact"] == 0
    with pytest.raises(ConfigError, match="there are no rows to measure on"):
        evaluate(tmp_path, alone)


def test_the_win_rate_is_over_the_answers_of_the_reference(tmp_path: Path, inputs: dict[str, Input]) -> None:
    dpo, sft = (write_talker(tmp_path / name, seed) for seed, name in enumerate(("dpo", "sft")))
    given = {**inputs, **{path.name: replace(inputs[path.name], path=path) for path in (dpo, sft)}}
    given["reference"] = replace(inputs["reference"], path=sft)
    metrics = evaluate(tmp_path / "out", given)
    assert metrics["sft/win_rate"] == 0.5
    scores = read_scores(tmp_path / "out")
    rewards = scores["reward_score"].scores
    wins = [float(mine > theirs) for mine, theirs in zip(rewards["dpo"], rewards["sft"], strict=True)]
    assert scores["win_rate"].scores["dpo"] == wins
    assert rewards["dpo"] != rewards["sft"]
    apart = {**given, "reference": replace(given["reference"], fingerprint="other")}  # measured by itself
    assert evaluate(tmp_path / "apart", apart)["dpo/win_rate"] == metrics["dpo/win_rate"]


def test_a_check_before_any_training_refuses_what_the_evaluation_would(
    tmp_path: Path, inputs: dict[str, Input]
) -> None:
    method = replace(SMALL, max_length=24, max_new_tokens=2, max_cut=0)
    with pytest.raises(DataError) as later:
        evaluate(tmp_path, inputs, method)
    read = {slot: inputs[slot] for slot in ("text", "conversations", "pairs", "reference")}
    with pytest.raises(DataError) as sooner:
        EvaluationCheck(method=method, chat_template="chatml").run(read, TrainContext.__new__(TrainContext))
    assert str(sooner.value) == str(later.value) and "accepted; raise max_length" in str(later.value)
    assert EvaluationCheck(method=SMALL, chat_template=None).run(read, TrainContext.__new__(TrainContext)) == {}


def test_rows_are_as_long_as_those_that_the_models_were_trained_on(tmp_path: Path, inputs: dict[str, Input]) -> None:
    free = replace(SMALL, max_length=None)
    with pytest.raises(
        ConfigError, match="max_length of evaluate is not set, and no manifest of sft, dpo, reward_model"
    ):
        evaluate(tmp_path / "none", inputs, free)
    store, stored = WrittenStore(tmp_path / "store"), {}
    for slot, max_length in (("sft", 30), ("dpo", 40), ("reward_model", 35)):
        manifest = store.stage(slot, {}, recipe={"max_length": max_length})
        output = Store(tmp_path / "store").entry(slot, manifest.fingerprint).output
        shutil.copytree(inputs[slot].path, output, dirs_exist_ok=True)
        stored[slot] = replace(inputs[slot], path=output)
    metrics = evaluate(tmp_path / "found", {**inputs, **stored}, free)
    assert metrics["max_length"] == 40
    assert metrics == evaluate(tmp_path / "set", {**inputs, **stored}, replace(SMALL, max_length=40))


@pytest.mark.parametrize("thinking", ["keep", "drop"])
def test_rows_are_read_with_the_thinking_that_the_models_were_trained_on(
    tmp_path: Path, inputs: dict[str, Input], thinking: Thinking
) -> None:
    """``keep`` ended in an error where the template drops it; of ``drop``, other tokens were measured than trained."""
    rows = conversation_rows(4)
    for index, row in enumerate(rows):
        row["messages"][-1]["content"] = f"<think>\nthought {index}\n</think>\n\nsaid {index}"  # type: ignore[index]
    held = write_rows(tmp_path / "rows", rows, rows)
    given = {slot: inputs[slot] for slot in ("reference", "sft")}
    given["conversations"] = replace(inputs["conversations"], path=held)
    store = WrittenStore(tmp_path / "store")
    manifest = store.stage("sft", {}, recipe={"max_length": 128, "thinking": thinking})
    output = Store(tmp_path / "store").entry("sft", manifest.fingerprint).output
    shutil.copytree(inputs["sft"].path, output, dirs_exist_ok=True)
    if thinking == "keep":
        template = output / "chat_template.jinja"
        drops = "(message['content'].split('</think>') | last)"
        template.write_text(template.read_text().replace("message['content']", drops))
    given |= {slot: replace(given[slot], path=output) for slot in ("reference", "sft")}
    method = Evaluate(num_rows=4, num_questions=1, max_new_tokens=5)
    found = evaluate(tmp_path / "followed", given, method)
    assert found == evaluate(tmp_path / "set", given, replace(method, thinking=thinking))
    if thinking == "drop":
        kept = evaluate(tmp_path / "kept", given, replace(method, thinking="keep"))
        assert found["sft/answer_perplexity"] != kept["sft/answer_perplexity"]


def test_lost_rows_are_metrics_and_stand_in_the_table(
    tmp_path: Path, inputs: dict[str, Input], plain: SimpleNamespace
) -> None:
    metrics = evaluate(tmp_path / "short", inputs, replace(SMALL, max_length=24))
    assert metrics["pairs/prompts_cut"] > 0
    table = re.sub(" +", " ", (tmp_path / "short" / "table.md").read_text())
    assert f"| prompts_cut | pairs | {metrics['pairs/prompts_cut']:.0f} |" in table
    assert not any(plain.metrics[f"{kind}/rows_{what}"] for kind in ("text", "pairs") for what in ("dropped", "cut"))
    assert "held-out rows" not in (plain.folder / "table.md").read_text()


def test_without_pairs_and_reward_model_the_rest_is_measured_alike(tmp_path: Path, inputs: dict[str, Input]) -> None:
    method = replace(SMALL, num_questions=4)
    whole = evaluate(tmp_path / "whole", inputs, method)
    some = {slot: given for slot, given in inputs.items() if slot not in ("pairs", "reward_model", "text")}
    found = evaluate(tmp_path / "some", some, replace(method, answer_form="one_sentence"))
    measured = {key for key in found if key.startswith("dpo/")}
    names = ("answer_perplexity", "exact_match", "unfinished_share", "one_sentence_share", "answer_tokens")
    assert measured == {f"dpo/{name}" for name in names}
    assert found["dpo/answer_perplexity"] == pytest.approx(whole["dpo/answer_perplexity"])
    assert found["dpo/exact_match"] == whole["dpo/exact_match"]
    assert not any(name.endswith(("one_sentence_share", "answer_tokens")) for name in whole)
    assert 0 <= found["dpo/one_sentence_share"] <= 1 and 0 <= found["dpo/answer_tokens"] <= SMALL.max_new_tokens
    table = (tmp_path / "some" / "table.md").read_text()
    assert "answers of one sentence" in table and "reward model" not in table
    questions = [row["messages"][0]["content"] for row in held_out(inputs, "conversations")]  # type: ignore[index]
    assert sum(f"| {question} " in table for question in questions) >= 3  # with the answers to it below


@pytest.mark.parametrize(
    ("slots", "form", "message"),
    [
        (("text", "conversations"), None, "evaluate has no policy to measure; inputs of any other name"),
        (
            ("reference", "sft"),
            None,
            "no rows to measure on, and no input text or conversations or pairs or unpaired is set",
        ),
        (("reference", "sft", "text", "reward_model"), None, "a reward model scores answers, and no input prompts or"),
        (("reference", "sft", "text"), "one_sentence", "answer_form=one_sentence .* no input conversations is set"),
    ],
)
def test_nothing_to_measure_is_refused(
    tmp_path: Path, inputs: dict[str, Input], slots: tuple[str, ...], form: AnswerForm | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(tmp_path, {slot: inputs[slot] for slot in slots}, replace(SMALL, answer_form=form))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It returns 3.5 of them.", True),
        (" Is it `os.path.join`? ", True),
        ("It returns a list (or None).", True),
        ("It returns a list. It is sorted.", False),
        ("It returns a list", False),
        ("It returns:\n- a list.", False),
        ("", False),
    ],
)
def test_what_one_sentence_is(text: str, expected: bool) -> None:
    assert is_one_sentence(text) is expected


def test_models_that_are_held_in_bf16_measure_alike(
    tmp_path: Path, inputs: dict[str, Input], plain: SimpleNamespace
) -> None:
    expected = plain.metrics
    ctx = TrainContext(output_dir=tmp_path / "bf16", work_dir=tmp_path, resources=Resources(weights="bf16"))
    rounded = SMALL.run(inputs, ctx)
    names = [name for name in expected if "perplexity" in name]
    assert names and all(rounded[name] == pytest.approx(expected[name], rel=2e-2) for name in names)
    assert all(rounded[name] != expected[name] for name in names)
    assert rounded["reward_model/accuracy"] == pytest.approx(expected["reward_model/accuracy"], abs=0.1)


def test_metrics_score_answers_to_the_questions_and_a_failed_one_is_recorded(
    tmp_path: Path, inputs: dict[str, Input]
) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "def chars(completions): return [float(len(each)) for each in completions]\n"
        "def broken(completions): return [float('nan')] * len(completions)\n"
    )
    own = [Metric(function=f"python:{code}:{name}", allow_code=True) for name in ("chars", "broken")]
    sampled = Metric(function="pass_at_k", checker="f1", samples=2, k=1)
    method = replace(SMALL, metrics=("exact", "f1", *own, sampled))
    given = {slot: inputs[slot] for slot in ("conversations", "reference", "sft", "dpo")}
    metrics = evaluate(tmp_path / "out", given, method)
    scores, lines = read_scores(tmp_path / "out"), (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    answers = [json.loads(line)["dpo"] for line in lines]
    assert scores["chars"].scores["dpo"] == [len(each) for each in answers]
    assert metrics["dpo/chars"] == sum(map(len, answers)) / len(answers)
    assert metrics["dpo/chars/stderr"] == scores["chars"].standard_error("dpo")
    assert metrics["sft/exact"] == metrics["sft/exact_match"]
    assert metrics["metrics_failed"] == 2 and "dpo/broken" not in metrics
    failed = json.loads((tmp_path / "out" / "failed.json").read_text())
    assert failed.keys() == {"sft/broken", "dpo/broken"} and "returned nan for row 0" in failed["dpo/broken"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert re.search(r"\| chars +\| .* ± .* \|", table) and "dpo/broken" in table
    assert scores["pass@1"].scores.keys() == {"sft", "dpo"} and len(scores["pass@1"].row_ids) == len(answers)
    stubs = Stubs.read(tmp_path / "out")
    assert stubs and stubs.scores["exact"].value("right") == 1 and stubs.scores["f1"].value("empty") == 0
    assert "fails on known answers" in stubs.untested["broken"]
    again = evaluate(tmp_path / "again", given, method)
    assert again == metrics
    with pytest.raises(DataError, match=r"metrics.exact: the prompts have no column other"):
        evaluate(tmp_path / "no", given, replace(SMALL, metrics=(Metric(function="exact", column="other"),)))


def test_win_rates_with_length_control_and_by_a_judge(tmp_path: Path, inputs: dict[str, Input]) -> None:
    (tmp_path / "j.py").write_text("def judge(completions, references): return [1.0 for _ in completions]\n")
    judge = f"python:{tmp_path / 'j.py'}:judge"
    by_model = Metric(function="win_rate", judge="reward_model", name="by_model")
    method = replace(
        SMALL,
        metrics=(
            by_model,
            replace(by_model, name="controlled", length_control=True),
            Metric(function="win_rate", judge=judge, allow_code=True),
        ),
    )
    metrics = evaluate(tmp_path / "out", inputs, method)
    assert metrics["dpo/by_model"] == metrics["dpo/win_rate"] and metrics["dpo/judged_win_rate"] == 1
    assert read_scores(tmp_path / "out")["controlled"].bounded is False
    few = {slot: inputs[slot] for slot in ("conversations", "reference", "sft", "dpo", "reward_model")}
    asked = evaluate(tmp_path / "questions", few, replace(SMALL, metrics=(by_model,)))
    assert asked["dpo/by_model"] == asked["dpo/win_rate"] and not any("accuracy" in name for name in asked)
    found, stubs = read_scores(tmp_path / "questions"), Stubs.read(tmp_path / "questions")
    assert found["by_model"].row_ids == found["exact_match"].row_ids and stubs and {"by_model"} <= stubs.scores.keys()
    with pytest.raises(ConfigError, match="is judged by a reward model, and no input reward_model is set"):
        method.check_slots(frozenset({"conversations", "reference", "dpo"}))


def test_what_was_measured_before_is_not_measured_again_in_any_run_of_the_store(
    tmp_path: Path, inputs: dict[str, Input], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.train.models import load

    loaded: list[str] = []
    inner = load.load_on_device
    monkeypatch.setattr(load, "load_on_device", lambda model, ctx: (loaded.append(model.name), inner(model, ctx))[1])
    calls, code = tmp_path / "calls", tmp_path / "counted.py"
    calls.touch()
    code.write_text(
        "def chars(completions):\n"
        f"    open({str(calls)!r}, 'a').write('x')\n"
        "    return [float(len(each)) for each in completions]\n"
    )
    own = (
        Metric(function="pass_at_k", checker="f1", samples=2),
        Metric(function=f"python:{code}:chars", allow_code=True),
    )
    method = replace(SMALL, metrics=own, kl_samples=2)

    def run(name: str, method: Evaluate = method, cache: Path = tmp_path / "cache", **changed: Input) -> Metrics:
        place = tmp_path / name
        context = TrainContext(output_dir=place, work_dir=place, cache_dir=cache)
        return method.run({**inputs, **changed}, context)

    first = run("first")
    assert sorted(loaded) == ["dpo", "reward_model", "sft"]  # the reference has the weights of sft
    count = len(calls.read_text())
    assert run("again") == first and len(loaded) == 3 and len(calls.read_text()) == count
    for name in ("scores.jsonl", "answers.jsonl", "table.md"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    run("shorter", replace(method, max_new_tokens=4))
    assert loaded[3:5] == ["dpo", "sft"] and len(calls.read_text()) > count  # for other answers
    loaded.clear()
    changed = tmp_path / "changed"
    shutil.copytree(inputs["dpo"].path, changed)
    (changed / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    run("other weights", dpo=replace(inputs["dpo"], path=changed, fingerprint="other"))
    assert loaded[0] == "dpo"
    loaded.clear()
    for path in (tmp_path / "cache").rglob("*.json"):
        path.write_text("[")  # a full disk
    assert run("damaged") == first and sorted(loaded) == ["dpo", "reward_model", "sft"]

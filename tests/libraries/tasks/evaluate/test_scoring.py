"""Scores of a batch are those of each row by itself, computed the long way."""

import contextlib
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lineage.filesystem import lock
from tasks.evaluate import scoring
from tasks.evaluate.answers import greedy_answers
from tasks.evaluate.scoring import Batches, Scored, in_batches, logps, rewards
from tasks.train.generation import rollouts
from tests.tiny import sentence, write_policy
from tests.tiny_models import ARCHITECTURES, tiny_config

LENGTHS = (9, 3, 17, 5, 12)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def model(policy):
    return AutoModelForCausalLM.from_pretrained(policy)


@pytest.fixture(scope="module")
def tokenizer(policy):
    return AutoTokenizer.from_pretrained(policy)


@pytest.fixture(scope="module")
def rows(tokenizer):
    return [tokenizer(sentence(index, length))["input_ids"] for index, length in enumerate(LENGTHS)]


def tensor(ids):
    return torch.tensor([list(ids)])


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_log_probabilities_are_those_of_each_row_alone(model, rows, batch_size):
    masks = [[1] * 2 + [0] + [1] * 200, [0] * 2 + [1] * 200, [1] * 200, [0, 1, 0, 1] + [0] * 200, [1] + [0] * 200]
    scored = [Scored(input_ids=ids, mask=mask[: len(ids)]) for ids, mask in zip(rows, masks, strict=True)]
    by_hand = []
    for row in scored:
        with torch.no_grad():
            logps_TV = model(tensor(row.input_ids)).logits[0].log_softmax(-1)
        places = [place for place in range(1, len(row.input_ids)) if row.mask[place]]
        by_hand.append(sum(float(logps_TV[place - 1, row.input_ids[place]]) for place in places))
        assert row.num_tokens == len(places)
    assert logps(model, scored, batch_size) == pytest.approx(by_hand, abs=1e-4)
    assert by_hand[-1] == 0.0  # the first token has nothing before it


@pytest.mark.parametrize("fields", [{"rows": 2}, {"tokens": 20}])
def test_several_workers_compute_the_batches_of_one_in_turn(fields, monkeypatch):
    lengths, seen, parts = [9, 3, 17, 5, 12, 30, 2], [], []
    alone = in_batches(lambda batch: [(index, batch) for index in batch], lengths, Batches(**fields))

    def gather(found, own):
        parts.append(own)
        found[:] = parts + found[len(parts) :]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for rank in range(3):
        batches = Batches(rank=rank, world_size=3, **fields)
        with contextlib.suppress(KeyError):  # until the last one has given its part
            together = in_batches(lambda batch: seen.append(batch) or [(i, batch) for i in batch], lengths, batches)
    assert together == alone
    assert sorted(seen, key=str) == sorted({tuple(batch): batch for _, batch in alone}.values(), key=str)
    assert all(len(part) for part in parts) and sum(map(len, parts)) == len(lengths)
    if "tokens" in fields:
        assert all(len(batch) * max(lengths[index] for index in batch) <= 20 or len(batch) == 1 for batch in seen)


def test_a_batch_holds_no_more_logits_than_fit(model, rows, monkeypatch):
    scored = [Scored(input_ids=ids, mask=[1] * len(ids)) for ids in rows]
    expected = logps(model, scored, 8)
    most, shapes = 2 * max(map(len, rows)) * model.config.vocab_size, []
    monkeypatch.setattr(scoring, "BATCH_LOGITS", most)
    model.register_forward_hook(lambda model, inputs, output: shapes.append(output.logits.shape))
    assert logps(model, scored, 8) == pytest.approx(expected, abs=1e-4)
    assert len(shapes) > 1
    assert all(shape.numel() <= most for shape in shapes)
    monkeypatch.setattr(scoring, "BATCH_LOGITS", 1)
    assert logps(model, scored, 8) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "field",
    [
        {"repetition_penalty": 5.0}, {"no_repeat_ngram_size": 1}, {"forced_bos_token_id": 7},
        {"bad_words_ids": [[token] for token in range(100, 250)]}, {"suppress_tokens": list(range(100, 250))},
        {"begin_suppress_tokens": list(range(100, 250))}, {"forced_eos_token_id": 7}, {"min_new_tokens": 9},
        {"exponential_decay_length_penalty": (0, 50.0)}, {"min_length": 60}, {"max_length": 9}, {"num_beams": 3},
        {"num_return_sequences": 2, "num_beams": 2}, {"do_sample": True, "temperature": 9.0},
        {"sequence_bias": [[[token], -9.0] for token in range(100, 250)]}, {"return_dict_in_generate": True},
        {"do_sample": True, "top_p": 0.99, "top_k": 300},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_greedy_answers_inherit_nothing_but_stop_tokens(model, tokenizer, rows, field):
    plain = greedy_answers(model, tokenizer, rows, max_new_tokens=6, batch_size=8)
    for name, value in field.items():
        setattr(model.generation_config, name, value)
    own = model.generation_config
    assert greedy_answers(model, tokenizer, rows, max_new_tokens=6, batch_size=8) == plain
    assert model.generation_config is own


@pytest.mark.parametrize("stop_of_tokenizer", [False, True])
def test_an_answer_ends_at_every_stop_token_of_model_and_tokenizer(policy, model, rows, stop_of_tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    endless = greedy_answers(model, tokenizer, rows[:1], max_new_tokens=6, batch_size=1)
    assert not endless[0].finished
    first = int(model(tensor(rows[0])).logits[0, -1].argmax())
    if stop_of_tokenizer:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    else:
        model.generation_config.eos_token_id = [1, first]
    [answer] = greedy_answers(model, tokenizer, rows[:1], max_new_tokens=6, batch_size=1)
    assert answer.finished
    assert len(answer.text) < len(endless[0].text)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batches_of_every_architecture_say_what_each_row_says_alone(architecture, tokenizer, rows, monkeypatch):
    """Log-probabilities, rewards and greedy answers, also decoded as on a GPU, against plain transformers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture)).eval()
    torch.manual_seed(0)
    reward = AutoModelForSequenceClassification.from_config(tiny_config(architecture, num_labels=1)).eval()
    by_hand, scores, expected = [], [], []
    with torch.no_grad():
        for ids in rows:
            found = model(tensor(ids)).logits[0].log_softmax(-1)
            by_hand.append(sum(float(found[place - 1, ids[place]]) for place in range(1, len(ids))))
            scores.append(float(reward.score(reward.base_model(tensor(ids)).last_hidden_state[:, -1])))
            new = list(ids)
            while len(new) < len(ids) + 3 and (len(new) == len(ids) or new[-1] not in (2, tokenizer.eos_token_id)):
                new.append(int(model(tensor(new)).logits[0, -1].argmax()))
            answer = new[len(ids) :]
            num_tokens = sum(token not in (2, tokenizer.eos_token_id) for token in answer)
            expected.append((tokenizer.decode(answer, skip_special_tokens=True), num_tokens))
    scored = [Scored(input_ids=ids, mask=[1] * len(ids)) for ids in rows]
    assert logps(model, scored, 3) == pytest.approx(by_hand, abs=2e-4)
    assert rewards(reward, rows, 3) == pytest.approx(scores, abs=1e-5)
    for is_decoded in (False, rollouts._is_plain(model)):
        monkeypatch.setattr(rollouts, "decodes", lambda model, found=is_decoded: found)
        answers = greedy_answers(model, tokenizer, rows, max_new_tokens=3, batch_size=3)
        assert [(answer.text, answer.num_tokens) for answer in answers] == expected


def test_a_finished_and_a_cut_off_answer_score_differently_where_padding_is_the_end():
    torch.manual_seed(0)
    config = tiny_config("llama", num_labels=1, pad_token_id=2, eos_token_id=2)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    answers = [[5, 6, 7, 2], [5, 6, 7], [5, 6, 7, 8, 9]]
    found = rewards(model, answers, batch_size=3)
    assert abs(found[0] - found[1]) > 1e-4
    assert found == pytest.approx([rewards(model, [row], 1)[0] for row in answers], abs=1e-5)


@pytest.mark.parametrize("is_written", [True, False])
def test_what_another_process_is_measuring_is_waited_for_and_computed_where_it_dies(tmp_path, monkeypatch, is_written):
    cache = scoring.Cache(folder=tmp_path, settings={}, batches=Batches())
    monkeypatch.setattr(scoring, "digest_json", lambda asked: "ab")
    path = tmp_path / scoring.CACHE_FOLDER / "ab" / "ab.json"
    path.parent.mkdir(parents=True)
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen([sys.executable, "-c", code, path.with_suffix(".lock")], **pipes)
    assert other.stdout.read(1) == b"\n"
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if is_written:
            path.write_text("[1.0]")
        other.kill()
        other.wait()

    monkeypatch.setattr(lock, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert cache.found("w", "text", [], lambda: [2.0]) == ([1.0] if is_written else [2.0]) and waited
    assert path.read_text() == ("[1.0]" if is_written else "[2.0]")

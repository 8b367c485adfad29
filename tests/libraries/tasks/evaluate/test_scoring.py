"""Scores of a batch are those of each row by itself, computed the long way."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tasks.evaluate import scoring
from tasks.evaluate.answers import greedy_answers
from tasks.evaluate.scoring import Scored, logps, rewards
from tests.tiny import sentence, write_policy
from tests.tiny_models import ARCHITECTURES, tiny_config

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = (9, 3, 17, 5, 12)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def rows(directory: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer(sentence(index, length))["input_ids"] for index, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_log_probabilities_are_those_of_each_row_alone(policy: Path, batch_size: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    masks = [[1] * 2 + [0] + [1] * 200, [0] * 2 + [1] * 200, [1] * 200, [0, 1, 0, 1] + [0] * 200, [1] + [0] * 200]
    scored = [Scored(input_ids=ids, mask=mask[: len(ids)]) for ids, mask in zip(rows(policy), masks, strict=True)]
    by_hand = []
    for row in scored:
        with torch.no_grad():
            logits = model(torch.tensor([list(row.input_ids)])).logits[0]
        logps_TV = logits.log_softmax(-1)
        places = [place for place in range(1, len(row.input_ids)) if row.mask[place]]
        by_hand.append(sum(float(logps_TV[place - 1, row.input_ids[place]]) for place in places))
        assert row.num_tokens == len(places)
    assert logps(model, scored, batch_size) == pytest.approx(by_hand, abs=1e-4)
    assert by_hand[-1] == 0.0  # the first token has nothing before it


def test_a_batch_holds_no_more_logits_than_fit(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    scored = [Scored(input_ids=ids, mask=[1] * len(ids)) for ids in rows(policy)]
    expected = logps(model, scored, 8)
    longest = max(len(row.input_ids) for row in scored)
    shapes = []
    monkeypatch.setattr(scoring, "_MAX_LOGITS", 2 * longest * model.config.vocab_size)
    model.register_forward_hook(lambda model, inputs, output: shapes.append(output.logits.shape))
    assert logps(model, scored, 8) == pytest.approx(expected, abs=1e-4)
    assert len(shapes) > 1
    assert all(shape.numel() <= 2 * longest * model.config.vocab_size for shape in shapes)
    monkeypatch.setattr(scoring, "_MAX_LOGITS", 1)
    assert logps(model, scored, 8) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rewards_are_those_of_each_row_alone(policy: Path, batch_size: int) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    with torch.no_grad():
        alone = [float(model(torch.tensor([ids])).logits[0, 0]) for ids in rows(policy)]
    assert rewards(model, rows(policy), batch_size) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_answers_take_the_most_likely_token_each_time(policy: Path, batch_size: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)

    def by_hand(prompt: Sequence[int]) -> tuple[str, int]:
        ids = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        answer = ids[len(prompt) :]
        return str(tokenizer.decode(answer, skip_special_tokens=True)), sum(
            token != tokenizer.eos_token_id for token in answer
        )

    expected = [by_hand(prompt) for prompt in rows(policy)]
    answers = greedy_answers(model, tokenizer, rows(policy), max_new_tokens=6, batch_size=batch_size)
    assert [(answer.text, answer.num_tokens) for answer in answers] == expected


@pytest.mark.parametrize(
    "field",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[token] for token in range(100, 250)]},
        {"suppress_tokens": list(range(100, 250))},
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 7},
        {"begin_suppress_tokens": list(range(100, 250))},
        {"exponential_decay_length_penalty": (0, 50.0)},
        {"min_new_tokens": 9},
        {"min_length": 60},
        {"max_length": 9},
        {"num_beams": 3},
        {"num_return_sequences": 2, "num_beams": 2},
        {"sequence_bias": [[[token], -9.0] for token in range(100, 250)]},
        {"do_sample": True, "temperature": 9.0},
        {"do_sample": True, "top_p": 0.99, "top_k": 300},
        {"return_dict_in_generate": True},
    ],
    ids=lambda field: next(iter(field)),
)
def test_greedy_answers_inherit_nothing_but_stop_tokens(policy: Path, field: dict[str, object]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    tokens = rows(policy)
    plain = greedy_answers(model, tokenizer, tokens, max_new_tokens=6, batch_size=8)
    for name, value in field.items():
        setattr(model.generation_config, name, value)
    own = model.generation_config
    assert greedy_answers(model, tokenizer, tokens, max_new_tokens=6, batch_size=8) == plain
    assert model.generation_config is own


@pytest.mark.parametrize("stop_of_tokenizer", [False, True])
def test_an_answer_ends_at_every_stop_token_of_model_and_tokenizer(policy: Path, stop_of_tokenizer: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    tokens = rows(policy)[:1]
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    endless = greedy_answers(model, tokenizer, tokens, max_new_tokens=6, batch_size=1)
    assert not endless[0].finished
    first = int(model(input_ids=_tensor(tokens)).logits[0, -1].argmax())
    if stop_of_tokenizer:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    else:
        model.generation_config.eos_token_id = [1, first]
    [answer] = greedy_answers(model, tokenizer, tokens, max_new_tokens=6, batch_size=1)
    assert answer.finished
    assert len(answer.text) < len(endless[0].text)


def _tensor(tokens: list[list[int]]) -> "Tensor":
    import torch

    return torch.tensor(tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batches_of_every_architecture_say_what_each_row_says_alone(architecture: str, policy: Path) -> None:
    """Log-probabilities, rewards and greedy answers, against plain transformers without padding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokens = rows(policy)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture)).eval()
    torch.manual_seed(0)
    reward = AutoModelForSequenceClassification.from_config(tiny_config(architecture, num_labels=1)).eval()
    by_hand, scores, texts = [], [], []
    with torch.no_grad():
        for ids in tokens:
            found = model(_tensor([ids])).logits[0].log_softmax(-1)
            by_hand.append(sum(float(found[place - 1, ids[place]]) for place in range(1, len(ids))))
            scores.append(float(reward.score(reward.base_model(_tensor([ids])).last_hidden_state[:, -1])))
            new = list(ids)
            for _ in range(3):
                new.append(int(model(_tensor([new])).logits[0, -1].argmax()))
                if new[-1] in (2, tokenizer.eos_token_id):
                    break
            texts.append(tokenizer.decode(new[len(ids) :], skip_special_tokens=True))
    scored = [Scored(input_ids=ids, mask=[1] * len(ids)) for ids in tokens]
    assert logps(model, scored, 3) == pytest.approx(by_hand, abs=2e-4)
    assert rewards(reward, tokens, 3) == pytest.approx(scores, abs=1e-5)
    answers = greedy_answers(model, tokenizer, tokens, max_new_tokens=3, batch_size=3)
    assert [answer.text for answer in answers] == texts


def test_a_finished_and_a_cut_off_answer_score_differently_where_padding_is_the_end(policy: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = tiny_config("llama", num_labels=1, pad_token_id=2, eos_token_id=2)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    finished, cut_off, longer = rewards(model, [[5, 6, 7, 2], [5, 6, 7], [5, 6, 7, 8, 9]], batch_size=3)
    assert abs(finished - cut_off) > 1e-4
    assert [finished, cut_off, longer] == pytest.approx(
        [rewards(model, [row], 1)[0] for row in ([5, 6, 7, 2], [5, 6, 7], [5, 6, 7, 8, 9])], abs=1e-5
    )

"""Scores of a batch are those of each row by itself, computed the long way."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tasks.scoring import Scored, greedy_answers, logps, rewards
from tests.tiny import sentence, write_policy

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

    def by_hand(prompt: Sequence[int]) -> str:
        ids = list(prompt)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        return str(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))

    expected = [by_hand(prompt) for prompt in rows(policy)]
    assert greedy_answers(model, tokenizer, rows(policy), max_new_tokens=6, batch_size=batch_size) == expected

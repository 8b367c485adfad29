"""A reward model is read at the last token of each row, whatever token that is, by a head that computes in fp32."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tasks.train.kernels.padding_free import common_tokens, install, is_padding_free, pack
from tasks.train.losses.rewards import install_scores, sequence_scores
from tests.tiny_models import ARCHITECTURES, tiny_config

EOS = 2


def reward_model(architecture: str, **fields: object) -> torch.nn.Module:
    config = tiny_config(architecture, num_labels=1, **fields)
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """The same answer finished and cut off, then a longer one; padded with the token that finishes."""
    ids = torch.tensor([[5, 6, 7, EOS, EOS, EOS], [5, 6, 7, EOS, EOS, EOS], [5, 6, 8, 9, 10, EOS]])
    return ids, torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_those_of_transformers_for_each_row_alone(architecture: str) -> None:
    ids, mask = rows()
    model = reward_model(architecture)
    model.config.get_text_config().pad_token_id = None  # one row at a time: transformers then reads the last token
    with torch.no_grad():
        each = [row[own.bool()].unsqueeze(0) for row, own in zip(ids, mask, strict=True)]
        expected = torch.cat([model(input_ids=row).logits[:, 0] for row in each])
        found = sequence_scores(model, ids, mask)
        install_scores(model)
        forward = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(forward[:, 0], expected, atol=1e-5, rtol=0)
    assert found[0] != found[1], "finished and cut off are two answers"


def test_transformers_reads_a_finished_answer_before_its_end_where_padding_is_that_token() -> None:
    ids, mask = rows()
    model = reward_model("llama", pad_token_id=EOS)
    with torch.no_grad():
        theirs, ours = model(input_ids=ids, attention_mask=mask).logits[:, 0], sequence_scores(model, ids, mask)
    assert theirs[0] == theirs[1]
    assert abs(ours[0] - ours[1]) > 1e-4


def test_a_batch_in_one_line_has_the_same_scores() -> None:
    ids, mask = rows()
    ids, mask = ids[:2], mask[:2]
    model = reward_model("llama", pad_token_id=EOS)
    with torch.no_grad():
        expected = sequence_scores(model, ids, mask)
        assert is_padding_free(model)
        install(model)
        install_scores(model)
        found = model(input_ids=ids, attention_mask=mask, **pack(mask, common_tokens(ids, mask))).logits[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_under_bf16_the_head_computes_in_fp32() -> None:
    ids, mask = rows()
    model = reward_model("llama")
    install_scores(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(input_ids=ids, attention_mask=mask).logits
    assert scores.dtype == torch.float32
    assert (scores != scores.bfloat16().float()).any(), "scores have more than 8 bits"

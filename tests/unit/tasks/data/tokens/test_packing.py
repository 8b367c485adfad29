"""Packed rows: whole, few packs, and none sees another."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from tasks.train.padding_free import collator_for, install, is_packable, unpacked
from tests import tiny
from tests.unit.tasks.data.tokens.tokens import tokenized

LENGTH = 160
Row = dict[str, list[int]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, policy: Path) -> PreTrainedModel:
    """One that is run packed, and one whose rows are padded."""
    if request.param == "llama":
        model = AutoModelForCausalLM.from_pretrained(policy)
        install(model)
    else:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256))
        add_fused_lm_head(model, outputs=("log_probs", "is_top1"))
    assert is_packable(model) == (request.param == "llama")
    return model.eval()


@pytest.fixture(scope="module")
def packs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    rows = tmp_path_factory.mktemp("rows")
    return tokenized(tiny.conversation_rows(20), policy, rows, LENGTH, packing="best_fit").examples.to_list()


def rows_of(pack: Row) -> list[Row]:
    ends = torch.tensor(pack["seq_lengths"]).cumsum(0).tolist()
    columns = ("input_ids", "labels")
    return [
        {name: pack[name][end - length : end] for name in columns}
        for end, length in zip(ends, pack["seq_lengths"], strict=True)
    ]


def logps(model: PreTrainedModel, examples: list[Row], *, are_packs: bool) -> torch.Tensor:
    """Log-probabilities of all trained tokens, in order."""
    collate = collator_for(model, DataCollatorForLanguageModeling(pad_token_id=0))
    with torch.no_grad():
        output = model(**(unpacked(collate) if are_packs else collate)(examples), fused_lm_head=True)
    return output.log_probs[output.label_mask]


def test_packs_hold_every_row_whole_and_once(policy: Path, packs: list[Row], tmp_path: Path) -> None:
    alone = tokenized(tiny.conversation_rows(20), policy, tmp_path, LENGTH).examples.to_list()
    assert sorted(row["input_ids"] for pack in packs for row in rows_of(pack)) == sorted(
        row["input_ids"] for row in alone
    )
    assert all(len(pack["input_ids"]) == sum(pack["seq_lengths"]) <= LENGTH for pack in packs)
    tokens = sum(len(row["input_ids"]) for row in alone)
    assert tokens / LENGTH <= len(packs) < len(alone)
    assert len(packs) <= 1.3 * tokens / LENGTH


def test_a_token_has_the_loss_that_it_has_in_a_row_alone(model: PreTrainedModel, packs: list[Row]) -> None:
    packed = logps(model, packs[:2], are_packs=True)
    alone = torch.cat([logps(model, [row], are_packs=False) for pack in packs[:2] for row in rows_of(pack)])
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)


def test_another_document_in_a_pack_changes_no_loss_of_its_neighbours(model: PreTrainedModel, packs: list[Row]) -> None:
    pack = next(pack for pack in packs if len(pack["seq_lengths"]) > 2)
    first, second, *_ = pack["seq_lengths"]
    ids = list(pack["input_ids"])
    ids[first : first + second] = [(token + 7) % 300 for token in ids[first : first + second]]
    before, after = (logps(model, [{**pack, "input_ids": each}], are_packs=True) for each in (pack["input_ids"], ids))
    ends = torch.tensor([sum(label != -100 for label in row["labels"]) for row in rows_of(pack)]).cumsum(0)
    own = torch.zeros(len(before), dtype=torch.bool)
    own[ends[0] : ends[1]] = True
    torch.testing.assert_close(before[~own], after[~own], atol=1e-6, rtol=0)
    assert not torch.allclose(before[own], after[own], atol=1e-2)


def test_nothing_to_pack_is_no_error(policy: Path, tmp_path: Path) -> None:
    assert len(tokenized(tiny.conversation_rows(3), policy, tmp_path, 4, packing="best_fit")) == 0

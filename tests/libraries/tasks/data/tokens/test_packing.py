"""Packed rows: whole, and in few packs."""

from pathlib import Path

import pytest

from tasks.data.tokens.packing import rows_of
from tasks.dpo import DPO
from tasks.method import Adapter
from tasks.sft import SFT
from tasks.train.padding_free import Example
from tests import tiny
from tests.libraries.tasks.data.tokens.tokens import tokenized

LENGTH = 160


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def packs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    rows = tmp_path_factory.mktemp("rows")
    return tokenized(tiny.conversation_rows(20), policy, rows, LENGTH, packing="best_fit").examples.to_list()


def test_packs_hold_every_row_whole_and_once(policy: Path, packs: list[Example], tmp_path: Path) -> None:
    alone = tokenized(tiny.conversation_rows(20), policy, tmp_path, LENGTH).examples.to_list()
    assert sorted(row["input_ids"] for pack in packs for row in rows_of(pack)) == sorted(
        row["input_ids"] for row in alone
    )
    assert all(len(pack["input_ids"]) == sum(pack["seq_lengths"]) <= LENGTH for pack in packs)
    tokens = sum(len(row["input_ids"]) for row in alone)
    assert tokens / LENGTH <= len(packs) < len(alone)
    assert len(packs) <= 1.3 * tokens / LENGTH


def test_nothing_to_pack_is_no_error(policy: Path, tmp_path: Path) -> None:
    assert len(tokenized(tiny.conversation_rows(3), policy, tmp_path, 4, packing="best_fit")) == 0


def test_packs_have_a_version_of_their_own() -> None:
    """Rows that are not packed give the numbers that they gave: their artifacts stay current."""
    alone, packed = SFT().recipe(), SFT(packing="best_fit").recipe()
    assert packed == {**alone, "packing": "best_fit", "version": SFT.version + 1} and alone["version"] == SFT.version


def test_an_option_whose_numbers_changed_raises_a_version_in_the_recipes_that_set_it() -> None:
    """Fingerprints of stores hang on these numbers."""
    quantized = Adapter(quantization="nf4")
    found = {
        name: (recipe["version"], recipe.get("quantization_version"))
        for name, recipe in {
            "plain": SFT(adapter=Adapter()).recipe(),
            "quantized": SFT(adapter=quantized).recipe(),
            "both": SFT(adapter=quantized, packing="best_fit").recipe(),
            "dpo": DPO(adapter=quantized).recipe(),
        }.items()
    }
    assert found == {"plain": (2, None), "quantized": (2, 2), "both": (3, 2), "dpo": (2, 2)}

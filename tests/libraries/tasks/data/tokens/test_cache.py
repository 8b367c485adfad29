"""Tokens are made once for all that would make the same ones, and made again where they are damaged."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.data.tokens import tokenize_rows as module
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import TokenizedRows, load_or_make, tokens_key
from tasks.model.chat_template import CHATML, HERMES
from tests import tiny
from tests.libraries.tasks.data.tokens.tokens import rows_input

SFT = Tokenization(kind=Kind.CONVERSATIONS, max_length=64)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny.write_tokenizer(tmp_path / "model")
    tiny.write_rows(tmp_path / "rows", tiny.conversation_rows(12), tiny.conversation_rows(3))
    return tmp_path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each file that is made into tokens."""
    files, make = [], module._make
    monkeypatch.setattr(module, "_make", lambda options, rows, *rest: files.append(rows) or make(options, rows, *rest))
    return files


def load(root: Path, options: Tokenization = SFT, model: str = "model", **how: str) -> TokenizedRows:
    return load_or_make(options, rows_input(root / "rows"), root / model, root / "cache", 1, **how)


def test_the_same_tokens_are_made_once_and_read_from_the_file(root: Path, made: list[Path]) -> None:
    first, second = load(root), load(root)
    assert len(made) == 1
    assert first.columns == second.columns and first.stats == second.stats
    assert second.examples.cache_files  # mapped, not in memory
    without = load_or_make(SFT, rows_input(root / "rows"), root / "model", None, 1)
    assert without.columns == first.columns and without.stats == first.stats


def test_the_rows_of_examples_are_named_the_longest_first(root: Path) -> None:
    middle = sorted(row["length"] for row in load(root).outcomes.to_list())[6]
    found = load(root, replace(SFT, max_length=middle, too_long="drop"))
    kept = [row for row in found.outcomes.to_list() if row["dropped"] is None]
    assert 2 < len(kept) < 12
    two = sorted((kept[2], kept[0]), key=lambda row: -row["length"])
    assert found.named([2, 0]) == ", ".join(f"{row['row_id']} ({row['length']} tokens)" for row in two)
    assert load(root).named([0] * 20).endswith(" and 4 more")
    assert load(root, replace(SFT, packing="bfd")).named([0]) == ""  # an example is several rows


def test_whoever_reads_them_makes_them_young_again(root: Path, made: list[Path]) -> None:
    load(root)
    (entry,) = (root / "cache" / "tokens").glob("*/")
    os.utime(entry, (0, 0))
    load(root)
    assert entry.stat().st_mtime > 0 and len(made) == 1


def test_whatever_decides_the_tokens_makes_others(root: Path, made: list[Path]) -> None:
    load(root)
    tiny.write_tokenizer(root / "other", vocab_size=290)
    changes = [
        *(replace(SFT, **change) for change in (
            {"max_length": 63}, {"too_long": "drop"}, {"max_prompt_length": 9}, {"chat_template": "hermes"},
        )),
    ]  # fmt: skip
    for options in changes:
        load(root, options)
    load(root, model="other")
    load(root, side="held_out.parquet")
    (root / "model" / "chat_template.jinja").write_text(HERMES.replace("Tools", "Functions"))
    load(root)
    tiny.write_rows(root / "rows", tiny.conversation_rows(13))
    load(root)
    assert len(made) == 1 + len(changes) + 4


def test_a_template_that_will_be_written_into_the_model_has_its_tokens_already(root: Path, made: list[Path]) -> None:
    (root / "model" / "chat_template.jinja").unlink()
    before = load(root, replace(SFT, chat_template="chatml"))
    (root / "model" / "chat_template.jinja").write_text(CHATML)
    assert load(root).stats == before.stats
    assert len(made) == 1


def test_a_model_that_lacks_the_templates_tokens_is_refused(root: Path) -> None:
    tokenizer = root / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_start|>", "<|start|>"))
    with pytest.raises(ConfigError, match=r"chat_template=hermes needs .* lacks <\|im_start\|>"):
        load(root, replace(SFT, chat_template="hermes"))


@pytest.mark.parametrize("file", ["tokens.arrow", "rows.arrow", "account.json", "digests.json"])
def test_a_damaged_entry_is_made_again(root: Path, made: list[Path], file: str) -> None:
    first = load(root)
    columns = first.columns  # before its file is written to
    (path,) = (root / "cache" / "tokens").glob(f"*/{file}")
    given = path.read_bytes()
    middle = len(given) // 2
    for damaged in (given[:-20], given[:middle] + bytes([given[middle] ^ 128]) + given[middle + 1 :], None):
        made.clear()
        path.unlink() if damaged is None else path.write_bytes(damaged)
        again = load(root)
        assert (again.columns, again.stats, len(made)) == (columns, first.stats, 1)
        assert path.read_bytes() == given


def test_what_a_killed_process_left_does_not_stand_in_the_way(root: Path, made: list[Path]) -> None:
    load(root)
    (entry,) = (root / "cache" / "tokens").glob("*/")
    entry.rename(entry.with_suffix(".draft"))
    assert len(load(root)) == 12
    assert len(made) == 2
    assert [path.name for path in (root / "cache" / "tokens").glob("*/")] == [entry.name]


def test_of_several_that_want_them_at_once_one_makes_them(root: Path, made: list[Path]) -> None:
    with ThreadPoolExecutor(3) as threads:
        assert [len(rows) for rows in threads.map(lambda _: load(root), range(3))] == [12, 12, 12]
    assert len(made) == 1


def test_half_of_the_last_share_is_accepted_and_less_is_not(root: Path) -> None:
    rows = load(root)
    percent = rows.stats.trained_percent
    for previous in (None, percent, 2 * percent, 0.0):
        rows.require_like(previous)
    with pytest.raises(DataError) as error:
        rows.require_like(2 * percent + 1, "sft")
    assert f"{percent:.3g} % of the tokens get loss" in str(error.value)
    assert f"trained {2 * percent + 1:.3g} %" in str(error.value)
    assert "accept_label_drop=[sft]" in str(error.value)


PACKED = replace(SFT, packing="best_fit")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    return tmp_path


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("sentencepiece.bpe.model", "pieces"),
        ("tekken.json", "{}"),
        ("ctrl-vocab.json", "{}"),
        ("tokenizer_config.json", "{}"),
        ("config.json", '{"model_type": "qwen2", "hidden_size": 8}'),
    ],
)
def test_each_file_that_a_tokenizer_is_made_from_decides(model: Path, file: str, content: str) -> None:
    before = tokens_key(SFT, "rows", model)
    (model / file).write_text(content)
    assert tokens_key(SFT, "rows", model) != before


def test_weights_and_settings_of_a_model_do_not(model: Path) -> None:
    before = tokens_key(SFT, "rows", model)
    (model / "config.json").write_text('{"model_type": "llama", "hidden_size": 16}')
    for name in ("model.safetensors", "generation_config.json"):
        (model / name).write_text("{}")
    assert tokens_key(SFT, "rows", model) == before


@pytest.mark.parametrize("library", ["fastokens", "jinja2", "tokenizers", "transformers", "trl"])
def test_releases_of_what_makes_tokens_decide(model: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    before = [tokens_key(options, "rows", model) for options in (SFT, PACKED)]
    monkeypatch.setattr(module, "version", lambda name: "0.0" if name == library else version(name))
    same = [tokens_key(options, "rows", model) == key for options, key in zip((SFT, PACKED), before, strict=True)]
    assert same == [library == "trl", False]  # trl packs, and does nothing else

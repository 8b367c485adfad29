"""Prompts keep the tools that they are asked with."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tasks.chat_template import HERMES
from tasks.held_out_rows import answered_tokens, distinct_prompts, pair_tokens, prompt_tokens
from tests import tiny

SUM = [{"role": "user", "content": "sum"}]


def pair(row_id: str, tool: str | None = None) -> dict[str, object]:
    tools = None if tool is None else json.dumps([{"type": "function", "function": {"name": tool}}])
    answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    return {"row_id": row_id, "prompt": SUM, **answers, "kind": None, "tools": tools}


ROWS = [pair("a", "adder"), pair("b", "adder"), pair("c", "counter"), pair("d")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory: Path = tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=HERMES)
    return AutoTokenizer.from_pretrained(directory)


def test_prompts_with_other_tools_are_others(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = distinct_prompts(ROWS, 9)
    assert len(prompts) == len({prompt.name for prompt in prompts}) == 3
    assert len(distinct_prompts(ROWS, 2)) == 2
    groups = [row.group for row in pair_tokens(ROWS, tokenizer, 10**4).chosen]
    assert groups == [prompts[0].name, prompts[0].name, prompts[1].name, prompts[2].name]


def test_prompts_and_answers_are_read_with_their_tools_as_in_training(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = distinct_prompts(ROWS, 9)
    trained = pair_tokens([ROWS[0], ROWS[2], ROWS[3]], tokenizer, 10**4).chosen
    asked = prompt_tokens(prompts, tokenizer, 10**4)
    assert answered_tokens(prompts, ["chosen"] * 3, tokenizer, 10**4) == [row.input_ids for row in trained]
    assert asked == [row.input_ids[: len(ids)] for row, ids in zip(trained, asked, strict=True)]
    assert ["adder" in tokenizer.decode(ids) for ids in asked] == [True, False, False]

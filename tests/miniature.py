"""The default pipeline at a size that a test can train: the overrides, and rows of a user's own."""

import json
from pathlib import Path

from tests import tiny

MODEL = (
    "stages.base.method.vocab_size=512",
    "stages.base.method.hidden_size=32",
    "stages.base.method.intermediate_size=64",
    "stages.base.method.num_layers=2",
    "stages.base.method.num_heads=2",
)
STEPS = (
    *(f"stages.{stage}.method.num_steps=4" for stage in ("cpt", "sft", "reward", "dpo")),
    "stages.cpt.method.max_length=32",
    "stages.evaluate.method.num_rows=16",
    "stages.evaluate.method.num_prompts=4",
    "stages.evaluate.method.max_new_tokens=8",
    "resources.cpus_per_worker=1",
)


def write_own_rows(folder: Path, count: int = 60) -> tuple[str, ...]:
    """JSON Lines files as users have them, and the overrides that name them."""
    rows = {
        "corpus": [{"text": row["text"]} for row in tiny.text_rows(count)],
        "instructions": [{"messages": row["messages"]} for row in tiny.conversation_rows(count)],
        "preferences": [
            {slot: row[slot][-1]["content"] for slot in ("prompt", "chosen", "rejected")}  # type: ignore[index]
            for row in tiny.preference_rows(count)
        ],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tuple(f"sources.{name}.path={name}.jsonl" for name in rows)

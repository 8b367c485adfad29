"""Shipped pipelines at a size that a test can train: the overrides, and rows of a user's own."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from flows.declare.config import CONF, load_pipeline
from tasks.gate import Gate
from tasks.teacher_answers import TeacherAnswers
from tests import tiny

# Of every shipped pipeline but that of a real model, which has a test of its own (test_smollm2.py), and that which only
# adds retraining to another.
SHIPPED = sorted(
    {path.stem for path in (CONF / "pipeline").glob("*.yaml")} - {"smollm2-one-sentence", "cpt-sft-dpo-retrain"}
)
# Field of a method -> its value in miniature.
SMALL = {
    "num_steps": 4, "num_rows": 16, "num_prompts": 4, "num_questions": 4, "max_new_tokens": 8,
    "max_completion_length": 8, "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2,
    "num_heads": 2, "num_resamples": 100, "unfinished": "keep",
    "equal_rewards_patience": "null",  # no answer of a model of four steps is right
}  # fmt: skip

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


def overrides_of(pipeline: str, *, gated: bool = True, **values: object) -> Iterator[str]:
    """Overrides that make a shipped pipeline small.

    Args:
        gated: keep its gate, which refuses a model of four steps.
        values: of fields, such as ``num_steps=120``, in place of those of ``SMALL``.
    """
    yield f"pipeline={pipeline}"
    yield "resources.cpus_per_worker=1"
    for name, stage in load_pipeline([f"pipeline={pipeline}"]).stages.items():
        if isinstance(stage.method, Gate) and not gated:
            yield f"~stages.{name}"
            continue
        if isinstance(stage.method, TeacherAnswers):  # in four steps a teacher learns to say nothing
            yield f"stages.{name}.method.sampling={{temperature:2.0}}"
        known = {each.name for each in fields(stage.method)}
        for field, value in {**SMALL, **values}.items():
            if field in known:
                yield f"stages.{name}.method.{field}={value}"


def trainings_of(pipeline: str) -> list[str]:
    """The stages of a shipped pipeline that take optimizer steps."""
    return [name for name, stage in load_pipeline([f"pipeline={pipeline}"]).stages.items() if stage.method.trains]


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

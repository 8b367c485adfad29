"""The walks of docs/architecture.md: a row is followed from its JSON line to the loss, and ``beta`` from the command
line to the loss and the manifest, through the functions that take them and hand them on. The files of these functions
are those that the page names."""

import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType

import pyarrow as pa
import pytest
import torch
from datasets import Dataset

from flows.__main__ import main
from flows.declare.config import load_pipeline
from lineage.artifact import Kind, Source
from lineage.store import Entry
from tasks.context import Resources, TrainContext
from tasks.method import Input
from tasks.prepare_data import PrepareConversations, PreparePreferences
from tasks.train.run import TrainingRun
from tests import tiny, training

ROOT = Path(__file__).parents[2]
MARK = "qzxvqzxv"  # in every answer
BETA = 0.2345678
MOST = 10
OURS = tuple(f"{ROOT}/{package}/" for package in ("flows", "tasks", "lineage"))
_FILE = re.compile(r"^\| `(tasks/[\w/]+\.py)`", re.MULTILINE)


class Followed:
    """The files through which values with the mark pass.

    Args:
        tokens: that the mark became.
        ends: functions in which the way of a value ends.

    Attributes:
        handed_on: files whose functions return or yield such a value to another file, or call on to an end.
        taken: files whose functions get one as an argument.
    """

    def __init__(self, tokens: list[int], ends: Collection[CodeType] = ()) -> None:
        self.ends = ends
        self.is_text = True  # until the configuration is read: then a copy of the command's text is recorded
        self.tokens = ",".join(map(str, tokens))
        self.handed_on = set[str]()
        self.taken = set[str]()

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        file = _ours(frame.f_code.co_filename)
        if file is None or event not in ("call", "return"):
            return
        if event == "call" and frame.f_code in self.ends:
            self.handed_on |= set(filter(None, (_ours(each.f_code.co_filename) for each in _callers(frame))))
        if event == "return" and file not in self.handed_on:
            caller = frame.f_back and _ours(frame.f_back.f_code.co_filename)
            if caller != file and self.holds(value):
                self.handed_on.add(file)
        if event == "return" and frame.f_code is load_pipeline.__code__:
            self.is_text = False
        if event == "call" and file not in self.taken:
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            if any(self.holds(frame.f_locals.get(name)) for name in names):
                self.taken.add(file)

    def holds(self, value: object) -> bool:
        """Whether a value contains the mark, as text, bytes or tokens, at any depth."""
        if isinstance(value, float):
            return value == BETA
        if isinstance(value, str) and str(BETA) in value:
            return self.is_text
        if isinstance(value, str | bytes):
            return (MARK if isinstance(value, str) else MARK.encode()) in value  # type: ignore[operator]
        if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            return f",{self.tokens}," in f",{','.join(map(str, value))},"
        return any(map(self.holds, _parts(value)))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and all that led to it."""
    while frame:
        yield frame
        frame = frame.f_back


def _parts(value: object) -> Iterable[object]:
    """What a value consists of; nothing, where it is not data."""
    match value:
        case list() | tuple():
            return value
        case Mapping():
            return value.values()
        case torch.Tensor() if not value.is_floating_point():
            return [value.detach().flatten().tolist()]
        case pa.RecordBatch() | pa.Table() | pa.Array() | pa.ChunkedArray():
            return [value.to_pylist()]
        case pa.Buffer():  # a stream, as the conversion returns it
            return [pa.ipc.open_stream(value).read_all()]
        case Dataset():
            return [value[:]]
        case partial():
            return value.args
    is_record = is_dataclass(value) and not isinstance(value, type)
    return [getattr(value, each.name, None) for each in fields(value)] if is_record else ()


@cache
def _ours(name: str) -> str | None:
    """A file of ours, relative to the checkout."""
    return name.removeprefix(f"{ROOT}/") if name.startswith(OURS) else None


@contextmanager
def following(followed: Followed) -> Iterator[None]:
    sys.setprofile(followed)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_a_row_passes_the_files_that_the_page_names(tmp_path: Path, name: str) -> None:
    import trl.trainer.dpo_trainer
    import trl.trainer.sft_trainer  # noqa: F401  # before the row is followed: every call costs
    from transformers import AutoTokenizer

    import tasks.data.preparing.prepare
    import tasks.train.run  # noqa: F401

    preparing = {"dpo": PreparePreferences, "sft": PrepareConversations}[name]
    answer = "chosen" if name == "dpo" else "completion"
    rows = [
        {"prompt": tiny.sentence(i, 4), answer: f"{tiny.sentence(i, 3)} {MARK} a"}
        | ({"rejected": f"b {MARK} {i}"} if name == "dpo" else {})
        for i in range(16)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = tiny.write_policy(tmp_path / "policy")
    encoded = AutoTokenizer.from_pretrained(policy)(f" {MARK} ", add_special_tokens=False)["input_ids"]
    followed = Followed(encoded[2:-2])  # its ends may merge with what is around
    source = Input(name="rows", kind=Kind.ROWS, fingerprint="", path=file, source=Source(path=str(file)))
    stage = training.method(name, num_steps=1)
    prepared = Input(name="rows", kind=preparing.produces, fingerprint="f" * 64, path=tmp_path / "prepared")
    start = Input(name="policy", kind=Kind.CHECKPOINT, fingerprint="e" * 64, path=policy)
    with following(followed), training.one_thread():
        context = TrainContext(output_dir=prepared.path, work_dir=tmp_path, resources=Resources(cpus_per_worker=1))
        preparing(held_out=0.3).run({"rows": source}, context)
        training.fitted(stage, {"policy": start, stage.reads.slot: prepared}, tmp_path / "output")
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk, beside = page.split("## A row: ")[1].split("\n## ")[0].split("Beside the way")
    named = _FILE.findall(walk)
    assert followed.handed_on == set(named)
    assert len(named) <= MOST
    assert followed.taken <= {*named, *_FILE.findall(beside)}


def test_beta_passes_the_files_that_the_page_names(root: Path, tmp_path: Path) -> None:
    """From the command line to TRL's trainer and to the manifest, in one process."""
    import ray.train.torch  # noqa: F401  # before the value is followed: every call costs
    import trl.trainer.dpo_trainer  # noqa: F401

    pairs = ({"prompt": f"Say {i}", "chosen": tiny.sentence(i, 4), "rejected": f"no {i}"} for i in range(40))
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    overrides = [
        "pipeline=dpo", f"model={root}/policy", f"data={file}", f"store={tmp_path}/store", "tracking=none",
        "resources=foreground", "stages.dpo.method.num_steps=1", "stages.dpo.method.global_batch_size=8",
    ]  # fmt: skip
    assert main(["stage", "preferences", *overrides]) == 0
    followed = Followed([], ends=(TrainingRun.trl.__code__, Entry.commit.__code__))
    with following(followed):
        assert main(["stage", "dpo", *overrides, f"stages.dpo.method.beta={BETA}"]) == 0
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = page.split("## `beta`: ")[1].split("Beside the way")[0]
    numbered = re.findall(r"^\d+\. `([\w/]+\.py)`", walk, re.MULTILINE)
    assert followed.handed_on == set(numbered)
    assert len(numbered) <= MOST

"""Data stages on rows that a test makes up, and what they wrote."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from flows.declare.pipeline import Stage
from flows.planning.checks import require_metric
from lineage.artifact import Kind, Source
from tasks.context import Metrics, Resources, TrainContext
from tasks.method import Input, Inputs, Method

Fields = Mapping[str, object]
Rows = list[dict[str, object]]
SIDES = ("train", "held_out")


def prepare(
    directory: Path, method: Method, rows: Sequence[Fields], out: str = "out", *, cpus: int = 1, **source: object
) -> dict[str, float]:
    """Runs a stage on rows in one slot.

    Args:
        source: further fields of the source.
    """
    return prepare_slots(directory, method, {"rows": (rows, source)}, out, cpus=cpus)


def prepare_slots(
    directory: Path,
    method: Method,
    slots: Mapping[str, tuple[Sequence[Fields], Mapping[str, object]]],
    out: str = "out",
    *,
    cpus: int = 1,
) -> dict[str, float]:
    """Runs a stage on several slots: each of rows, and further fields of their source."""
    inputs = {}
    for slot, (rows, fields) in slots.items():
        file = directory / f"{slot}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = Source(path=str(file), **fields)  # type: ignore[arg-type]
        inputs[slot] = Input(name=slot, kind=Kind.ROWS, fingerprint="", path=file, source=source)
    resources = Resources(cpus_per_worker=cpus)
    context = TrainContext(output_dir=directory / out, work_dir=directory, resources=resources)
    return named(method, inputs, method.run(inputs, context))


def named(method: Method, inputs: Inputs, metrics: Metrics) -> dict[str, float]:
    """The metrics of a stage, of which its method knows each name before it runs."""
    stage = Stage(method=method, inputs=dict.fromkeys(inputs, ""), resources=Resources())
    for metric in metrics:
        require_metric(f"{type(method).__name__}.metrics", "stage", stage, metric)
    return dict(metrics)


def side(directory: Path, name: str, out: str = "out") -> Rows:
    rows: Rows = pq.read_table(directory / out / f"{name}.parquet").to_pylist()
    return rows


def texts(directory: Path, name: str, out: str = "out") -> list[str]:
    return [str(row["text"]) for row in side(directory, name, out)]


def report(directory: Path, out: str = "out") -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / out / "report.json").read_text())
    return found


def numbered(count: int, name: str = "row") -> list[Fields]:
    return [{"text": f"{name} {index}"} for index in range(count)]

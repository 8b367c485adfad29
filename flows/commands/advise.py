"""``posttrain advise``: a recipe for this data, model and machine, with the reason and the source of every value."""

import argparse
import json
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.arguments import recorded_cli_args, write_output
from lineage.artifact import Kind
from lineage.errors import DataError
from lineage.filesystem.files import local_path
from tasks.judgement.advice import (
    BATCH_FACTOR,
    COMPUTE,
    DOUBLE,
    FEW_ROWS,
    FEWEST_STEPS,
    FORMAT,
    LEAST_VALIDATIONS,
    RATIO,
    SIZES,
    VALIDATION,
    Case,
    Range,
    Row,
    Value,
    case_of,
    most_steps_between,
    most_warmup_of,
)
from tasks.method import Training

if TYPE_CHECKING:
    from flows.planning.plan import Plan, PlannedStage

_ASSUMED_ROWS = 20_000  # if they cannot be counted: a medium size
_BYTES_PER_TOKEN = 4  # of texts, about
_MOST_WORKERS = 9
PIPELINE = "the pipeline"
MACHINE = "this machine"
LENGTHS = ("method.num_epochs", "method.num_steps")
_BATCH = "method.global_batch_size"
_SETTINGS = (
    "method.global_batch_size", "method.num_epochs", "resources.micro_batch_size", "method.learning_rate",
    "method.optimizer.weight_decay", "method.schedule.name", "method.schedule.warmup",
    "method.schedule.min_learning_rate", "method.max_grad_norm", "method.adapter.rank", "method.adapter.alpha",
    "method.adapter.dropout", FORMAT, DOUBLE, COMPUTE, "method.beta", "method.sampling.temperature", VALIDATION,
    "resources.save_steps", "resources.keep_last",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Advised:
    """One value of a recipe.

    Args:
        now: the current value of the pipeline.
    """

    field: str
    value: Value | None
    now: Value | None
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The recommended values for a stage.

    Args:
        rows: number of training rows, and how it is known.
        short: that the training is too short to change answers, and what would; empty: it is not, or nothing is known.
        passes: how often the rows are read; empty: unknown.
    """

    stage: str
    rows: str
    values: tuple[Advised, ...]
    short: str = ""
    passes: str = ""

    def overrides(self) -> list[str]:
        return [f"stages.{self.stage}.{each.field}={text_of(each.value)}" for each in self.values]


def add_advise(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"A first word without = is a STAGE; without one, all stages that train are advised.\n\n{parser.epilog}"
    )
    parser.add_argument(
        "--out", type=local_path, metavar="FILE.yaml", help="write the overrides, for --overrides-from FILE"
    )


def run_advise(options: argparse.Namespace) -> int:
    name = next((word for word in options.overrides if "=" not in word), None)
    options.overrides = [word for word in options.overrides if word != name]
    recipes, plan = advised_recipes(name, options.overrides, options.config_dir)
    savings = _savings(plan, recipes)
    if adapted := [word for each in savings.values() for word in each if ".method." in word]:
        recipes, plan = advised_recipes(name, [*options.overrides, *adapted], options.config_dir)
        savings = _savings(plan, recipes)
    recipes = [_saving(each, [*adapted, *savings.get(each.stage, [])]) for each in recipes]
    overrides = [word for each in recipes for word in each.overrides()]
    if options.out:
        write_output(options.out, _yaml(recipes, options.overrides, options.config_dir), keeps=True)
    if options.json:
        print(json.dumps({"stages": [asdict(each) for each in recipes], "overrides": overrides}, indent=2))
        return 0
    print("\n\n".join(_table(each) for each in recipes))
    if options.out:
        print(f"\nwritten: posttrain plan --overrides-from {shlex.quote(str(options.out))}")
    else:
        advised = {word.partition("=")[0] for word in overrides}
        own = [word for word in recorded_cli_args(options) if word.partition("=")[0] not in advised]
        print("\npaste:\n" + " \\\n  ".join(["posttrain plan", *map(shlex.quote, [*own, *overrides])]))
    return 0


def advised_recipes(name: str | None, cli_args: list[str], config_dir: Path | None) -> tuple[list[Recipe], "Plan"]:
    """The recipes of a stage or of all trainings, and the plan that follows them.

    Raises:
        ConfigError: there is no such training.
    """
    from flows.declare.config import load_pipeline
    from flows.declare.pipeline import listed
    from flows.planning.plan import make_plan
    from lineage.errors import ConfigError

    plan = make_plan(replace(load_pipeline(cli_args, config_dir), advice="off"))
    stages = [planned.name for planned in plan.stages if isinstance(planned.stage.method, Training)]
    if name is not None and name not in stages:
        raise ConfigError(f"{name}: no stage that trains; there are: {listed(name, stages)}")
    found = [recipe(plan, plan.stage(stage)) for stage in ([name] if name else stages)]
    overrides = [word for each in found for word in each.overrides()]
    return found, make_plan(replace(load_pipeline([*cli_args, *overrides], config_dir), advice="off"))


def _savings(plan: "Plan", recipes: Sequence[Recipe]) -> dict[str, list[str]]:
    """Stage -> the overrides that make it fit into memory, for those that the plan would refuse."""
    from flows.planning.adapter_choice import capacity
    from flows.planning.estimates import Estimator, History
    from flows.planning.fit import cheapest

    estimator, found = Estimator(plan, History.of(plan.home)), dict[str, list[str]]()
    for planned in (plan.stage(each.stage) for each in recipes):
        held, need = capacity(planned.stage.resources), estimator.estimate(planned)
        if held and need and need.least > held and planned.stage.resources.check_memory and not planned.runs_elsewhere:
            found[planned.name] = cheapest(estimator, planned, held).overrides
    return found


def _saving(found: Recipe, cli_args: Sequence[str]) -> Recipe:
    """A recipe with overrides that save memory."""
    values = {each.field: each for each in found.values}
    for word in cli_args:
        field, _, text = word.removeprefix(f"stages.{found.stage}.").partition("=")
        if not field.startswith("stages."):  # of another stage
            now, value = (values[field].now if field in values else None), int(text) if text.isdecimal() else text
            values[field] = Advised(field=field, value=value, now=now, reason="to fit into memory", source=MACHINE)
    return replace(found, values=tuple(sorted(values.values(), key=lambda each: each.field != "method.adapter")))


def recipe(plan: "Plan", planned: "PlannedStage") -> Recipe:
    """The recommended settings of a training stage."""
    from flows.planning.advice import is_from_scratch

    method, resources = planned.stage.method, planned.stage.resources
    assert isinstance(method, Training)
    num_rows, counted, held_out = _rows(plan, planned)
    length = planned.hyperparameters
    assert length
    machine = list(_machine(planned))
    case = case_of(method, resources, num_rows or _ASSUMED_ROWS, None, length.num_epochs)
    scratch = is_from_scratch(plan.pipeline, planned.name)
    writer = _Writer(
        case=case, method=method, num_rows=num_rows or _ASSUMED_ROWS, values={},
        kept="kept; the ranges are for pretrained models, and this one is made from scratch" if scratch else "",
        workers=next(int(each.value or 1) for each in machine if each.field == "resources.num_workers"),
        validates=held_out is None or held_out >= _BYTES_PER_TOKEN * method.max_length,
    )  # fmt: skip
    for field in _SETTINGS:
        writer.add(field)
    size = "" if num_rows else f"; {_ASSUMED_ROWS:,} are assumed"
    values, short = (*writer.values.values(), *machine), ""
    if num_rows and not scratch and method.name() == "SFT":
        short = writer.too_short(planned.name)
    passes = writer.passes() if num_rows else ""
    return Recipe(stage=planned.name, rows=counted + size, values=values, short=short, passes=passes)


@dataclass(frozen=True, kw_only=True)
class _Writer:
    """Chooses the values of a stage in order; later ones depend on earlier ones.

    Args:
        kept: why all values are kept; empty: they are compared with the table.
        workers: number of workers, which times the micro batch must divide the global batch.
        validates: whether the texts that are held out fill a chunk of ``max_length``.
    """

    case: Case
    method: Training
    num_rows: int
    kept: str
    workers: int
    validates: bool
    values: dict[str, Advised]

    def add(self, field: str) -> None:
        """Chooses one value."""
        now = self.case.values.get(field)
        row = self._row(field)
        length = (field, now)  # of a stage with steps, these are kept, and not the epochs that they are
        if field == "method.num_epochs" and self.method.num_steps is not None:
            length = ("method.num_steps", self.method.num_steps)
        if row is None or self.kept:
            if length[1] is not None:
                reason = self.kept or "kept; the documents have no range for it"
                self._put(length[0], length[1], length[1], reason, PIPELINE)
            return
        accepted = _accepted(row)
        if now is not None and accepted and self._keeps(field, now, row):
            if field in (FORMAT, DOUBLE, COMPUTE):  # unset fields keep their defaults, and with them the fingerprint
                return
            unit = f" epochs, as {length[1]} steps" if length[0] != field else _unit(field, row)
            self._put(length[0], length[1], length[1], f"kept, inside {accepted.text}{unit}", row.source)
            return
        value, why = self._value(field, row)
        text = (
            f"{accepted.text}{f' for {SIZES[row.size]}' if row.size else ''}" if accepted else "the document's default"
        )
        self._put(field, value, now, f"{text}{_unit(field, row)}{why}", row.source)
        if field == FORMAT:
            self._put("method.adapter.quantization", None, None, f"{FORMAT} names the format", row.source)
        if field == "method.num_epochs" and self.method.num_steps is not None:
            self._put("method.num_steps", None, self.method.num_steps, "epochs are the length", row.source)

    def passes(self) -> str:
        """How often the rows are read: ``passes over your rows: 118``."""
        return f"passes over your rows: {self._steps() * self._batch() / self.num_rows:.3g}"

    def too_short(self, stage: str) -> str:
        """That the steps are too few to change answers, and what would; empty: they are not."""
        steps = self._steps()
        if steps >= FEWEST_STEPS or self.num_rows >= FEW_ROWS or self.case.tuned != "full":
            return ""
        return (
            f"{stage}: {self.num_rows:,} rows, {steps} steps of {self._batch()} on all weights: too few to change "
            "answers; adapter=lora has values for few rows (posttrain advise adapter=lora)"
        )

    def _put(self, field: str, value: Value | None, now: Value | None, reason: str, source: str) -> None:
        self.values[field] = Advised(field=field, value=value, now=now, reason=reason, source=source)

    def _row(self, field: str) -> Row | None:
        """The row of the table for a field; None: there is none, or the stage does not use the field."""
        if field == VALIDATION:
            reads = getattr(self.method, "reads", None)
            if self.method.has_own_loop or reads is None or not reads.trained or not self.validates:
                return None
        elif field == "method.schedule.min_learning_rate":
            if not str(self._chosen("method.schedule.name")).startswith("cosine"):
                return None
        elif not field.startswith("resources.") and field not in self.case.values:
            return None
        if field == "method.adapter.alpha" and self.case.tuned == "lora":
            field = RATIO
        rows = self._with_steps().rows(field)
        advised = [row for row in rows if row.advised is not None]
        bounds = [row for row in rows if row.recommended and row.permissible]
        return next(iter([*reversed(advised), *bounds]), None)

    def _keeps(self, field: str, now: Value, row: Row) -> bool:
        if field == "method.adapter.alpha" and row.field == RATIO:
            now = float(now) / float(self._chosen("method.adapter.rank") or 1)
        if field == "resources.micro_batch_size" and now == "auto":
            return True
        if field == "resources.micro_batch_size" and self._batch() % (self.workers * int(now)):
            return False
        bound = _accepted(row)
        if row.size == "few" and field == "method.num_epochs" and self._steps() < FEWEST_STEPS:
            return False
        case = replace(self._with_steps(), values={**self.case.values, row.field: now})
        return bound is not None and case.is_inside(row, bound)

    def _value(self, field: str, row: Row) -> tuple[Value, str]:
        """The value of a row, adapted to the values chosen before, and a note on the adaptation."""
        value = row.advised
        if value is None:
            assert row.recommended
            nearest = row.recommended.nearest(float(self._chosen(field) or 0))
            value = int(nearest) if nearest.is_integer() else nearest
        batch = self._batch()
        if row.field == RATIO:
            return int(float(value) * float(self._chosen("method.adapter.rank") or 1)), ""
        if row.size == "few" and field == "method.num_epochs" and row.recommended:
            epochs = math.ceil(FEWEST_STEPS * batch / self.num_rows)
            return max(int(value), int(row.recommended.nearest(epochs))), f"; at least {FEWEST_STEPS} steps"
        if row.field == "method.learning_rate":
            return self._rate(float(value), batch, row)
        if row.field == "method.schedule.warmup":
            steps = self._steps()
            if row.size == "short":
                value = min(max(5, min(10, steps // 20)), most_warmup_of(steps))
            elif row.permissible and float(value) * steps not in row.permissible:
                value = 1000
            return value, f"; {steps} steps in all"
        if field == VALIDATION and (most := most_steps_between(self._steps())) < float(value):
            return most, f"; at least {LEAST_VALIDATIONS} in {self._steps()} steps"
        if field == "resources.micro_batch_size":
            sizes = [size for size in range(1, int(value) + 1) if batch % (self.workers * size) == 0]
            return max(sizes, default=1), ""
        return value, ""

    def _rate(self, value: float, batch: int, row: Row) -> tuple[Value, str]:
        """The learning rate for a global batch that is not the advised one."""
        usual = next((int(each.advised) for each in reversed(self.case.rows(_BATCH)) if each.advised), batch)
        if usual == batch or not row.recommended:
            return value, ""
        scaled = row.recommended.nearest(value * BATCH_FACTOR ** math.log2(batch / usual))
        return float(f"{scaled:.2g}"), f"; x{BATCH_FACTOR} per doubling of a batch of {usual}"

    def _chosen(self, field: str) -> Value | None:
        return self.values[field].value if field in self.values else self.case.values.get(field)

    def _batch(self) -> int:
        return int(self._chosen(_BATCH) or self.method.global_batch_size)

    def _steps(self) -> int:
        epochs, num_steps = self._chosen("method.num_epochs"), self.method.num_steps
        replaced = "method.num_steps" in self.values and self.values["method.num_steps"].value is None
        if num_steps and not replaced:
            return num_steps
        return max(1, math.ceil(float(epochs or 1) * self.num_rows / self._batch()))

    def _with_steps(self) -> Case:
        return replace(self.case, num_steps=self._steps())


def _accepted(row: Row) -> Range | None:
    """The values of a row that are kept: the recommended ones, or the permissible ones where none is advised."""
    is_permissible = row.advised is None or row.silent
    return (is_permissible and row.permissible) or row.recommended or row.permissible


def _unit(field: str, row: Row) -> str:
    return " x rank" if row.field == RATIO and field != RATIO else ""


def _machine(planned: "PlannedStage") -> Iterator[Advised]:
    from flows.stages.resources import visible_gpus

    gpus, now, method = len(visible_gpus()), planned.stage.resources, planned.stage.method
    seen = f"{gpus} GPU{'s' * (gpus != 1)}" if gpus else f"{os.cpu_count()} CPUs, no GPU"
    precision, batch = str(getattr(method, "precision", "fp32")), int(getattr(method, "global_batch_size", 1))
    workers = next(count for count in range(max(1, min(gpus, _MOST_WORKERS)), 0, -1) if batch % count == 0)
    for field, value, before in (
        ("resources.gpus_per_worker", min(1, gpus), now.gpus_per_worker),
        ("resources.num_workers", workers, now.num_workers),
        ("method.precision", "bf16" if gpus else precision, precision),
    ):
        yield Advised(field=field, value=value, now=before, reason=seen, source=MACHINE)


def _rows(plan: "Plan", planned: "PlannedStage") -> tuple[int | None, str, int | None]:
    """Number of rows that a stage trains on (None: unknown), how it is known, and the bytes of texts that are held out
    (None: unknown, or rows are no texts that are cut into chunks)."""
    from tasks.data.preparing.options import REPLAY, Prepare
    from tasks.judgement.check_rows import rows_slot

    assert planned.hyperparameters
    if prepared := planned.hyperparameters.num_rows:
        return prepared, f"{prepared:,} rows for training (prepared)", None
    rows_input = planned.inputs.get(rows_slot(planned.stage.method))  # type: ignore[arg-type]
    data = (
        plan.stage(rows_input.name) if rows_input and rows_input.source is None and rows_input.entry is None else None
    )
    method = data.stage.method if data else None
    sources = [each.source for each in data.inputs.values() if each.source] if data else []
    if not isinstance(method, Prepare) or not sources or any(each.streaming for each in sources):
        return None, "the number of rows is known once they are prepared", None
    from flows.planning.estimates import refused_rows
    from tasks.data.reading.read import read_chunks

    assert data
    read, exact = {slot: data.inputs[slot].source for slot in method.row_slots(data.inputs)}, None
    if method.produces != Kind.TEXT:
        with suppress(DataError):  # `plan` names these rows
            _, exact, _ = refused_rows(method, read, replays=REPLAY in data.inputs)
    count = sum(1 for source in sources for chunk in read_chunks(source) for _ in chunk.rows())
    held_out = method.held_out if method.held_out >= 1 else method.held_out * count
    rest = max(1, round(count - held_out))
    names = ", ".join(each.path.rstrip("/").rpartition("/")[2] for each in sources)
    paths = [Path(each.path) for each in sources]
    is_text = method.produces == Kind.TEXT and all(path.is_file() for path in paths)
    size = round(sum(path.stat().st_size for path in paths) * held_out / max(1, count)) if is_text else None
    about = "" if exact else "about "
    return exact or rest, f"{about}{exact or rest:,} rows for training ({count:,} of {names})", size


def _table(found: Recipe) -> str:
    from flows.reports.wording import empty_table, on_screen, plain_text

    table = empty_table("setting", "now", "advised", "reason", "source")
    for each in found.values:
        now = "-" if each.now is None else text_of(each.now)
        table.add_row(each.field, now, text_of(each.value), each.reason, each.source)
    return on_screen("\n".join([f"{found.stage}: {found.rows}", *filter(None, [found.short]), plain_text(table)]))


def text_of(value: Value | None) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return "null" if value is None else str(value)


def _yaml(recipes: list[Recipe], cli_args: list[str], config_dir: Path | None) -> str:
    """A file for ``--overrides-from``, with the reasons as comments."""
    lines = ["# posttrain plan --overrides-from THIS_FILE"]
    lines += [f"config_dir: {json.dumps(str(config_dir.absolute()))}"] if config_dir else []
    lines += ["overrides:", *(f"- {json.dumps(word)}" for word in cli_args)]
    for each in recipes:
        lines.append(f"# {each.stage}: {each.rows}")
        for word, value in zip(each.overrides(), each.values, strict=True):
            lines.append(f"- {json.dumps(word)} # {value.reason} ({value.source})")
    return "\n".join(lines) + "\n"

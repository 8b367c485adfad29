"""Whether a stage runs, is reused or resumes, and why; the hyperparameters that apply to it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from flows.declare.pipeline import Pipeline, Stage
from lineage.artifact import Kind, Source
from lineage.checkpoints import Checkpoint, Mirror
from lineage.errors import ConfigError
from lineage.filesystem.files import atomic_write
from lineage.filesystem.lock import owner
from lineage.fingerprint import differences, digest_json, short, without_nones
from lineage.record.attempts import attempts, other_code_digests
from lineage.record.metrics_file import last_step
from lineage.source.sources import Pinned
from lineage.store import CACHE, Entry, InputRecord, Manifest, Store
from tasks.context import Resources
from tasks.data.tokens.tokenization import Tokenization
from tasks.recipe import ADAPTER_FACTOR, Method, TrainingRecipe
from tasks.train.sharding import require_readable

_FORMER_STEPS = 1000  # former default length of a training


@dataclass(frozen=True, kw_only=True)
class PlannedInput:
    """What fills a slot: the output of a stage of the plan, or a pinned source.

    Args:
        pinned: None: it is a stage of this plan.
        entry: for a source that is an alias: the finished artifact.
        tokenizer: identity of a model's tokenizer and chat template: the fingerprint of its first ancestor, and the
            template that a training in between installs.
    """

    name: str
    fingerprint: str
    tokenizer: str = ""
    pinned: Pinned | None = None
    entry: Entry | None = None

    @property
    def source(self) -> Source | None:
        return self.pinned.source if self.pinned else None


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The resolved hyperparameters of a training stage.

    Args:
        learning_rate_reason, length_reason: where the values come from.
        num_steps, num_epochs: the length in both units; None: unknown before the rows are tokenized.
        num_examples: examples per epoch; None: unknown yet.
        is_exact: whether ``num_examples`` was counted on tokens; else it is the number of prepared rows.
        warmup: in steps; below 1: a fraction of all steps.
        num_rows: prepared rows; None: unknown yet.
        lost: what of the rows is dropped or cut; empty: nothing, or unknown before the rows are tokenized.
        row_bytes: bytes of a row, or of a pack or chunk of rows, the mean and the most; None: unknown.
    """

    learning_rate: float
    learning_rate_reason: str
    num_steps: int | None
    num_epochs: float | None
    num_examples: int | None
    is_exact: bool
    global_batch_size: int
    length_reason: str
    warmup: float
    num_rows: int | None = None
    lost: str = ""
    row_bytes: tuple[float, int] | None = None

    def to_dict(self) -> dict[str, object]:
        """What ``plan --json`` adds to the stage's row."""
        return {
            "learning_rate": {"value": self.learning_rate, "reason": self.learning_rate_reason},
            "length": {
                "num_steps": self.num_steps, "num_epochs": self.num_epochs, "num_examples": self.num_examples,
                "exact": self.is_exact, "reason": self.length_reason,
            },
            **({"rows": self.lost} if self.lost else {}),
        }  # fmt: skip

    @property
    def length(self) -> str:
        """``79 steps of 32 rows (num_steps), 1.01 epochs``"""
        about = "" if self.is_exact else "about "
        unit = "row" if self.num_examples == self.num_rows and not self.is_exact else "example"
        some = about if unit == "example" else ""  # packs and chunks, by the bytes of rows
        rows = f" of {some}{self.num_examples:,} {unit}{'s' * (self.num_examples != 1)}" if self.num_examples else ""
        by_steps = self.length_reason.startswith("num_steps")
        digits = 4 if not by_steps else 3 if self.is_exact else 2
        epochs = None
        if self.num_epochs is not None:
            is_large = digits < 4 and self.num_epochs >= 10
            number = f"{self.num_epochs:.0f}" if is_large else f"{self.num_epochs:.{digits}g}"
            epochs = f"{number} epoch{'s' * (self.num_epochs != 1)}{rows}"
        if by_steps:
            steps = f"{self.num_steps} steps of {self.global_batch_size} rows ({self.length_reason})"
            length = f"{steps}, {about}{epochs}" if epochs else steps
        elif self.num_steps is None:
            length = f"{epochs} ({self.length_reason}), steps once tokenized"
        else:
            steps = f"{self.num_steps} step{'s' * (self.num_steps != 1)} of {self.global_batch_size} rows"
            length = f"{epochs} ({self.length_reason}), {about}{steps}"
        cut = ""
        if self.num_steps == 1 and self.warmup:
            cut = "; it learns nothing"
        elif self.num_steps is not None and self.warmup >= self.num_steps:
            cut = f"; its warm-up of {self.warmup:g} steps does not end, so that the learning rate stays below"
        lost = f"; {self.lost}" if self.lost else ""
        return f"{length}{cut}{lost}"

    def __str__(self) -> str:
        """``learning_rate 1e-05 (default of DPO, x10 under an adapter); 79 steps of 32 rows (num_steps)``"""
        return f"learning_rate {self.learning_rate:g} ({self.learning_rate_reason}); {self.length}"


def hyperparameters(
    method: TrainingRecipe, rows: Manifest | None, counted: Path | None, num_rows: int | None = None, *,
    packs: int | None = None, given: Collection[str] = (),
) -> Hyperparameters:  # fmt: skip
    """Resolves the hyperparameters of a training.

    Args:
        rows: manifest of the data stage that it reads; None: unfinished, or a source.
        counted: the file of ``examples_file``; None: its rows are not counted.
        num_rows: that an unfinished data stage will have; None: as the manifest says.
        packs: about how many packs or chunks these rows fill; None: unknown, or rows are examples.
        given: fields that a file or an override sets.
    """
    num_rows = num_rows or (int(rows.metrics.get("train_rows", 0)) or None if rows else None)
    exact, lost = _read(counted) if counted else (None, "")
    examples = exact or packs or _prepared(method, num_rows)
    num_steps = method.num_steps
    if num_steps is None and examples:
        num_steps = method.steps(lambda: examples)
    num_epochs = method.num_epochs
    if num_epochs is None and examples and num_steps:
        num_epochs = num_steps * float(method.rows_per_step) / examples
    length_reason = "num_steps"
    if method.num_steps is None:
        is_default = method.num_epochs == 1 and "num_epochs" not in given
        length_reason = "num_epochs, the default" if is_default else "num_epochs"
    return Hyperparameters(
        learning_rate=method.learning_rate, learning_rate_reason=_learning_rate_reason(method, given),
        num_steps=num_steps, num_epochs=num_epochs, num_examples=examples,
        is_exact=exact is not None or examples is None,
        global_batch_size=method.global_batch_size, length_reason=length_reason,
        warmup=method.schedule.warmup, num_rows=num_rows, lost=lost,
    )  # fmt: skip


def _learning_rate_reason(method: TrainingRecipe, given: Collection[str]) -> str:
    default = type(method).default_learning_rate
    if default is None:
        return "as set"
    name = type(method).__name__
    factor = ADAPTER_FACTOR if method.adapter else 1
    under = f", x{ADAPTER_FACTOR} under an adapter" if method.adapter else ""
    applied = float(f"{default * factor:g}")
    if method.learning_rate == applied:
        return f"{'as set, the ' if 'learning_rate' in given else ''}default of {name}{under}"
    return f"as set; default of {name}{under}: {applied:g}"


def _prepared(method: TrainingRecipe, num_rows: int | None) -> int | None:
    """Number of prepared rows, if each is about one example (not for chunked text or packed rows)."""
    tokenization = method.tokenization()
    if tokenization is None or tokenization.kind == Kind.TEXT or tokenization.packing:
        return None
    return num_rows


def examples_file(store: Path, tokenization: Tokenization, rows: str, tokenizer: str) -> Path:
    """The file with the number of examples that rows yield, which plans read.

    Args:
        rows, tokenizer: fingerprints.
    """
    options = {**asdict(tokenization), "chat_template": None}  # the template is a part of ``tokenizer``
    key = digest_json([options, rows, tokenizer])
    return store / CACHE / "examples" / short(key)


def write_examples(path: Path, count: int, lost: str) -> None:
    """Saves a count, and what of the rows is dropped or cut, for later plans."""
    atomic_write(path, f"{count}\n{lost}")


def _read(path: Path) -> tuple[int | None, str]:
    try:
        count, _, lost = path.read_text().partition("\n")
        return int(count) or None, lost
    except (OSError, ValueError):  # not counted yet, or damaged: it can be counted again
        return None, ""


def former_defaults(method: TrainingRecipe, before: Mapping[str, object]) -> list[str]:
    """Notes for a finished output that differs because a default has changed.

    Args:
        before: its recipe.
    """
    notes = []
    if before.get("num_steps") == _FORMER_STEPS and method.num_steps is None and method.num_epochs == 1:
        notes.append(
            f"the default length was {_FORMER_STEPS} steps and is one epoch now: num_steps={_FORMER_STEPS} keeps it"
        )
    default = type(method).default_learning_rate
    if (
        default is not None and method.adapter and before.get("adapter") and before.get("learning_rate") == default
        and method.learning_rate == float(f"{default * ADAPTER_FACTOR:g}")
    ):  # fmt: skip
        notes.append(
            f"the default under an adapter is {ADAPTER_FACTOR} times as high now: learning_rate={default:g} keeps it"
        )
    return notes


State = Literal["run", "reuse", "resume"]


def state_of(
    name: str, stage: Stage, entry: Entry, inputs: Mapping[str, PlannedInput], code: str, pipeline: Pipeline
) -> tuple[State, str]:
    """State of a stage and the reason.

    Args:
        code: digest of its code.

    Raises:
        ConfigError: ``code_drift=refuse``, and other code produced its output or trained some of its steps; or a run
            would refuse its checkpoints.
    """
    state, reason = _stored_state(name, entry, stage.method, inputs, Store(pipeline.store))
    drift, is_restarted = pipeline.code_drift, name in pipeline.restart
    if state == "reuse":
        manifest = entry.manifest()
        assert manifest is not None
        if manifest.provenance.code_digests == [code]:
            own = f"; restart=[{name}] applies to unfinished stages: change a field, or delete {entry.path}"
            return state, reason + own * is_restarted
        if drift == "refuse":
            raise ConfigError(
                f"stage {name}: its code changed since its output was made, and code_drift=refuse; "
                "run with code_drift=rerun to run it again, or code_drift=warn to reuse it"
            )
        if drift == "rerun":
            return "run", "its code changed since (code_drift=rerun)"
        return state, f"{reason}; its code changed since (code_drift=warn)"
    if state == "resume":
        if is_restarted:
            return "run", f"restart=[{name}]: starts again from step 0; {_reached(entry)}"
        if _other_code(entry, code):
            if drift == "refuse":
                raise ConfigError(
                    f"stage {name}: its code changed since it began ({reason}), and code_drift=refuse; "
                    f"run with restart=[{name}] to start again, or code_drift=warn to resume"
                )
            if drift == "rerun":
                changed = "its code changed since an attempt before (code_drift=rerun): starts again"
                return "run", f"{changed}; {_reached(entry)}"
            reason += "; its code changed since (code_drift=warn)"
        return state, reason + _of_workers(name, stage, entry)
    mirrored = "" if is_restarted else _mirrored(name, stage, entry)
    return ("resume", mirrored) if mirrored else (state, reason)


def _stored_state(
    name: str, entry: Entry, method: Method, inputs: Mapping[str, PlannedInput], store: Store
) -> tuple[State, str]:
    """The state and the reason without regard to changes of its code."""
    if not entry.path.exists():
        return "run", _why_stale(method, inputs, store.finished(name))
    manifest = entry.manifest()
    if manifest:
        missing = manifest.missing(entry.output)
        if missing:
            return "run", f"its output is damaged: {missing[0]} is missing"
        when = datetime.fromtimestamp(manifest.provenance.end).strftime("%Y-%m-%d %H:%M")
        return "reuse", f"finished {when}"
    busy = owner(entry.path)
    if busy:
        return "run", f"process {busy.pid} on {busy.host} is producing it now: a run waits for it and reuses it"
    checkpoint = entry.checkpoints.newest()
    if checkpoint:
        when = datetime.fromtimestamp(checkpoint.time).strftime("%Y-%m-%d %H:%M")
        return "resume", f"resumes from step {checkpoint.step}, saved {when}; {_reached(entry)}"
    if entry.checkpoints.steps():
        return "resume", f"none of its checkpoints is intact; {_reached(entry)}"
    if entry.metrics.exists():
        return "run", f"{_reached(entry)}, before its first checkpoint; starts again"
    return "run", _why_stale(method, inputs, store.finished(name))


def restarts(name: str, entry: Entry, code: str, pipeline: Pipeline) -> bool:
    """Whether a stage must start from step 0, whatever checkpoints it has when it runs."""
    return name in pipeline.restart or (pipeline.code_drift == "rerun" and _other_code(entry, code))


def _other_code(entry: Entry, code: str) -> bool:
    steps = entry.checkpoints.steps()
    return bool(other_code_digests(attempts(entry.path), steps[-1] if steps else None, code))


def _reached(entry: Entry) -> str:
    return f"the attempt before ended at step {last_step(entry.metrics)}"


def _why_stale(method: Method, inputs: Mapping[str, PlannedInput], earlier: Iterator[Manifest]) -> str:
    """The changed fields compared with the most similar finished artifact of the stage."""
    finished = list(earlier)
    recipe = method.recipe() if finished else {}
    candidates = [(list(_changes(recipe, inputs, manifest)), manifest) for manifest in finished]
    if not candidates:
        return "never run"
    # Of equals, `min` returns the first, which is the newest.
    fewest, manifest = min(candidates, key=lambda each: len(each[0]))
    former = former_defaults(method, manifest.recipe) if isinstance(method, TrainingRecipe) else []
    return "; ".join([*fewest, *former])


def _changes(recipe: Mapping[str, object], inputs: Mapping[str, PlannedInput], manifest: Manifest) -> Iterator[str]:
    plain = without_nones(recipe)
    assert isinstance(plain, dict)
    yield from differences(manifest.recipe, plain)
    for slot in sorted(inputs.keys() | manifest.inputs.keys()):
        old, new = manifest.inputs.get(slot), inputs.get(slot)
        before = f"{old.artifact}@{short(old.fingerprint)}" if old else "(none)"
        after = f"{new.name}@{short(new.fingerprint)}" if new else "(none)"
        if before != after:
            yield f"input {slot}: {before} -> {after}{_other_reading(old, new)}"


def _other_reading(old: InputRecord | None, new: PlannedInput | None) -> str:
    """Changed declaration of a source; empty: only its bytes changed, or it is another source."""
    if not (old and old.source and new and new.pinned and old.artifact == new.name):
        return ""
    changes = "; ".join(differences(old.source.configured(), new.pinned.record.configured()))
    return f" ({changes})" if changes else ""


def _of_workers(name: str, stage: Stage, entry: Entry) -> str:
    """How changed workers affect the result of a resume; empty: they are the same.

    Raises:
        ConfigError: a run would refuse: no checkpoint is intact, or the workers cannot read the last one.
    """
    checkpoint = entry.checkpoints.newest()
    if checkpoint is None and (mirrored := _mirrored(name, stage, entry)):
        return f"; {mirrored}"
    if checkpoint is None:
        raise ConfigError(
            f"stages.{name}: each of its checkpoints in {entry.checkpoints.directory} lacks a file or a readable "
            f"record; restore the files, or lose their steps and start again with restart=[{name}]"
        )
    return _of_checkpoint(name, stage, checkpoint)


def _of_checkpoint(name: str, stage: Stage, checkpoint: Checkpoint) -> str:
    try:
        if isinstance(stage.method, TrainingRecipe):
            require_readable(checkpoint, stage.method, stage.resources)
    except ConfigError as error:
        raise ConfigError(f"stages.{name}.resources: {error}, or start again with restart=[{name}]") from error
    changes = ", ".join(_worker_changes(checkpoint, stage.resources))
    return f"; with {changes}: within tolerance, not to the bit" if changes else ""


def _mirrored(name: str, stage: Stage, entry: Entry) -> str:
    """Where the mirror has what the store lost, why the stage resumes; empty: it does not.

    Raises:
        ConfigError: the mirror cannot be reached, or the workers cannot read its last checkpoint.
    """
    url = stage.resources.checkpoint_mirror
    if not url or not isinstance(stage.method, TrainingRecipe) or owner(entry.path):
        return ""
    mirror = Mirror(url, entry.path)
    steps = mirror.steps()
    if not steps:
        return ""
    checkpoint = mirror.read(steps[-1])
    when = datetime.fromtimestamp(checkpoint.time).strftime("%Y-%m-%d %H:%M")
    found = f"resumes from step {checkpoint.step} of its mirror {mirror.url}, saved {when}"
    return found + _of_checkpoint(name, stage, checkpoint)


def _worker_changes(before: Checkpoint, now: Resources) -> Iterator[str]:
    """Changes of resources that change the order of sums."""
    if now.num_workers != before.num_workers:
        workers = "1 worker" if now.num_workers == 1 else f"{now.num_workers} workers"
        yield f"{workers} instead of {before.num_workers}"
    for field in ("micro_batch_size", "cpus_per_worker"):
        old, new = getattr(before, field), getattr(now, field)
        if old not in (None, new):
            yield f"{field}={new} instead of {old}"

"""Early checks of a training stage's rows: tokenization, labels, and leakage into other held-out sets."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lineage.artifact import DATA
from lineage.filesystem.digest import DigestCache
from lineage.fingerprint import digest_json, short
from tasks.data.kinds import HELD_OUT, TEXT, TRAIN
from tasks.recipe import Inputs, Method, TrainingRecipe
from tasks.reward_functions.metric import Metric, asked_texts

if TYPE_CHECKING:
    from tasks.context import Metrics, TrainContext
    from tasks.recipe import Input

_VERSION = 2  # raise it when the search for leakage changes
EXAMPLES = "examples"
LENGTH_95 = "length_p95"  # tokens that 95 % of the rows need; not of text, which is cut in chunks
POLICY = "policy"  # the slot of the model that a training stage starts from, with its tokenizer
LEAKED = "leaked_rows"


@dataclass(frozen=True, kw_only=True)
class RowCheck(Method):
    """Checks the rows of a stage long before it runs; its policy is the model that brings the tokenizer.

    Args:
        method: of that stage; it has a tokenization.
        chat_template: that a stage before it, or itself, installs; None: that of the policy.
        held_out: data stage -> its output, of all that something may be measured on.
        previous_percent: of tokens that were trained the last time; None: nothing to compare with.
        benchmarks: local benchmarks that something is measured on.
        leakage: the file for the held-out rows that it would also train on, if there are any.
    """

    method: TrainingRecipe
    stage: str
    chat_template: str | None
    held_out: Mapping[str, Path]
    previous_percent: float | None
    leakage: Path
    benchmarks: tuple[Metric, ...] = ()

    def run(self, inputs: Inputs, ctx: "TrainContext") -> "Metrics":
        """Counts the examples that the rows make, and those rows that it would also be measured on."""
        checked = check_rows(
            self.method, inputs, ctx, stage=self.stage, chat_template=self.chat_template,
            previous_percent=self.previous_percent,
        )  # fmt: skip
        found = leaked(inputs[rows_slot(self.method)], self.held_out, ctx, self.benchmarks)
        if found is None:
            return {**checked, LEAKED: 0}
        import pyarrow.parquet as pq

        shutil.copyfile(found, self.leakage)
        return {**checked, LEAKED: pq.read_metadata(found).num_rows}


def check_rows(
    method: TrainingRecipe,
    inputs: Inputs,
    ctx: "TrainContext",
    *,
    stage: str,
    chat_template: str | None,
    previous_percent: float | None,
) -> "Metrics":
    """Tokenizes the rows that a stage will train on into the cache, and checks their labels.

    Args:
        method: a method with a tokenization.
        inputs: the rows, and the policy with the tokenizer.
        chat_template: the template that the model will have; None: the policy's.
        previous_percent: percentage of trained tokens of the last run; None: no last run.

    Returns:
        Statistics of the rows, ``examples`` per epoch, and the length that holds 95 % of the rows.

    Raises:
        DataError: rows cannot be rendered, nothing would be trained, or less than half of the last time's share.
        ConfigError: the chat template cannot be used.
    """
    from tasks.data.tokens.tokenize_rows import load_or_make, show

    rows = inputs[rows_slot(method)]
    configured = method.tokenization()
    assert configured
    tokenization = replace(configured, chat_template=chat_template)
    tokens = load_or_make(tokenization, rows, inputs[POLICY].path, ctx.cache_dir, ctx.resources.cpus_per_worker)
    show(tokens, rows, method.max_length)
    tokens.require_like(previous_percent, stage)
    need = {} if tokens.kind.joined else {LENGTH_95: float(tokens.stats.quantiles["p95"])}
    return {**tokens.metrics, **need, EXAMPLES: float(len(tokens))}


def describe_lost(checked: "Metrics", max_length: int) -> str:
    """What of the rows is not trained on: ``9 of 36 rows dropped, 4 cut at max_length=64; 95 % need 210``.

    Args:
        checked: as ``check_rows`` returns it.

    Returns:
        Empty if every row is trained on whole. Of text, the last chunk is always cut, which is not described.
    """
    rows, dropped, cut, prompts = (
        int(checked.get(name, 0)) for name in ("rows", "rows_dropped", "rows_cut", "prompts_cut")
    )
    need = checked.get(LENGTH_95)
    if need is None:
        return f"{dropped:,} of {rows:,} rows dropped: they fill no chunk of {max_length} tokens" if dropped else ""
    lost = [(dropped, "dropped"), (cut, "cut"), (prompts, "with a cut prompt")]
    listed = [f"{count:,} {what}" for count, what in lost if count]
    if not listed:
        return ""
    first, *others = listed
    counted = ", ".join([first.replace(" ", f" of {rows:,} rows ", 1), *others])
    return f"{counted} at max_length={max_length}; 95 % need {int(need):,}"


def rows_slot(method: TrainingRecipe) -> str:
    """The slot of the rows that a method trains on."""
    return next(slot for slot, kind in method.consumes.items() if kind in DATA)


def leaked(
    rows: "Input", held_out: Mapping[str, Path], ctx: "TrainContext", benchmarks: Sequence[Metric] = ()
) -> Path | None:
    """Finds rows of other data stages' held-out sets and of benchmarks that these training rows repeat; None: none.

    Args:
        held_out: data stage -> its output; the rows' own stage is skipped, since it has made the comparison itself.

    Returns:
        A Parquet file with a row per overlap, and the ids of both rows.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert ctx.cache_dir
    sets = {name: directory / HELD_OUT for name, directory in sorted(held_out.items()) if name != rows.name}
    cache = ctx.cache_dir / "leakage"
    cache.mkdir(parents=True, exist_ok=True)
    for metric in benchmarks:
        texts = asked_texts(metric)
        file = cache / f"benchmark-{short(digest_json(texts))}.parquet"
        if texts and not file.exists():
            ids = [f"{index}-0" for index in range(len(texts))]
            draft = file.with_suffix(f".{os.getpid()}.tmp")
            pq.write_table(pa.table({"row_id": ids, "text": texts}, schema=TEXT.schema), draft)
            draft.rename(file)
        sets |= {metric.label: file} if texts else {}
    digests = DigestCache(cache / "digests.json")
    train = rows.path / TRAIN
    key = [digests.digest(train), {name: digests.digest(file) for name, file in sets.items()}, _VERSION]
    found = cache / f"{short(digest_json(key))}.parquet"
    if not found.exists():
        _compare(rows.name, train, sets, ctx, found)
    return found if pq.read_metadata(found).num_rows else None


def _compare(name: str, train: Path, sets: Mapping[str, Path], ctx: "TrainContext", found: Path) -> None:
    from tasks.data.preparing.decide import open_database
    from tasks.data.preparing.repeats import NamedSet, find_leakage
    from tasks.data.preparing.report import LEAKAGE

    others = [NamedSet(name=other, file=file) for other, file in sets.items()]
    with TemporaryDirectory(dir=found.parent) as scratch:
        connection = open_database(Path(scratch), ctx.resources.cpus_per_worker)
        find_leakage([NamedSet(name=name, file=train)], others, connection, Path(scratch))
        connection.close()
        Path(scratch, LEAKAGE).rename(found)

"""Single answers of preference pairs, as KTO reads them: Ethayarajh et al. 2024, arXiv:2402.01306, section 4."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lineage.artifact import Kind
from lineage.errors import DataError
from tasks.context import Metrics, TrainContext
from tasks.data.kinds import ROW_ID, UNPAIRED
from tasks.recipe import Inputs, Method

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Unpair(Method):
    """Splits each preference pair into two rows: its chosen answer, desirable, and then its rejected one, which is not.

    Rows keep the order, the side and the prompt of their pairs; the id of a row is that of its pair with ``-chosen`` or
    ``-rejected`` added. An answer that is in several pairs is in as many rows.
    """

    consumes: ClassVar[Mapping[str, Kind]] = {"pairs": Kind.PREFERENCES}
    produces: ClassVar[Kind] = Kind.UNPAIRED
    measures: ClassVar[tuple[str, ...]] = ("rows", "train_rows", "held_out_rows")
    preload: ClassVar[tuple[str, ...]] = ()

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        import pyarrow.parquet as pq

        from tasks.data.images import IMAGES
        from tasks.data.kinds import HELD_OUT, TRAIN
        from tasks.data.preparing.convert_rows import SplitFiles

        pairs = inputs["pairs"]
        ctx.output_dir.mkdir(parents=True, exist_ok=True)
        files = SplitFiles(ctx.output_dir, Kind.UNPAIRED, (TRAIN, HELD_OUT))
        for side in files.counts:
            for batch in pq.ParquetFile(pairs.path / side).iter_batches():
                files.write(side, split(batch))
        files.close()
        if not files.counts[TRAIN]:
            raise DataError(
                f"{pairs.name!r} has no training pair; rows are split of one at least; give {pairs.name!r} more rows"
            )
        if (pairs.path / IMAGES).exists():
            shutil.copyfile(pairs.path / IMAGES, ctx.output_dir / IMAGES)
        counts = {f"{side.partition('.')[0]}_rows": float(count) for side, count in files.counts.items()}
        return {"rows": sum(counts.values()), **counts}


def split(pairs: "pa.RecordBatch") -> "pa.RecordBatch":
    """The answers of pairs: each chosen answer, followed by the rejected one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    tables = []
    for side, label in (("chosen", True), ("rejected", False)):
        ids = pc.binary_join_element_wise(pairs.column(ROW_ID), side, "-")
        columns = {ROW_ID: ids, "completion": pairs.column(side), "label": pa.array([label] * len(pairs))}
        columns |= {name: pairs.column(name) for name in ("prompt", "tools") if name in pairs.schema.names}
        columns.setdefault("tools", pa.nulls(len(pairs), UNPAIRED.schema.field("tools").type))
        tables.append(pa.table({name: columns[name] for name in UNPAIRED.schema.names}))
    order = [row + place * len(pairs) for row in range(len(pairs)) for place in range(2)]
    (batch,) = pa.concat_tables(tables).take(pa.array(order)).combine_chunks().to_batches()
    return batch

"""All that some nodes went into: found once, and asked in several ways."""

import json
from collections.abc import Iterable
from functools import cached_property

from lineage.graph.index import Index
from lineage.graph.index_queries import ARTIFACT, Indexed, newest_where, reached

MODELS = ("checkpoint", "reward_model")  # kinds whose artifacts are versions of the registered model of their pipeline


class Below:
    """The finished artifacts made from nodes, at any distance; with the nodes themselves where they are ``within``."""

    _count = 0

    def __init__(self, index: Index, nodes: Iterable[str], within: Iterable[str] = ()) -> None:
        Below._count += 1
        self._index = index
        self._table = f"below_{Below._count}"
        index.keep(f"CREATE TEMP TABLE {self._table} (id INTEGER PRIMARY KEY, place INTEGER, end)")
        index.keep(
            f"INSERT INTO {self._table} {reached('parent', 'child')} "
            "SELECT node, place, end FROM artifact WHERE node IN (SELECT id FROM reached UNION "
            "SELECT node.id FROM json_each(?) JOIN node ON node.key = value)",
            json.dumps(list(nodes)),
            json.dumps(list(within)),
        )

    def newest(self, limit: int = -1) -> list[Indexed]:
        """The artifacts, the last one first; -1: all."""
        ids = f"SELECT id FROM {self._table} ORDER BY end DESC LIMIT {limit}"
        return self._index.artifacts(f"{ARTIFACT} WHERE node IN ({ids}) ORDER BY end DESC, key")

    @cached_property
    def counts(self) -> list[tuple[str, str, str, int]]:
        """Pipeline, stage, kind, and how many artifacts, the stages in the order of their first artifact."""
        sql = (
            "SELECT pipeline, stage, kind, sum(count) FROM place JOIN "
            f"(SELECT place, count(*) AS count, min(end) AS first FROM {self._table} GROUP BY 1) ON place.id = place "
            "GROUP BY 1, 2, 3 ORDER BY 1, min(first), 2"
        )
        return [(pipeline, stage, kind, int(count)) for pipeline, stage, kind, count in self._index.rows(sql)]

    @cached_property
    def num_models(self) -> int:
        """Of checkpoints and reward models."""
        return sum(count for _, _, kind, count in self.counts if kind in MODELS)

    def holds(self, node: str) -> bool:
        sql = f"SELECT 1 FROM {self._table} WHERE id = (SELECT id FROM node WHERE key = ?)"
        return bool(self._index.rows(sql, node))

    def newest_outside(self, pipeline: str, stage: str) -> Indexed | None:
        """The artifact of a pipeline's stage that was finished last and is none of these."""
        sql = newest_where(f"node NOT IN (SELECT id FROM {self._table})")
        return next(iter(self._index.artifacts(sql, pipeline, stage)), None)

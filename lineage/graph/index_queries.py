"""The queries of the index that are put together from parts."""

from typing import NamedTuple

ARTIFACT = (
    "SELECT key, stage, fingerprint, pipeline, method, kind, start, end FROM artifact JOIN place ON place.id = place"
)


class Indexed(NamedTuple):
    """A finished artifact as the index knows it; its manifest says the rest.

    Args:
        id: ``stage@`` and the first 16 digits of the fingerprint.
        kind: of the output; empty in manifests of schema 1.
        start, end: seconds since the epoch.
    """

    id: str
    stage: str
    fingerprint: str
    pipeline: str
    method: str
    kind: str
    start: float
    end: float


def newest_where(condition: str) -> str:
    """The query of the last artifact of a pipeline's stage, one per place at most, for which a condition holds."""
    last = f"SELECT node FROM artifact WHERE place = each.id AND {condition} ORDER BY end DESC LIMIT 1"
    nodes = f"SELECT ({last}) FROM place AS each WHERE pipeline = ? AND stage = ?"
    return f"{ARTIFACT} WHERE node IN ({nodes}) ORDER BY end DESC, key LIMIT 1"


def reached(start: str, end: str) -> str:
    """The table ``reached(id)`` of the nodes found along the edges from ``start`` to ``end``; takes nodes as JSON."""
    return (
        "WITH RECURSIVE reached(id) AS ("
        f"SELECT edge.{end} FROM json_each(?) JOIN node ON node.key = value JOIN edge ON edge.{start} = node.id "
        f"UNION SELECT edge.{end} FROM reached JOIN edge ON edge.{start} = reached.id)"
    )

"""Forward: everything that something went into, and what it takes to be rid of it."""

from dataclasses import asdict, dataclass

from lineage.artifact import DATA
from lineage.graph.below import MODELS, Below
from lineage.graph.impact_refs import Meant, meant_by
from lineage.graph.index import Index
from lineage.graph.index_queries import Indexed
from lineage.graph.retraining import Retraining, retrainings
from lineage.run_file import RunFile

MOST_VERSIONS = 1000  # a file is read for each


@dataclass(frozen=True, kw_only=True)
class Impact:
    """The answer.

    Args:
        below: the artifacts that it went into; of a row, not the models that it was held out from.
        aliases: alias -> the affected model that holds it now.
        before: alias -> its previous holder, where that one is not affected.
        unaffected: of a row, how many models were made from data that has it held out only.
    """

    index: Index
    ref: str
    meant: Meant
    below: Below
    aliases: dict[str, str]
    before: dict[str, str]
    unaffected: int
    retrainings: list[Retraining]

    def role(self, artifact: Indexed) -> str | None:
        """Of a row: how an artifact met it."""
        if not self.meant.rows:
            return None
        if artifact.kind in MODELS:
            return "trained on it"
        if artifact.kind in DATA:
            sides = {row.sides[artifact.id] for row in self.meant.rows if artifact.id in row.sides}
            return " and ".join(f"has it in {side}" for side in sorted(sides, reverse=True))
        return "measured on it" if artifact.id in self.meant.within else "measures a model that was trained on it"

    def version(self, artifact: Indexed) -> int | None:
        """Of the registered model, as noted beside the artifact; not looked for where there are very many."""
        if artifact.kind not in MODELS or self.below.num_models > MOST_VERSIONS:
            return None
        note = RunFile.read(self.index.entry(artifact.id).path)
        return note.version if note else None

    def to_dict(self) -> dict[str, object]:
        """The object that ``impact --json`` prints."""
        return {
            "ref": self.ref,
            "meant": self.meant.words,
            "roots": self.meant.roots,
            "files": self.meant.files,
            "rows": [asdict(row) for row in self.meant.rows],
            "artifacts": [self._row(each) for each in self.below.newest()],
            "aliases": self.aliases,
            "unaffected_models": self.unaffected,
            "retraining": [_retraining(each) for each in self.retrainings],
        }

    def _row(self, each: Indexed) -> dict[str, object]:
        aliases = [alias for alias, holder in self.aliases.items() if holder == each.id] if self.aliases else []
        return {
            "id": each.id, "pipeline": each.pipeline, "stage": each.stage, "kind": each.kind or None,
            "fingerprint": each.fingerprint, "path": f"{self.index.store}/{each.stage}/{each.fingerprint[:16]}",
            "finished": each.end, "registered_model": each.pipeline if each.kind in MODELS else None,
            "registered_version": self.version(each), "aliases": aliases, "role": self.role(each),
        }  # fmt: skip


def impact(ref: str, index: Index) -> Impact:
    """Everything that a REF went into.

    Raises:
        ConfigError: nothing bears that name.
    """
    meant = meant_by(ref, index)
    below = Below(index, meant.roots, meant.within)
    held = {alias: node for alias, node in index.aliases.items() if below.holds(node) or node in meant.roots}
    return Impact(
        index=index, ref=ref, meant=meant, below=below, aliases=held,
        before={alias: node for alias, node in _previous(index, held).items() if not below.holds(node)},
        unaffected=_unaffected(index, meant, below), retrainings=retrainings(index, below, meant.roots),
    )  # fmt: skip


def _previous(index: Index, aliases: dict[str, str]) -> dict[str, str]:
    """Alias -> the artifact that a rollback would give it to."""
    held = {alias: index.alias_holders[alias] for alias in aliases}
    return {alias: nodes[-2] for alias, nodes in held.items() if len(nodes) > 1 and index.artifact(nodes[-2])}


def _unaffected(index: Index, meant: Meant, below: Below) -> int:
    if not meant.rows:
        return 0
    held = [artifact for row in meant.rows for artifact in row.sides]
    models = [each for each in index.descendants(set(held)) if each.kind in MODELS]
    return sum(not below.holds(each.id) for each in models)


def _retraining(each: Retraining) -> dict[str, object]:
    def stages(artifacts: list[Indexed]) -> list[dict[str, object]]:
        return [{"stage": one.stage, "id": one.id, "seconds": one.end - one.start} for one in artifacts]

    return {
        "pipeline": each.pipeline,
        "run_again": stages(each.again),
        "reused": stages(each.reused),
        "replace": [one.id for one in each.replaced],
        "restart_from": [one.id for one in each.restart],
        "instead": {stage: one.id for stage, one in each.instead.items()},
        "estimated_seconds": each.seconds,
    }

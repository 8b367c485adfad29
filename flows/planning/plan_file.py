"""A plan in a file that a person approves, and what differs from it when it is run: sources, code, configuration."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

from flows.planning.plan import Plan, PlannedStage
from lineage.artifact import SOURCE
from lineage.code import code_files
from lineage.errors import ConfigError
from lineage.files import atomic_write
from lineage.fingerprint import differences, short, without_nones
from lineage.manifest import library_versions
from lineage.secrets import redacted

FORMAT = 1
_SHOWN = 5  # differences in a message
_OF_PIPELINE = (
    "tracking",
    "code_drift",
    "aliases",
    "non_commercial_labels",
    "accept_label_drop",
    "restart",
    "operation",
)

Document = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """What ``plan --out`` wrote.

    Args:
        overrides: of that command, without the secrets of addresses.
        config_dir: an absolute path.
        approved: what must be the same when it is run.
    """

    path: Path
    overrides: list[str]
    config_dir: Path | None
    approved: Document


def write_plan(plan: Plan, path: Path, overrides: Sequence[str], config_dir: Path | None) -> None:
    """Writes what a run of a plan would do, and all that decides it."""
    document = {
        "posttrain_plan": FORMAT,
        "overrides": list(overrides),
        "config_dir": str(config_dir.absolute()) if config_dir else None,
        "approved": _approved(plan),
        "plan": plan.to_dict(),
    }
    atomic_write(path, redacted(json.dumps(document, indent=2, default=str)) + "\n")


def read_plan(path: Path) -> PlanFile:
    """Reads what ``plan --out`` wrote.

    Raises:
        ConfigError: it is something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["posttrain_plan"] != FORMAT:
            raise ValueError(f"posttrain_plan={document['posttrain_plan']}")
        config_dir = document["config_dir"]
        return PlanFile(
            path=path, overrides=[str(word) for word in document["overrides"]],
            config_dir=Path(config_dir) if config_dir else None, approved=document["approved"],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is no plan of this version ({type(error).__name__}: {error}); a file that "
            "`posttrain plan --out FILE` wrote is accepted; write it again"
        ) from error


def require_approved(plan: Plan, file: PlanFile) -> None:
    """Refuses a plan that is not the one in the file. Less work is accepted: what was finished or begun since.

    Raises:
        ConfigError: names what differs.
    """
    now = json.loads(redacted(json.dumps(_approved(plan), default=str)))
    before = {key: value for key, value in file.approved.items() if key != "finished"}
    found = list(differences(before, {key: value for key, value in now.items() if key != "finished"}))
    reasons = {planned.name: planned.reason for planned in plan.stages}
    lost = [name for name in _names(file.approved) if name not in _names(now) and name in reasons]
    found += [f"stages.{name} was finished and is to run now ({reasons[name]})" for name in lost]
    if not found:
        return
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    lines = "\n".join(f"  {line}" for line in [*found[:_SHOWN], *more])
    raise ConfigError(
        f"{file.path} is not what would run now; approved -> now:\n{lines}\n"
        f"restore what differs, or plan again and have that approved: posttrain plan --out {file.path}"
    )


def _names(approved: Document) -> list[str]:
    finished = approved.get("finished")
    return list(finished) if isinstance(finished, list) else []


def _approved(plan: Plan) -> Document:
    """All that decides what a run would make, as it is now; fingerprints follow from it."""
    given = {each.name: each for planned in plan.stages for each in planned.inputs.values()}
    modules = sorted({type(planned.stage.method).__module__ for planned in plan.stages})
    code: dict[str, str] = {}
    for module in modules:
        code |= {name: short(digest) for name, digest in code_files(module).items()}
    return {
        "pipeline": plan.pipeline.name,
        "store": str(plan.pipeline.store),
        "settings": {name: _plain(getattr(plan.pipeline, name)) for name in _OF_PIPELINE},
        "sources": {
            name.removeprefix(SOURCE): {"fingerprint": each.fingerprint, **asdict(each.pinned.record)}
            for name, each in given.items()
            if each.pinned
        },
        "stages": {planned.name: _stage(planned) for planned in plan.stages},
        "code": code,
        "libraries": dict(library_versions()),
        "finished": [planned.name for planned in plan.stages if planned.state == "reuse"],
    }


def _plain(value: object) -> object:
    """Dataclasses as dicts, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _stage(planned: PlannedStage) -> Document:
    return {
        "method": without_nones(planned.stage.method.recipe()),
        "inputs": {slot: each.name for slot, each in planned.inputs.items()},
        "resources": asdict(planned.stage.resources),
        "code": planned.code_digest,
    }

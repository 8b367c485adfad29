"""Plans in files, to be approved by a person: a run is refused if sources, code or configuration have changed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path

from flows.planning.plan import Plan, PlannedStage
from lineage.artifact import SOURCE
from lineage.code import code_files
from lineage.errors import ConfigError
from lineage.filesystem.files import atomic_write
from lineage.fingerprint import differences, short, without_nones
from lineage.record.environment import library_versions
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
    """The content of a file of ``plan --out``.

    Args:
        overrides: of that command, without secrets of URLs.
        config_dir: an absolute path.
        approved: what must be unchanged in the run.
    """

    path: Path
    overrides: list[str]
    config_dir: Path | None
    approved: Document


def write_plan(plan: Plan, path: Path, overrides: Sequence[str], config_dir: Path | None) -> None:
    """Writes a plan and everything that determines it."""
    document = {
        "posttrain_plan": FORMAT,
        "overrides": list(overrides),
        "config_dir": str(config_dir.absolute()) if config_dir else None,
        "approved": _approved(plan),
        "plan": plan.to_dict(),
    }
    atomic_write(path, redacted(json.dumps(document, indent=2, default=str)) + "\n")


def read_plan(path: Path) -> PlanFile:
    """Reads a file of ``plan --out`` (ConfigError: it is not such a file)."""
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
            f"{path}: is not a plan of this version ({type(error).__name__}: {error}); a file that "
            "`posttrain plan --out FILE` wrote is accepted; write it again"
        ) from error


def require_approved(plan: Plan, file: PlanFile) -> None:
    """Refuses a plan that differs from the approved one, except that more stages may be finished."""
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
    """Everything that determines the outputs of a run."""
    planned_inputs = {each.name: each for planned in plan.stages for each in planned.inputs.values()}
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
            for name, each in planned_inputs.items()
            if each.pinned
        },
        "stages": {planned.name: _stage(planned) for planned in plan.stages},
        "code": code,
        "libraries": dict(library_versions()),
        "finished": [planned.name for planned in plan.stages if planned.state == "reuse"],
    }


def _plain(value: object) -> object:
    """Converts nested dataclasses to dicts."""
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

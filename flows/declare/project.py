"""Short forms for a user's own project: ``data=`` for the path of its rows."""

from collections.abc import Mapping

from flows.declare.pipeline import listed
from lineage.artifact import SOURCE, Kind
from lineage.errors import ConfigError

DATA_KEY = "data"
_SCRATCH = "tasks.base_model.BaseModel"

Node = Mapping[str, object]


def data_key(tree: Node, key: str) -> str:
    """The key that ``data`` stands for, the path of the only source of rows; or ``data.NAME``, of one of several."""
    names, name = data_sources(tree), key.partition(".")[2]
    if not name and len(names) == 1:
        (name,) = names
    if name in names:
        return f"sources.{name}.path"
    found = "no such source" if name else f"{tree.get('name')} reads {len(names)} sources of rows"
    accepted = [f"{DATA_KEY}.{each}" for each in names]
    raise ConfigError(
        f"{key}: {found}; accepted: {listed(key, accepted) if name else ', '.join(accepted) or 'none'}; one source is "
        "read by pipeline=sft, cpt, dpo, reward, kto and grpo"
    )


def data_sources(tree: Node) -> list[str]:
    """The sources of rows that stages read, without those that only make a model from scratch (``model=tiny``)."""
    stages = {name: _node(node) for name, node in _node(tree.get("stages")).items()}
    read = {name: set(map(str, _node(stage.get("inputs")).values())) for name, stage in stages.items()}
    scratch = {name for name, stage in stages.items() if _node(stage.get("method")).get("_target_") == _SCRATCH}
    others = set().union(*(refs for name, refs in read.items() if name not in scratch))
    left_out = scratch.union(*(read[name] - others for name in scratch))
    refs = set().union(*(refs for name, refs in read.items() if name not in left_out))
    names = {ref.removeprefix(SOURCE) for ref in refs if ref.startswith(SOURCE) or ref not in stages}
    sources = {name: _node(node) for name, node in _node(tree.get("sources")).items() if name in names}
    return [name for name, source in sources.items() if source.get("kind", Kind.ROWS) == Kind.ROWS]


def _node(value: object) -> Node:
    return value if isinstance(value, Mapping) else {}

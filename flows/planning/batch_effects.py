"""What of a model's files decides about a training before it runs: its positions, and what micro batches change."""

import json
from collections.abc import Iterator, Mapping

from flows.declare.pipeline import Pipeline
from lineage.artifact import SOURCE
from lineage.errors import ConfigError
from lineage.sources import local_paths
from tasks.dpo import DPO
from tasks.method import REWARD_HEAD, Training
from tasks.train.models import learned_positions, too_few_positions
from tasks.train.pair_loss import PairLoss

_POLICY = "policy"


def check_positions(pipeline: Pipeline) -> None:
    """That no row is longer than a model that looks positions up in a table.

    Raises:
        ConfigError: names the stage's field, and the most that is accepted.
    """
    for name, method, config in _trainings(pipeline):
        positions = learned_positions(config)
        if positions is not None and method.max_length > positions:
            wrong = too_few_positions(method.max_length, positions, str(config["model_type"]))
            raise ConfigError(f"stages.{name}.method.{wrong}")


def batch_notes(pipeline: Pipeline) -> dict[str, str]:
    """Stage -> why its ``micro_batch_size`` and ``num_workers`` change the model, where they do.

    Elsewhere they change the order of additions alone. Of a model that is not on this machine nothing is known.
    """
    found = {}
    for name, method, config in _trainings(pipeline):
        reasons = list(_reasons(method, config))
        if reasons:
            found[name] = (
                f"stages.{name}: micro_batch_size and num_workers change the model: {' and '.join(reasons)}; keep them "
                "as they are to repeat it"
            )
    return found


def _reasons(method: Training, config: Mapping[str, object]) -> Iterator[str]:
    if method.adapter and method.adapter.dropout:
        yield f"dropout is drawn per micro batch (adapter.dropout={method.adapter.dropout:g})"
    # Methods on pairs switch the base's dropout off.
    if not isinstance(method, DPO | PairLoss) and method.models[_POLICY] != REWARD_HEAD:
        rates = {key: value for key, value in config.items() if key.endswith(("dropout", "pdrop"))}
        drawn = [f"{key}={rate:g}" for key, rate in rates.items() if isinstance(rate, float) and rate > 0]
        if drawn:
            yield f"dropout is drawn per micro batch ({', '.join(drawn)})"
    weight = config.get("router_aux_loss_coef")
    if isinstance(weight, float) and weight and method.models[_POLICY] != REWARD_HEAD:
        yield f"the routers' loss is one of each micro batch (router_aux_loss_coef={weight:g})"


def _trainings(pipeline: Pipeline) -> Iterator[tuple[str, Training, Mapping[str, object]]]:
    """Each training with the ``config.json`` of the model that its chain begins with; empty: it is not known."""
    configs: dict[str, Mapping[str, object]] = {}
    for name in pipeline.used_sources():
        configs[SOURCE + name] = _config(pipeline.sources[name].path)
    for name in pipeline.order():
        stage = pipeline.stages[name]
        given = stage.inputs.get(_POLICY)
        configs[name] = configs.get(pipeline.key(given), {}) if given else {}
        if isinstance(stage.method, Training) and _POLICY in getattr(stage.method, "models", {}):
            yield name, stage.method, configs[name]


def _config(path: str) -> Mapping[str, object]:
    for directory in local_paths(path)[:1]:
        try:
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # rows, or a model that the check of models speaks of
            continue
        if isinstance(config, dict):
            text = config.get("text_config")
            return {**config, **text} if isinstance(text, dict) else config
    return {}

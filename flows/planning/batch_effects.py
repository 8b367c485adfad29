"""What of a model's files decides about a training before it runs: its positions, and what micro batches change."""

from collections.abc import Iterator, Mapping

from flows.declare.pipeline import Pipeline
from flows.planning.root_model import POLICY, root_config, root_directory, root_of
from lineage.artifact import SOURCE
from lineage.errors import ConfigError
from tasks.data.kinds import CONVERSATIONS, TEXT
from tasks.method import REWARD_HEAD, Training
from tasks.train.models import learned_positions, too_few_positions

_DROPOUT = ("dropout", "pdrop", "dropout_p", "dropout_prob", "dropout_rate")  # how rates in a config.json end
_OF_HEADS = ("classifier", "summary")  # how rates of heads begin that a language model does not have


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

    Elsewhere they change the order of additions alone.
    """
    found = {}
    for name, method, config in _trainings(pipeline):
        root = root_of(pipeline, name)
        reasons = list(_reasons(method, config))
        if reasons:
            found[name] = (
                f"stages.{name}: micro_batch_size and num_workers change the model: {' and '.join(reasons)}; keep them "
                "as they are to repeat it"
            )
        elif pipeline.is_source(root) and root_directory(pipeline, root) is None:
            path = pipeline.sources[root.removeprefix(SOURCE)].path
            found[name] = (
                f"{path} is not on this machine yet: whether micro_batch_size and num_workers change what is trained "
                "from it is unknown, and max_length is not checked against its positions; plan again once a run has "
                "fetched it"
            )
    return found


def _reasons(method: Training, config: Mapping[str, object]) -> Iterator[str]:
    if method.adapter and method.adapter.dropout:
        yield f"dropout is drawn per micro batch (adapter.dropout={method.adapter.dropout:g})"
    if method.neftune_alpha:
        yield f"noise is drawn per micro batch (neftune_alpha={method.neftune_alpha:g})"
    if not _disables_dropout(method):
        rates = {
            key: value for key, value in config.items() if key.endswith(_DROPOUT) and not key.startswith(_OF_HEADS)
        }
        drawn = [f"{key}={rate:g}" for key, rate in rates.items() if isinstance(rate, float) and rate > 0]
        if drawn:
            yield f"dropout is drawn per micro batch ({', '.join(drawn)})"
    weight = config.get("router_aux_loss_coef")
    if isinstance(weight, float) and weight and method.models[POLICY] != REWARD_HEAD:
        yield f"the routers' loss is one of each micro batch (router_aux_loss_coef={weight:g})"


def _disables_dropout(method: Training) -> bool:
    """Whether the base's dropout is off: TRL's configs for pairs, single answers and prompts have an option for it,
    which ``TrainingRun.trl`` sets; a loop of a method's own gets the model as it is."""
    reads = getattr(method, "reads", None)  # a method with a run of its own has none
    return type(method).loop is Training.loop and reads not in (TEXT, CONVERSATIONS, None)


def _trainings(pipeline: Pipeline) -> Iterator[tuple[str, Training, Mapping[str, object]]]:
    """Each training with the ``config.json`` of the model that its chain begins with; empty: it is not known."""
    for name in pipeline.order():
        method = pipeline.stages[name].method
        if isinstance(method, Training) and POLICY in getattr(method, "models", {}):
            config = root_config(pipeline, name)
            text = config.get("text_config")
            yield name, method, {**config, **text} if isinstance(text, dict) else config

"""Training of some of the weights: which parameters are frozen."""

import fnmatch
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from lineage.errors import ConfigError
from lineage.fingerprint import Setting
from tasks.data.images import ModelPart, Part
from tasks.train.optim.optimizers import names_in

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel

_PROJECTORS = ("projector", "connector", "merger", "modality_projection", "aligner")  # in the names of what joins both
TOWERS = ("vision", "visual", "audio", *_PROJECTORS)  # in the names of what reads no text
_EMBEDDINGS = ("embed", "wte", "wpe")  # in the names of what lies before the blocks
_CROSSES = ".cross_attn_attn_gate"  # ends the name of a parameter of each layer that attends to images
_TRAINED = "_trained_parts"  # attribute of a model that reads images
_GIVES_GRADIENTS = "_embeddings_give_gradients"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Freeze(Setting):
    """The weights that a full training freezes.

    Args:
        except_last_layers: how many of the last blocks are trained, together with the last norm and with a head that is
            not the embedding.
        modules: names of modules, or globs over full names of parameters, such as ``*.mlp.*``, separated by commas.
    """

    except_last_layers: Annotated[int, Gt(0)] | None = None
    modules: str | None = None

    def __post_init__(self) -> None:
        if (self.except_last_layers is None) == (self.modules is None):
            raise ConfigError(
                f"freeze.except_last_layers={self.except_last_layers} and freeze.modules={self.modules}: one of them "
                "says which weights are frozen; set one, or freeze=null to train every weight"
            )
        names_in("freeze.modules", self.modules, "embed_tokens,*.mlp.*")

    def frozen(self, parameters: Iterable[str]) -> set[str]:
        """The names of the frozen parameters.

        Raises:
            ConfigError: a name matches nothing, there are too few blocks, or no weight is trained.
        """
        every = list(parameters)
        found = self._before_last_layers(every) if self.except_last_layers else self._named(every)
        if len(found) == len(every):
            raise ConfigError(f"freeze.modules={self.modules}: every weight is frozen; name fewer modules")
        return found

    def why_rows_stay(self, ids: Sequence[int], parameters: Iterable[str], with_rows: Collection[str]) -> str | None:
        """As ``adapters.why_rows_stay``.

        Args:
            parameters: names of the model's weights.
            with_rows: names of modules that have a row for each token.
        """
        found = [name for name in sorted(self.frozen(parameters)) if not set(with_rows).isdisjoint(name.split("."))]
        if not found:
            return None
        return (
            f"the rows of its new tokens ({', '.join(map(str, sorted(ids)))}) would stay the mean of the others, since "
            f"freeze keeps {' and '.join(found)}; set freeze=null for the first training, or freeze other modules"
        )

    def _before_last_layers(self, parameters: list[str]) -> set[str]:
        assert self.except_last_layers
        towers = {name for name in parameters if any(word in name for word in TOWERS)}  # rows of text train none
        blocks = {name: index for name in parameters if name not in towers and (index := block_of(name)) is not None}
        num_blocks = max(blocks.values(), default=-1) + 1
        if self.except_last_layers >= num_blocks:
            raise ConfigError(
                f"freeze.except_last_layers={self.except_last_layers}: the model has {num_blocks} layers, so that none "
                f"is frozen; set at most {num_blocks - 1}, or freeze=null to train every weight"
            )
        first = num_blocks - self.except_last_layers
        return towers | {
            name
            for name in parameters
            if (blocks[name] < first if name in blocks else any(word in name for word in _EMBEDDINGS))
        }

    def _named(self, parameters: list[str]) -> set[str]:
        found: set[str] = set()
        for wanted in names_in("freeze.modules", self.modules):
            matched = {name for name in parameters if fnmatch.fnmatchcase(name, wanted) or f".{wanted}." in f".{name}."}
            if not matched:
                ends = sorted({part for name in parameters for part in name.split(".")[:-1] if not part.isdigit()})
                raise ConfigError(
                    f"freeze.modules={self.modules}: the model has no module {wanted}; it has {', '.join(ends)}; name "
                    "some of these, or a glob over full names of parameters"
                )
            found |= matched
        return found


def freeze(model: "Module", setting: Freeze) -> None:
    """Freezes the parameters of a model that a setting names."""
    parameters = dict(model.named_parameters())
    frozen = setting.frozen(parameters)
    for name in frozen:
        parameters[name].requires_grad_(False)
    logger.info("frozen=%d of=%d parameters=%s", len(frozen), len(parameters), setting)


def unread_by_text(model: "PreTrainedModel") -> set[str]:
    """The names of the parameters that rows of text never reach, as those of a vision tower; empty: of a text model.

    They are all but the decoder, the embedding and the head; and of the decoder the layers that attend to images.
    """
    if model.config.get_text_config() is model.config:
        return set()
    parts = [
        model.get_decoder(),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
        getattr(model, "score", None),
    ]
    read = {id(each) for part in parts if part is not None for each in part.parameters()}
    named = dict(model.named_parameters())
    return {name for name, each in named.items() if id(each) not in read} | _crossed(named)


def part_of(parameter: str) -> Part:
    """The part of a model that a parameter outside of its language model belongs to."""
    return "projector" if any(word in parameter for word in _PROJECTORS) else "vision"


def _crossed(names: Collection[str]) -> set[str]:
    """Of the names of weights those of layers that attend to images, which rows of text skip."""
    layers = tuple(name.removesuffix(_CROSSES) + "." for name in names if name.endswith(_CROSSES))
    return {name for name in names if name.startswith(layers)}


def _by_part(names: Collection[str], unread: Collection[str]) -> dict[str, ModelPart]:
    """The part of each weight of a model; a new head for scores is of none.

    Args:
        unread: those that rows of text do not reach.
    """
    crossed, found = _crossed(names), dict[str, ModelPart]()
    for name in names:
        if name in crossed:
            found[name] = "cross_attention"
        elif name in unread:
            found[name] = part_of(name)
        elif not name.startswith("score."):
            found[name] = "language"
    return found


def idle(names: Collection[str], trains: Collection[ModelPart]) -> set[str]:
    """Of the names of weights those that a training leaves as they are: the model is in no memory yet.

    Args:
        trains: the parts that it trains.
    """
    towers = {name for name in names if any(word in name for word in TOWERS)}
    return {name for name, part in _by_part(names, towers).items() if part not in trains}


def freeze_unread(model: "PreTrainedModel", trains: Collection[ModelPart]) -> None:
    """Freezes what text does not reach: workers would wait for its gradients, which never come.

    Args:
        trains: the parts that are trained: with all of their weights, or by what an adapter has there. Those that text
            does not reach are trained by images. ``untouched`` then leaves them out.

    Raises:
        ConfigError: nothing of a part can be trained.
    """
    if not (never := unread_by_text(model)):
        return
    vars(model)[_TRAINED] = frozenset(trains)
    unread, parameters = untouched(model), dict(model.named_parameters())
    trained = {part for name, part in _by_part(parameters, never).items() if parameters[name].requires_grad}
    for part in trains:
        if part not in trained and part in ("projector", "vision"):
            raise ConfigError(
                f"images.trains={part}: the model has no such part, or no linear layer there for an adapter; remove it"
            )
    for name in unread:
        parameters[name].requires_grad_(False)
    if unread:
        logger.info("frozen=%d parameters, which are not trained: %s", len(unread), ", ".join(_parts(unread)))
    if "language" not in trains and not hasattr(model, _GIVES_GRADIENTS):
        # A batch without images would reach no trained weight, and its loss would have no gradient at all.
        vars(model)[_GIVES_GRADIENTS] = model.get_input_embeddings().register_forward_hook(_give_gradients)


def _give_gradients(_module: "Module", _arguments: object, output: "Tensor") -> None:
    import torch

    if torch.is_grad_enabled():
        output.requires_grad_(True)


def untouched(model: "PreTrainedModel") -> set[str]:
    """The parameters that are those of the base, since their parts are not trained; by default what text misses."""
    trained, unread = vars(model).get(_TRAINED, ("language",)), unread_by_text(model)
    if not unread:
        return set()
    named = [name for name, _ in model.named_parameters()]
    return {name for name, part in _by_part(named, unread).items() if part not in trained}


def _parts(names: Iterable[str]) -> list[str]:
    """The parts of a model that parameters are in: ``model.visual``."""
    return sorted({".".join(name.split(".")[:2]) for name in names})


def block_of(name: str) -> int | None:
    """The index of the block that a parameter or a module is in."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)

"""Training of some of the weights: which parameters are frozen."""

import fnmatch
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from lineage.errors import ConfigError
from lineage.fingerprint import Setting
from tasks.data.images import Part
from tasks.train.optim.optimizers import names_in

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel

_PROJECTORS = ("projector", "connector", "merger", "modality_projection", "aligner")  # in the names of what joins both
TOWERS = ("vision", "visual", "audio", *_PROJECTORS)  # in the names of what reads no text
_EMBEDDINGS = ("embed", "wte", "wpe")  # in the names of what lies before the blocks
_TRAINED = "_trained_beside_text"  # attribute of a model: its parts that text does not reach, and images train
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

    They are all but the decoder, the embedding and the head.
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
    return {name for name, each in model.named_parameters() if id(each) not in read}


def part_of(parameter: str) -> Part:
    """The part of a model that a parameter outside of its language model belongs to."""
    return "projector" if any(word in parameter for word in _PROJECTORS) else "vision"


def idle(names: Iterable[str], trains: Collection[Part] | None) -> set[str]:
    """Of the names of weights those of a tower or projector that a training leaves as they are: it is in no memory yet.

    Args:
        trains: parts of it that are trained all the same.
    """
    towers = (name for name in names if any(word in name for word in TOWERS))
    return {name for name in towers if part_of(name) not in (trains or ())}


def freeze_unread(model: "PreTrainedModel", trains: Collection[Part] | None = None) -> None:
    """Freezes what text does not reach: workers would wait for its gradients, which never come.

    Args:
        trains: parts of it that are trained all the same, on rows with images: with all of their weights, or by what an
            adapter has there. ``untouched`` then leaves them out.

    Raises:
        ConfigError: nothing of a part can be trained.
    """
    vars(model)[_TRAINED] = frozenset(trains or ())
    unread, parameters = untouched(model), dict(model.named_parameters())
    trained = {part_of(name) for name in unread_by_text(model) if parameters[name].requires_grad}
    for part in trains or ():
        if part not in trained:
            raise ConfigError(
                f"images.trains={part}: the model has no such part, or no linear layer there for an adapter; remove it"
            )
    for name in unread:
        parameters[name].requires_grad_(False)
    if unread:
        logger.info("frozen=%d parameters, which text does not reach: %s", len(unread), ", ".join(_parts(unread)))


def untouched(model: "PreTrainedModel") -> set[str]:
    """The parameters that are those of the base: text does not reach them, and images do not train them."""
    trained = vars(model).get(_TRAINED, ())
    return {name for name in unread_by_text(model) if part_of(name) not in trained}


def _parts(names: Iterable[str]) -> list[str]:
    """The parts of a model that parameters are in: ``model.visual``."""
    return sorted({".".join(name.split(".")[:2]) for name in names})


def block_of(name: str) -> int | None:
    """The index of the block that a parameter or a module is in."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)

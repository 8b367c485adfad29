"""Adapters: the setting, and its PEFT configuration."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from lineage.errors import ConfigError
from lineage.fingerprint import without_nones
from tasks.train.quantization import Format, Quantization
from tasks.train.quantized_base import detect_quantized_layers, is_quantized

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"  # every linear layer except the head
Type = Literal["lora"]
DEFAULT: Type = "lora"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Few weights that are trained beside a frozen base. The output is the merged model.

    Args:
        type: an entry of ``ADAPTERS``; ``lora``: Hu et al. 2021, arXiv:2106.09685.
        target_modules: names of linear layers, separated by commas; ``all-linear``: all except the head.
        quantization: short for ``quantization.format``, of the training that has the adapter.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    type: Type = DEFAULT
    rank: Annotated[int, Gt(0)] = 16
    alpha: Annotated[int, Gt(0)] = 32
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    target_modules: str = ALL_LINEAR
    quantization: Format | None = None

    def __post_init__(self) -> None:
        if not all(self.target_names):
            raise ConfigError(
                f"adapter.target_modules={self.target_modules!r}: a name is empty; names of linear layers separated by "
                f"commas are accepted; set for example q_proj,v_proj, or {ALL_LINEAR}"
            )

    @property
    def target_names(self) -> list[str]:
        return [name.strip() for name in self.target_modules.split(",")]

    def identity(self) -> dict[str, object]:
        """Its part of a recipe."""
        values = without_nones(asdict(self))
        assert isinstance(values, dict)
        if values["type"] == DEFAULT:
            del values["type"]
        return {"adapter": values}


def peft_config(
    adapter: Adapter | None, quantization: Quantization | None, model: "PreTrainedModel"
) -> "PeftConfig | None":
    """A method's adapter as PEFT's configuration; the new head of a reward model is trained and saved in full.

    Args:
        quantization: of the model.

    Raises:
        ConfigError: the model has no module of such a name.
    """
    if adapter is None:
        return None
    return ADAPTERS[adapter.type](adapter, quantization, model)


def _lora(adapter: Adapter, quantization: Quantization | None, model: "PreTrainedModel") -> "PeftConfig":
    from peft import LoraConfig

    detect_quantized_layers(is_quantized(model))
    is_reward_model = model.get_output_embeddings() is None
    stated = {
        "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": adapter.dropout,
        "task_type": "SEQ_CLS" if is_reward_model else "CAUSAL_LM",
        "modules_to_save": ["score"] if is_reward_model else None,
    }  # fmt: skip
    targets = ALL_LINEAR if adapter.target_modules == ALL_LINEAR else _found(adapter, model)
    layers = _layers_beside_experts(LoraConfig(**stated, target_modules=targets), model)
    if layers is None:
        return LoraConfig(**stated, target_modules=targets)
    if is_quantized(model):
        logger.warning("quantization: the experts of a mixture are frozen; adapted: %s", layers)
        return LoraConfig(**stated, target_modules=layers)
    if adapter.dropout:
        raise ConfigError(
            f"adapter.dropout={adapter.dropout}: the adapter is put on the experts of a mixture, which are parameters: "
            f"PEFT has no dropout for them; set adapter.dropout=0, or adapter.target_modules={','.join(layers)}"
        )
    return LoraConfig(**stated, target_modules=targets)


def _layers_beside_experts(config: "PeftConfig", model: "PreTrainedModel") -> list[str] | None:
    """The linear layers among a config's targets in a mixture whose experts are parameters; None: it has no experts."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = copy.deepcopy(config)
    convert_peft_config_for_transformers(converted, model=model, conversions=None)
    return sorted(converted.target_modules) if converted.target_parameters else None


def _found(adapter: Adapter, model: "PreTrainedModel") -> list[str]:
    """The target names, each of which the model must have: PEFT ignores a name that matches nothing."""
    from torch.nn import Linear

    ends = [name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Linear)]
    missing = [name for name in adapter.target_names if name not in ends]
    if missing:
        raise ConfigError(
            f"adapter.target_modules={adapter.target_modules}: the model has no linear layer {', '.join(missing)}; "
            f"it has {', '.join(sorted(set(ends)))}; name some of these, or {ALL_LINEAR}"
        )
    return adapter.target_names


# Type -> builder of its PEFT configuration.
ADAPTERS: Mapping[str, Callable[[Adapter, Quantization | None, "PreTrainedModel"], "PeftConfig"]] = {"lora": _lora}

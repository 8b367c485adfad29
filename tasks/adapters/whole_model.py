"""Loading a model whole: one that stands alone, or an adapter with all that lies under it."""

from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import Kind
from tasks.adapters.base import base_and_adapters
from tasks.adapters.four_bit import FourBit, keep_layout, look_for_quantized

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_LOCAL = {"trust_remote_code": False, "local_files_only": True}
_GENERATION = "generation_config.json"


def whole_model(
    kind: Kind,
    directory: Path,
    config: "PreTrainedConfig | None" = None,
    *,
    last: Path | None = None,
    four_bit: FourBit | None = None,
) -> "PreTrainedModel":
    """A model in fp32, with every adapter merged.

    Args:
        kind: a policy, or a reward model: of a policy's directory, its backbone under a head that is drawn now.
        config: where it is not that of the directory.
        last: one more adapter, that goes upon it.
        four_bit: how its linear layers are rounded once all is merged.

    Raises:
        ArtifactError: the base of an adapter is missing, or another model now.
    """
    from transformers import AutoConfig, GenerationConfig

    base, adapters = base_and_adapters(directory)
    adapters += [last] if last else []
    config = config or AutoConfig.from_pretrained(directory, **_LOCAL)
    model = _full_model(kind, base, config, four_bit if not adapters else None)
    for adapter in adapters:
        model = _merged(model, adapter)
    if adapters and (directory / _GENERATION).exists() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    if four_bit:
        model = four_bit.applied(model) if adapters else model
        keep_layout(model)
    return model


def _full_model(kind: Kind, directory: Path, config: "PreTrainedConfig", four_bit: FourBit | None) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.trainer.reward_trainer import suppress_seqcls_warning

    auto = AutoModelForCausalLM if kind == Kind.CHECKPOINT else AutoModelForSequenceClassification
    with suppress_seqcls_warning():  # that the head of a new reward model is new
        model: PreTrainedModel = auto.from_pretrained(
            directory, config=config, dtype=torch.float32, use_safetensors=True, **_LOCAL,
            **(four_bit.options() if four_bit else {}),
        )  # fmt: skip
    return model


def _merged(model: "PreTrainedModel", adapter: Path) -> "PreTrainedModel":
    from peft import PeftConfig, PeftModel

    look_for_quantized(False)
    config = PeftConfig.from_pretrained(adapter)
    config.task_type = None  # a policy's adapter goes into its backbone also where that is under a reward model's head
    merged: PreTrainedModel = PeftModel.from_pretrained(model, adapter, config=config).merge_and_unload()
    return merged

"""Adapters: what PEFT is told of one, and how one is saved by itself."""

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import ConfigError
from tasks.adapters.base import Base
from tasks.adapters.four_bit import look_for_quantized
from tasks.method import ALL_LINEAR, Input, LoRA

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel


def lora_config(adapter: LoRA | None, model: "PreTrainedModel") -> "LoraConfig | None":
    """PEFT's form of ``adapter``; the new score head of a reward model is trained and saved in full.

    Raises:
        ConfigError: the model has no module of a name.
    """
    if adapter is None:
        return None
    from peft import LoraConfig

    look_for_quantized(adapter.quantization is not None)
    is_reward_model = model.get_output_embeddings() is None
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=ALL_LINEAR if adapter.target_modules == ALL_LINEAR else _found(adapter, model),
        task_type="SEQ_CLS" if is_reward_model else "CAUSAL_LM",
        modules_to_save=["score"] if is_reward_model else None,
    )


def _found(adapter: LoRA, model: "PreTrainedModel") -> list[str]:
    """The names of the modules, each of which the model has: PEFT passes over one that fits nowhere."""
    from torch.nn import Linear

    ends = [name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Linear)]
    missing = [name for name in adapter.target_names if name not in ends]
    if missing:
        raise ConfigError(
            f"adapter.target_modules={adapter.target_modules}: the model has no linear layer {', '.join(missing)}; "
            f"it has {', '.join(sorted(set(ends)))}; name some of these, or {ALL_LINEAR}"
        )
    return adapter.target_names


def save_adapter(model: "PeftModel", directory: Path, policy: Input) -> None:
    """Saves the adapter with bytes that depend on the training only: no paths, sorted module names."""
    model.save_pretrained(directory, safe_serialization=True)
    (directory / "README.md").unlink(missing_ok=True)  # PEFT's model card, which names a local path
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    base = Base.of(policy)
    config["base_model_name_or_path"], config["revision"] = base.hub_id or base.fingerprint, base.revision
    for key in ("target_modules", "modules_to_save"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def plain_config(model: "PreTrainedModel") -> "PreTrainedConfig":
    """What a model says of itself, as it would in full precision."""
    config: PreTrainedConfig = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if "quantization_config" in config:
        del config.quantization_config
    return config

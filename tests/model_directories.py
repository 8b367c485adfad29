"""Directories that a source may name: adapters as PEFT saves them, and models whose files are edited or moved."""

import json
import shutil
from pathlib import Path


def write_adapter(directory: Path, base: Path, *, named: str | None = None, config: object = None) -> Path:
    """An adapter on a base that changes its answers.

    Args:
        named: its base in ``adapter_config.json``; None: the absolute path.
        config: of PEFT; None: a LoRA on all linear layers.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, config or LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
            assert parameter.isfinite().all(), name
    adapted.save_pretrained(directory)
    edit(directory / "adapter_config.json", base_model_name_or_path=named or str(base))
    return directory


def edit(path: Path, **values: object) -> None:
    """Changes values of a JSON file; None removes one."""
    found = {**(json.loads(path.read_text()) if path.exists() else {}), **values}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def move_tokenizer(source: Path, target: Path) -> None:
    """Moves the tokenizer of a directory to another one."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.move(source / name, target / name)

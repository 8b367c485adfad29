"""Optimizers by name: the setting, and the arguments of transformers' trainer that choose one."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from lineage.fingerprint import without_nones

Arguments = dict[str, object]
Beta = Annotated[float, Ge(0), Lt(1)]
Name = Literal["adamw_torch_fused", "adamw_torch"]
DEFAULT: Name = "adamw_torch_fused"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How gradients change the weights.

    Args:
        name: an entry of ``OPTIMIZERS``.
        betas: decay of the first and second moment; None: the optimizer's own, 0.9 and 0.999 for AdamW.
        eps: added to the denominator; None: the optimizer's own, 1e-8 for AdamW.
        weight_decay: decoupled, as in Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    name: Name = DEFAULT
    betas: tuple[Beta, Beta] | None = None
    eps: Annotated[float, Gt(0)] | None = None
    weight_decay: Annotated[float, Ge(0)] = 0.0

    def identity(self) -> dict[str, object]:
        """Its part of a recipe: ``weight_decay`` stands beside it, as in recipes from before it was a setting."""
        values = without_nones(asdict(self))
        assert isinstance(values, dict)
        decay = values.pop("weight_decay")
        if values["name"] == DEFAULT:
            del values["name"]
        return {"weight_decay": decay, **({"optimizer": values} if values else {})}


def _adam(setting: Optimizer) -> Arguments:
    betas = dict(zip(("adam_beta1", "adam_beta2"), setting.betas or (), strict=False))
    return {"optim": setting.name, **betas, **({"adam_epsilon": setting.eps} if setting.eps else {})}


# What a row returns are fields of transformers' TrainingArguments. One that transformers cannot build by name returns
# ``optimizer_cls_and_kwargs``, a parameter of its Trainer.
OPTIMIZERS: Mapping[str, Callable[[Optimizer], Arguments]] = {
    "adamw_torch_fused": _adam,
    "adamw_torch": _adam,
}


def optimizer_args(setting: Optimizer) -> Arguments:
    """The arguments of a trainer for an optimizer."""
    return {"weight_decay": setting.weight_decay, **OPTIMIZERS[setting.name](setting)}

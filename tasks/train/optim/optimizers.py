"""Optimizers by name: the setting, the table of the options and requirements of each, and how one is built."""

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from lineage.errors import ConfigError
from lineage.fingerprint import Setting, set_fields

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer as TorchOptimizer
    from transformers import Trainer

Arguments = dict[str, object]
Group = dict[str, object]  # of parameters: ``params``, and the options for these parameters
Beta = Annotated[float, Ge(0), Lt(1)]
Name = Literal[
    "adamw_torch_fused", "adamw_torch", "sgd", "adafactor", "adagrad", "rmsprop",
    "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion", "lion_8bit", "paged_lion_8bit",
    "ademamix", "ademamix_8bit", "adamw_torch_4bit", "adamw_torch_8bit",
    "schedule_free_adamw", "schedule_free_sgd", "muon",
    "galore_adamw", "galore_adamw_layerwise", "apollo_adamw", "stable_adamw",
    "prodigy", "came", "grokadamw", "lomo",
]  # fmt: skip
DEFAULT: Name = "adamw_torch_fused"
EXTRA = "optimizers"  # of pyproject.toml: the packages below, except those with a non-commercial licence


@dataclass(frozen=True, kw_only=True)
class Optimizer(Setting):
    """How gradients change the weights.

    Args:
        name: an entry of ``OPTIMIZERS``, which says what each one is, needs and reads.
        betas: decay of the first and second moment, of ``ademamix`` and ``came`` of a third; None: the optimizer's own,
            0.9 and 0.999 for AdamW.
        eps: added to the denominator; None: the optimizer's own, 1e-8 for AdamW.
        weight_decay: decoupled, as in Loshchilov and Hutter 2019, arXiv:1711.05101, of all but biases and norms;
            ``sgd``, ``adagrad`` and ``rmsprop`` add it to the gradient; ``lomo`` decays every weight.
        momentum: decay of the mean gradient; None: of ``sgd`` and ``rmsprop`` 0, of ``muon`` 0.95, of
            ``schedule_free_sgd`` 0.9.
        nesterov: whether momentum looks one step ahead; None: ``sgd`` does not, ``muon`` does.
        alpha: ``rmsprop``: decay of the squared gradient, 0.99. ``ademamix``: weight of the slow average, 5.
        clip_threshold: largest root mean square of an update; ``adafactor`` and ``came``: 1.
        rank: of the subspace onto which ``galore`` and ``apollo`` project gradients; 128.
        update_proj_gap: steps from one subspace to the next; 200.
        scale: of a projected update; ``galore`` 0.25, ``apollo`` 1.
        ns_steps: Newton-Schulz iterations that make an update of ``muon`` orthogonal; 5.
        d_coef: factor of the step size that ``prodigy`` finds; 1.
        lora_plus_ratio: learning rate of a LoRA's B, and of trained vectors, over that of its A. LoRA+: Hayou et al.
            2024, arXiv:2402.12354. None: one learning rate.
        weights: ``bf16`` trains all weights in half the memory: those of linear layers and their gradients are in
            bf16, the optimizer keeps the lower 16 bits of each weight, and the output is in bf16. None: fp32.
    """

    name: Name = DEFAULT
    betas: tuple[Beta, ...] | None = None
    eps: Annotated[float, Gt(0)] | None = None
    weight_decay: Annotated[float, Ge(0)] = 0.0
    momentum: Beta | None = None
    nesterov: bool | None = None
    alpha: Annotated[float, Gt(0)] | None = None
    clip_threshold: Annotated[float, Gt(0)] | None = None
    rank: Annotated[int, Gt(0)] | None = None
    update_proj_gap: Annotated[int, Gt(0)] | None = None
    scale: Annotated[float, Gt(0)] | None = None
    ns_steps: Annotated[int, Gt(0), Lt(100)] | None = None
    d_coef: Annotated[float, Gt(0)] | None = None
    lora_plus_ratio: Annotated[float, Ge(1)] | None = None
    weights: Literal["bf16"] | None = None

    def __post_init__(self) -> None:
        entry = OPTIMIZERS[self.name]
        refuse_unread("optimizer", self, "name", {name: each.reads for name, each in OPTIMIZERS.items()})
        if self.betas is not None and len(self.betas) != entry.num_betas:
            raise ConfigError(
                f"optimizer.betas={list(self.betas)}: {self.name} has {entry.num_betas}; set that many, or "
                "optimizer.betas=null for its own"
            )
        if self.name == "rmsprop" and self.alpha is not None and self.alpha >= 1:
            raise ConfigError(f"optimizer.alpha={self.alpha:g}: of rmsprop it is a decay, below 1; set it to 0.99")
        if self.nesterov and self.name == "sgd" and not self.momentum:
            raise ConfigError(
                "optimizer.nesterov=true: sgd has no momentum to look ahead with; set optimizer.momentum=0.9"
            )

    @property
    def state_bytes(self) -> int:
        """The fewest bytes of its state in a checkpoint, per trained weight."""
        of_momentum = 4 if self.name in ("sgd", "rmsprop") and self.momentum else 0
        return OPTIMIZERS[self.name].state_bytes + of_momentum

    def identity(self) -> dict[str, object]:
        """Its part of a recipe: ``weight_decay`` stands beside it, as in recipes from before it was a setting."""
        values = set_fields(self)
        decay = values.pop("weight_decay")
        if values["name"] == DEFAULT:
            del values["name"]
        return {"weight_decay": decay, **({"optimizer": values} if values else {})}


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that an optimizer needs and that is not in the lock.

    Args:
        module: that it brings; name: on PyPI, with the version that was tried.
        licence: named where it forbids commercial use.
    """

    module: str
    name: str
    licence: str | None = None

    @property
    def is_missing(self) -> bool:
        return importlib.util.find_spec(self.module) is None

    @property
    def install(self) -> str:
        """The command that installs it."""
        if self.licence:
            return f"pip install --no-deps {self.name}, whose licence is {self.licence}: non-commercial use only"
        return f"pip install 'posttrain[{EXTRA}]', or pip install --no-deps {self.name}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What an optimizer is, reads and needs.

    Args:
        about: what it does, and its paper.
        target: the class, or a function with the class's arguments, as ``module:name``.
        reads: the fields of the setting that it reads, in addition to ``weight_decay``.
        options: arguments that are always passed.
        optim: transformers' name, where its trainer must see one; None: its default.
        package: the package that it needs; None: it is in the lock.
        needs_gpu: whether its state is in memory that is paged between GPU and CPU.
        matrices: what holds for the matrices of linear layers alone, other than the head's; it may be set in a field
            of that name.
        state_bytes: of its state for each trained weight, in a checkpoint, at the least; matrices only where it
            treats them apart.
        in_backward: it updates each weight inside the backward pass: there is no gradient left to sum or to clip.
        averages: it needs no schedule: the model is an average of its steps.
    """

    about: str
    target: str
    reads: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    num_betas: int = 2
    optim: str | None = None
    package: Package | None = None
    needs_gpu: bool = False
    matrices: Mapping[str, object] = field(default_factory=dict)
    state_bytes: int = 0
    in_backward: bool = False
    averages: bool = False

    @property
    def projects(self) -> bool:
        """Whether it projects gradients of matrices onto few dimensions."""
        return "rank" in self.matrices


_OURS = "tasks.train.optim.own_optimizers"
_ADAM = ("betas", "eps")
_PLUS = "lora_plus_ratio"
_WEIGHTS = "weights"
_OF_EACH = (_PLUS, _WEIGHTS)  # of optimizers that treat each weight by itself
_PROJECTION = ("rank", "update_proj_gap", "scale")
_GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
_TORCHAO = Package(module="torchao", name="torchao==0.18.0")
_FREE = Package(module="schedulefree", name="schedulefree==1.4.1")
_GALORE_TORCH = Package(module="galore_torch", name="galore-torch==1.0")


_MOMENTS = {"AdamW": 2, "Lion": 1, "AdEMAMix": 3}


def _adamw(options: Mapping[str, object], about: str, optim: str | None = None) -> Entry:
    return Entry(
        about=about, target="torch.optim:AdamW", reads=(*_ADAM, *_OF_EACH), options=options, optim=optim, state_bytes=8
    )


def _bitsandbytes(cls: str, about: str, reads: tuple[str, ...], *, bits: int, paged: bool = False) -> Entry:
    paper = "; state in 8 bits: Dettmers et al. 2022, arXiv:2110.02861" if bits == 8 else ""
    return Entry(
        about=f"{about}{paper}{'; paged' if paged else ''} (bitsandbytes)", target=f"{_OURS}:in_few_bits",
        reads=(*reads, *_OF_EACH), num_betas=3 if cls == "AdEMAMix" else 2, needs_gpu=paged,
        state_bytes=_MOMENTS[cls] * bits // 8,
        options={"kind": cls, "optim_bits": bits, "is_paged": paged},
    )  # fmt: skip


_ADAMW, _LION = "AdamW: arXiv:1711.05101", "Lion: Chen et al. 2023, arXiv:2302.06675"
_ADEMAMIX = "AdEMAMix: Pagliardini et al. 2024, arXiv:2409.03137"
_FREE_PAPER = "schedule-free: Defazio et al. 2024, arXiv:2405.15682"
OPTIMIZERS: Mapping[str, Entry] = {
    "adamw_torch_fused": _adamw({"fused": True}, f"{_ADAMW}, in one kernel", "adamw_torch_fused"),
    "adamw_torch": _adamw({}, _ADAMW, "adamw_torch"),
    "sgd": Entry(
        about="stochastic gradient descent", target="torch.optim:SGD", reads=("momentum", "nesterov", *_OF_EACH)
    ),
    "adafactor": Entry(
        about="second moments as row and column means: Shazeer and Stern 2018, arXiv:1804.04235",
        target="transformers.optimization:Adafactor", reads=("clip_threshold", *_OF_EACH),
        options={"scale_parameter": False, "relative_step": False},  # the schedule sets the learning rate
    ),
    "adagrad": Entry(
        about="Duchi et al. 2011, JMLR 12", state_bytes=4, target="torch.optim:Adagrad", reads=("eps", *_OF_EACH)
    ),
    "rmsprop": Entry(
        about="Tieleman and Hinton 2012", state_bytes=4, target="torch.optim:RMSprop",
        reads=("eps", "momentum", "alpha", *_OF_EACH)
    ),
    "adamw_8bit": _bitsandbytes("AdamW", _ADAMW, _ADAM, bits=8),
    "paged_adamw_8bit": _bitsandbytes("AdamW", _ADAMW, _ADAM, bits=8, paged=True),
    "paged_adamw_32bit": _bitsandbytes("AdamW", _ADAMW, _ADAM, bits=32, paged=True),
    "lion": _bitsandbytes("Lion", _LION, ("betas",), bits=32),
    "lion_8bit": _bitsandbytes("Lion", _LION, ("betas",), bits=8),
    "paged_lion_8bit": _bitsandbytes("Lion", _LION, ("betas",), bits=8, paged=True),
    "ademamix": _bitsandbytes("AdEMAMix", _ADEMAMIX, (*_ADAM, "alpha"), bits=32),
    "ademamix_8bit": _bitsandbytes("AdEMAMix", _ADEMAMIX, (*_ADAM, "alpha"), bits=8),
    "adamw_torch_4bit": Entry(
        about=f"{_ADAMW}; state in 4 bits: Li et al. 2023, arXiv:2309.01507 (torchao)",
        state_bytes=1, target=f"{_OURS}:torchao_adamw", reads=(*_ADAM, _PLUS), options={"bits": 4}, package=_TORCHAO,
    ),
    "adamw_torch_8bit": Entry(
        about=f"{_ADAMW}; state in 8 bits: arXiv:2110.02861 (torchao)",
        state_bytes=2, target=f"{_OURS}:torchao_adamw", reads=(*_ADAM, _PLUS), options={"bits": 8}, package=_TORCHAO,
    ),
    "schedule_free_adamw": Entry(
        about=f"AdamW, {_FREE_PAPER}", state_bytes=12, target=f"{_OURS}:schedule_free", reads=(*_ADAM, _PLUS),
        options={"kind": "AdamWScheduleFree"}, package=_FREE, averages=True,
    ),
    "schedule_free_sgd": Entry(
        about=f"SGD, {_FREE_PAPER}", state_bytes=8, target=f"{_OURS}:schedule_free", reads=("momentum", _PLUS),
        options={"kind": "SGDScheduleFree"}, package=_FREE, averages=True,
    ),
    "muon": Entry(
        about="orthogonal updates of matrices: Jordan et al. 2024, scaled to AdamW's as in Liu et al. 2025, "
        "arXiv:2502.16982; AdamW on embeddings, head, norms and biases",
        state_bytes=4, target=f"{_OURS}:Muon",
        reads=(*_ADAM, "momentum", "nesterov", "ns_steps", _WEIGHTS), matrices={"muon": True},
    ),
    "galore_adamw": Entry(
        about="AdamW in a subspace of the gradients: Zhao et al. 2024, arXiv:2403.03507",
        target=f"{_OURS}:galore", reads=(*_ADAM, *_PROJECTION), matrices=_GALORE, package=_GALORE_TORCH,
    ),
    "galore_adamw_layerwise": Entry(
        about="GaLore that updates each weight inside the backward pass, as in arXiv:2306.09782; it logs grad_norm=0",
        target=f"{_OURS}:galore_layerwise", reads=(*_ADAM, *_PROJECTION), matrices=_GALORE, package=_GALORE_TORCH,
        in_backward=True,
    ),
    "apollo_adamw": Entry(
        about="AdamW's step sizes from random projections: Zhu et al. 2024, arXiv:2412.05270 (CC-BY-NC)",
        target=f"{_OURS}:apollo", reads=(*_ADAM, *_PROJECTION),
        matrices={**_GALORE, "scale": 1.0, "proj": "random", "scale_type": "channel"},
        package=Package(module="apollo_torch", name="apollo-torch==1.0.3", licence="CC-BY-NC"),
    ),
    "stable_adamw": Entry(
        about="AdamW with Adafactor's clipping of updates: Wortsman et al. 2023, arXiv:2304.13013",
        state_bytes=8, target="optimi:StableAdamW", reads=(*_ADAM, _PLUS),
        package=Package(module="optimi", name="torch-optimi==0.3.3"),
    ),
    "prodigy": Entry(
        about="Adam that finds its step size: Mishchenko and Defazio 2023, arXiv:2306.06101; learning_rate=1",
        state_bytes=16, target="prodigyopt:Prodigy", reads=(*_ADAM, "d_coef"),
        options={"use_bias_correction": True, "safeguard_warmup": True},  # as its documentation asks of a warm-up
        package=Package(module="prodigyopt", name="prodigyopt==1.1.2"),
    ),
    "came": Entry(
        about="Adafactor guided by confidence: Luo et al. 2023, arXiv:2307.02047",
        state_bytes=4, target="came_pytorch.CAME:CAME", reads=("betas", "clip_threshold", _PLUS), num_betas=3,
        package=Package(module="came_pytorch", name="came-pytorch==0.1.3"),
    ),
    "grokadamw": Entry(
        about="AdamW that amplifies slow gradients: Lee et al. 2024, arXiv:2405.20233",
        state_bytes=12, target=f"{_OURS}:grokadamw", reads=_ADAM,
        package=Package(module="grokadamw", name="grokadamw==0.1.2"),
    ),
    "lomo": Entry(
        about="gradient descent inside the backward pass: Lv et al. 2024, arXiv:2306.09782; it logs grad_norm=0",
        target=f"{_OURS}:lomo", optim="lomo", in_backward=True,
        package=Package(module="lomo_optim", name="lomo-optim==0.1.1"),
    ),
}  # fmt: skip


def names_in(setting: str, text: str | None, example: str = "q_proj,v_proj") -> list[str]:
    """The names of modules in a setting, which are separated by commas (ConfigError: a name is empty)."""
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if not all(names):
        raise ConfigError(
            f"{setting}={text!r}: a name is empty; names separated by commas are accepted; set for example {example}"
        )
    return names


def refuse_unread(where: str, setting: object, key: str, reads: Mapping[str, Collection[str]]) -> None:
    """Refuses a field that the named optimizer, schedule or type does not read, so that none is ignored.

    Args:
        where: the setting.
        key: its field that names what reads the others.
        reads: name -> the fields that it reads; a field that none of them has, all read.
    """
    name, some = getattr(setting, key), {field for each in reads.values() for field in each}
    for each in fields(setting):  # type: ignore[arg-type]
        if each.name in some.difference(reads[name]) and getattr(setting, each.name) != each.default:
            readers = ", ".join(other for other, own in reads.items() if each.name in own)
            raise ConfigError(
                f"{where}.{each.name}={getattr(setting, each.name)}: {name} has no such field; it has: "
                f"{', '.join(sorted(reads[name])) or 'none'}; remove it, or set {where}.{key} to one of {readers}"
            )


def optimizer_args(setting: Optimizer) -> Arguments:
    """The arguments of a trainer of transformers for an optimizer; ``install_optimizer`` does the rest."""
    betas = dict(zip(("adam_beta1", "adam_beta2"), setting.betas or (), strict=False))
    optim = OPTIMIZERS[setting.name].optim
    return {
        "weight_decay": setting.weight_decay,
        **({"optim": optim} if optim else {}),
        **betas,
        **({"adam_epsilon": setting.eps} if setting.eps else {}),
    }


def install_optimizer(trainer: "Trainer", setting: Optimizer, learning_rate: float) -> None:
    """Has a trainer of transformers build the optimizer, where its own arguments do not choose it.

    Under its own names transformers silently ignores settings: the betas and the weight decay of GaLore, the warm-up of
    schedule-free optimizers; and some of its optimizers save a state that cannot be loaded.
    """
    plain = setting.lora_plus_ratio is None and setting.weights is None
    if setting.name in ("adamw_torch", "adamw_torch_fused") and plain:
        return
    make = partial(build, setting, learning_rate, trainer.get_decay_parameter_names)
    trainer.optimizer_cls_and_kwargs = (lambda: make, {})  # transformers calls a non-class with the model


def build(
    setting: Optimizer, learning_rate: float, decayed: "Callable[[nn.Module], Sequence[str]]", model: "nn.Module"
) -> "TorchOptimizer":
    """The optimizer of a model's trained parameters.

    Args:
        decayed: the names of the parameters that weight decay applies to.

    Raises:
        ConfigError: it is for matrices, and none is trained.
    """
    from tasks.train.optim.own_optimizers import Split, keep_embeddings_in_32_bits, plain_groups, split_groups

    entry = OPTIMIZERS[setting.name]
    module, _, name = entry.target.partition(":")
    make = getattr(importlib.import_module(module), name)
    read = {each: getattr(setting, each) for each in entry.reads if each not in (*_OF_EACH, *_PROJECTION)}
    options = {**entry.options, **{each: value for each, value in read.items() if value is not None}}
    if options.get("optim_bits") == 8:
        keep_embeddings_in_32_bits(model)
    if setting.lora_plus_ratio is not None:
        from peft.optimizers import create_loraplus_optimizer

        plus: TorchOptimizer = create_loraplus_optimizer(
            model, make, lr=learning_rate, loraplus_lr_ratio=setting.lora_plus_ratio,
            loraplus_weight_decay=setting.weight_decay, **options,
        )  # fmt: skip
        return plus
    if setting.name == "lomo":
        of_all: TorchOptimizer = make(model, lr=learning_rate, weight_decay=setting.weight_decay, **options)
        return of_all
    if entry.matrices:
        own = {each: getattr(setting, each, None) or value for each, value in entry.matrices.items()}
        groups = split_groups(model, decayed(model), setting.weight_decay, own)
        if not groups[0]["params"]:
            raise ConfigError(
                f"optimizer.name={setting.name}: it treats matrices of linear layers apart, and this training trains "
                "none: its adapter has none, or all are frozen; set optimizer=adamw_torch_fused, or adapter=lora"
            )
    else:
        groups = plain_groups(model, decayed(model), setting.weight_decay)
    if setting.weights:
        return Split(groups, partial(make, lr=learning_rate, **options))
    built: TorchOptimizer = make(groups, lr=learning_rate, **options)
    return built

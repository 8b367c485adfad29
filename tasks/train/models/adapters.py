"""Adapters by type: the setting, the layers that it is put on, and how many weights it has.

``tasks.train.models.adapted`` builds them with PEFT. This file imports neither torch nor PEFT: the plan reads it.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from lineage.errors import ConfigError
from lineage.fingerprint import Setting, set_fields
from tasks.train.models.freeze import block_of
from tasks.train.models.quantization import Format
from tasks.train.optim.optimizers import names_in, refuse_unread

ALL_LINEAR = "all-linear"  # every linear layer except the head
# A group of layers -> words in the name of a module that holds them.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "ffn", "feed_forward", "feedforward"),
}
Type = Literal[
    "lora", "dora", "oft", "boft", "vera", "ia3", "loha", "lokr", "adalora", "hra", "miss", "fourierft", "randlora",
    "ln_tuning", "osf",
]  # fmt: skip
DEFAULT: Type = "lora"
HEADS = ("lm_head", "embed_out", "score")  # linear, and left out of all-linear
HEAD = "head"  # the head over the vocabulary, whatever its name
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
# These change the base, so that base + adapter is the input model.
CHANGE_THE_BASE = ("pissa", "olora", "lora_ga")
ADALORA_STEPS = 8  # at the least: to move weights and score ranks, to prune, and to train afterwards
ON_QUANTIZED = ("lora", "dora", "oft")  # the types that PEFT trains on a quantized base
NOT_ON_CONV1D = ("oft", "boft", "loha", "lokr", "hra", "miss", "osf")  # the types that PEFT puts only on linear layers
STACKED = ("lora",)  # the types that add up whatever their order: DoRA scales what is below it
FROM_DATA = ("eva", "lora_ga")  # need rows of the training
XAVIER = ("xavier", "xavier_uniform")  # of A, which PEFT lacks; B is zero
_INITS = ("gaussian", *XAVIER, "pissa", "olora", "orthogonal", "mica", "eva", "lora_ga")
_ADDED_LATER = {
    "type": DEFAULT,
    "rslora": False,
    "dropout_position": "pre",
}  # defaults other than None that stay out of the fingerprint
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, kw_only=True)
class Adapter(Setting):
    """A few weights that are trained beside a frozen base. The output is the merged model.

    A type reads some of the fields (``ADAPTERS``); another one that is set is refused.

    Args:
        type: an entry of ``ADAPTERS``; ``lora``: Hu et al. 2021, arXiv:2106.09685.
        dropout: of the adapter's input, or of its ranks.
        dropout_position: ``post``: of what the adapter adds to the layer, as in NeMo; None or ``pre``: of its input.
        target_modules: separated by commas: ``all-linear`` (all except the head), ``attention``, ``mlp``, ``head`` (of
            step sessions alone), names of linear layers, or globs over their full names, such as ``*.layers.1.*``.
        exclude_modules: names or globs of layers among them that get none.
        layers: indices of the blocks whose layers get one; None: all.
        modules_to_save: names of modules that are trained in full beside the adapter, separated by commas.
        trainable_token_indices: rows of the embedding that are trained too.
        bias: which biases are trained: those of all layers, or of the layers with an adapter; None: none.
        rslora: scale by alpha / sqrt(rank): Kalajdzievski 2023, arXiv:2312.03732.
        init: of the weights; None: PEFT's, with which the adapter starts as zero. ``pissa`` (and ``pissa_niter_N``, a
            faster SVD of N iterations) arXiv:2404.02948, ``olora`` arXiv:2406.01775, ``eva`` arXiv:2410.07170,
            ``lora_ga`` arXiv:2407.05000. ``xavier`` is NeMo's: normal, of variance 2 / (inputs + rank);
            ``xavier_uniform`` has that variance too. Under ``mica`` only half of the weights are trained.
        block_size: of the orthogonal blocks.
        num_frequencies: coefficients per layer.
        target_rank: the mean rank at the end of a training that prunes ranks; None: half of ``rank``.
        quantization: short for ``quantization.format``, of the training that has the adapter.
    """

    type: Type = DEFAULT
    rank: Annotated[int, Gt(0)] = 16  # of the update of a weight matrix
    alpha: Annotated[int, Gt(0)] = 32  # the update is scaled by alpha / rank
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    dropout_position: Literal["pre", "post"] | None = None
    target_modules: str = ALL_LINEAR
    exclude_modules: str | None = None
    layers: tuple[Annotated[int, Ge(0)], ...] | None = None
    modules_to_save: str | None = None
    trainable_token_indices: tuple[Annotated[int, Ge(0)], ...] | None = None
    bias: Literal["all", "lora_only"] | None = None
    rslora: bool = False
    init: str | None = None
    block_size: Annotated[int, Gt(0)] | None = None
    num_frequencies: Annotated[int, Gt(0)] | None = None
    target_rank: Annotated[int, Gt(0)] | None = None
    quantization: Format | None = None

    def __post_init__(self) -> None:
        for name in ("target_modules", "exclude_modules", "modules_to_save"):
            names_in(f"adapter.{name}", getattr(self, name))
        refuse_unread("adapter", self, "type", {name: row.reads for name, row in ADAPTERS.items()})
        self._check_init()
        if self.dropout_position == "post" and not self.dropout:
            raise ConfigError(
                "adapter.dropout_position=post with adapter.dropout=0: nothing is dropped; set adapter.dropout=0.1, or "
                "adapter.dropout_position=null"
            )
        if self.target_rank is not None and self.target_rank >= self.rank:
            raise ConfigError(
                f"adapter.target_rank={self.target_rank} and adapter.rank={self.rank}: {self.type} starts at rank and "
                f"prunes to target_rank; set a smaller target_rank, such as {max(1, self.rank // 2)}"
            )

    @property
    def target_names(self) -> list[str]:
        return names_in("adapter.target_modules", self.target_modules)

    @property
    def excluded_names(self) -> list[str]:
        return names_in("adapter.exclude_modules", self.exclude_modules)

    @property
    def saved_names(self) -> list[str]:
        return names_in("adapter.modules_to_save", self.modules_to_save)

    @property
    def reads_whole(self) -> bool:
        """Whether it reads or copies whole weights below it when it is put on a model."""
        is_drawn = self.init in (None, "gaussian", *XAVIER)
        return not (self.type == DEFAULT and is_drawn) or bool(self.saved_names or self.trainable_token_indices)

    @property
    def changes_the_base(self) -> bool:
        return self.init is not None and self.init.startswith(CHANGE_THE_BASE)

    def value(self, name: str) -> int:
        """A number as it is set, or the default of its type."""
        found = getattr(self, name)
        found = ADAPTERS[self.type].defaults.get(name) if found is None else found
        if name == "target_rank" and found is None:
            found = max(1, self.rank // 2)
        assert isinstance(found, int)
        return found

    def identity(self) -> dict[str, object]:
        """Its part of a recipe: without the fields that its type does not read, which keep their defaults."""
        values = set_fields(self)
        unread = _OF_SOME_TYPES - ADAPTERS[self.type].reads.keys()
        values = {name: value for name, value in values.items() if name not in unread}
        return {"adapter": {name: value for name, value in values.items() if _ADDED_LATER.get(name) != value}}

    @property
    def head(self) -> str | None:
        """The head among ``target_modules``, as it is named there."""
        return next((name for name in self.target_names if name.rpartition(".")[2] in (*HEADS, HEAD)), None)

    def require_no_head(self) -> None:
        """Refuses an adapter on the head, for trainings whose losses read the head's weights."""
        if head := self.head:
            raise ConfigError(
                f"adapter.target_modules={self.target_modules}: log-probabilities are computed from the weights of "
                f"{head} directly, so that an adapter on it would never be trained; remove it, or train it in full: "
                f"adapter.modules_to_save={'lm_head' if head == HEAD else head}"
            )

    def _check_init(self) -> None:
        if self.init is None:
            return
        if self.init not in _INITS and not re.fullmatch(r"pissa_niter_[1-9]\d*", self.init):
            raise ConfigError(
                f"adapter.init={self.init}: accepted are {', '.join(_INITS)} and pissa_niter_N; set one of them, or "
                "null for PEFT's own"
            )
        if self.type == "dora":
            raise ConfigError(
                f"adapter.init={self.init} with adapter.type=dora: DoRA splits the base's weights into magnitude and "
                "direction before this initialization; set adapter.type=lora, or adapter.init=null"
            )


# Number of an adapter's weights in one layer, from the adapter and the layer's numbers of outputs and inputs.
Count = Callable[[Adapter, int, int], int]


@dataclass(frozen=True, kw_only=True)
class AdapterType:
    """A row of ``ADAPTERS``.

    Args:
        config: the class of PEFT.
        paper: the paper that introduced it.
        reads: field of ``Adapter`` -> argument of the class; empty: it has none, and ``adapted`` does it.
        trained: counts a layer's weights that are trained.
        frozen: counts a layer's weights that are saved beside them.
        fixed: further arguments of the class.
        defaults: values of fields that are not set.
    """

    config: str
    paper: str
    reads: Mapping[str, str]
    trained: Count
    frozen: Count = lambda _adapter, _outputs, _inputs: 0
    fixed: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)


def _lora(adapter: Adapter, outputs: int, inputs: int) -> int:
    return adapter.rank * (inputs if adapter.init == "mica" else inputs + outputs)


def _mica(adapter: Adapter, outputs: int, inputs: int) -> int:
    return adapter.rank * outputs if adapter.init == "mica" else 0


def _oft(adapter: Adapter, outputs: int, inputs: int) -> int:
    size = adapter.value("block_size")
    return inputs // size * (size * (size - 1) // 2)


def _lokr(adapter: Adapter, outputs: int, inputs: int) -> int:
    (rows, more_rows), (columns, more_columns) = _factors(outputs), _factors(inputs)
    is_whole = adapter.rank >= max(more_rows, more_columns) / 2
    return rows * columns + (more_rows * more_columns if is_whole else adapter.rank * (more_rows + more_columns))


def _factors(number: int) -> tuple[int, int]:
    """The two factors that are closest to each other, the smaller first."""
    small = next(each for each in range(math.isqrt(number), 0, -1) if number % each == 0)
    return small, number // small


def _randlora(adapter: Adapter, outputs: int, inputs: int) -> int:
    least = min(outputs, inputs)
    return math.ceil(least / adapter.rank) * (adapter.rank + least)


def _osf(adapter: Adapter, outputs: int, inputs: int) -> int:
    return osf_rank(adapter, outputs, inputs) * (outputs + inputs + 1)


def osf_rank(adapter: Adapter, outputs: int, inputs: int) -> int:
    """How many singular directions of a layer are trained; at least one stays frozen."""
    return min(adapter.rank, min(outputs, inputs) - 1)


_LORA_FIELDS = {
    "rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "bias": "bias", "rslora": "use_rslora",
    "init": "init_lora_weights", "trainable_token_indices": "trainable_token_indices",
}  # fmt: skip
ADAPTERS: Mapping[str, AdapterType] = {
    "lora": AdapterType(
        config="LoraConfig", paper="Hu et al. 2021, arXiv:2106.09685", trained=_lora, frozen=_mica,
        reads={**_LORA_FIELDS, "dropout_position": ""},
    ),
    "dora": AdapterType(
        config="LoraConfig", paper="Liu et al. 2024, arXiv:2402.09353", reads=_LORA_FIELDS,
        trained=lambda adapter, outputs, inputs: adapter.rank * (inputs + outputs) + outputs, fixed={"use_dora": True},
    ),
    "oft": AdapterType(
        config="OFTConfig", paper="Qiu et al. 2023, arXiv:2306.07280; Qiu et al. 2025, arXiv:2506.19847",
        reads={"block_size": "oft_block_size"}, trained=_oft, fixed={"r": 0},  # PEFT never calls its module_dropout
        defaults={"block_size": 32},
    ),
    "boft": AdapterType(
        config="BOFTConfig", paper="Liu et al. 2023, arXiv:2311.06243",
        reads={"block_size": "boft_block_size", "dropout": "boft_dropout"}, defaults={"block_size": 4},
        trained=lambda adapter, outputs, inputs: inputs * adapter.value("block_size") + outputs,
    ),
    "vera": AdapterType(
        config="VeraConfig", paper="Kopiczko et al. 2023, arXiv:2310.11454",
        reads={"rank": "r", "dropout": "vera_dropout"},
        trained=lambda adapter, outputs, _inputs: adapter.rank + outputs,
    ),
    "ia3": AdapterType(
        config="IA3Config", paper="Liu et al. 2022, arXiv:2205.05638", reads={},
        trained=lambda _adapter, outputs, _inputs: outputs,
        fixed={"feedforward_modules": []},  # of a gated layer, the output of up_proj is the paper's input of down_proj
    ),
    "loha": AdapterType(
        config="LoHaConfig", paper="Hyeon-Woo et al. 2021, arXiv:2108.06098",
        reads={"rank": "r", "alpha": "alpha", "dropout": "rank_dropout"},
        trained=lambda adapter, outputs, inputs: 2 * adapter.rank * (inputs + outputs),
    ),
    "lokr": AdapterType(
        config="LoKrConfig", paper="Yeh et al. 2023, arXiv:2309.14859",
        reads={"rank": "r", "alpha": "alpha", "dropout": "rank_dropout"}, trained=_lokr,
    ),
    "adalora": AdapterType(
        config="AdaLoraConfig", paper="Zhang et al. 2023, arXiv:2303.10512",
        reads={"rank": "init_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_rank": "target_r"},
        trained=lambda adapter, outputs, inputs: adapter.rank * (inputs + outputs + 1),
    ),
    "hra": AdapterType(
        config="HRAConfig", paper="Yuan et al. 2024, arXiv:2405.17484", reads={"rank": "r"},
        trained=lambda adapter, _outputs, inputs: adapter.rank * inputs,
    ),
    "miss": AdapterType(
        config="MissConfig", paper="Kang et al. 2024, arXiv:2409.15371", reads={"rank": "r", "dropout": "miss_dropout"},
        trained=lambda adapter, outputs, _inputs: adapter.rank * outputs,
    ),
    "fourierft": AdapterType(
        config="FourierFTConfig", paper="Gao et al. 2024, arXiv:2405.03003",
        reads={"num_frequencies": "n_frequency", "alpha": "scaling"},
        trained=lambda adapter, _outputs, _inputs: adapter.value("num_frequencies"),
        fixed={"init_weights": True},  # PEFT's default starts from a random change of the model
        defaults={"num_frequencies": 1000},
    ),
    "randlora": AdapterType(
        config="RandLoraConfig", paper="Albert et al. 2025, arXiv:2502.00987",
        reads={"rank": "r", "alpha": "randlora_alpha", "dropout": "randlora_dropout"}, trained=_randlora,
        fixed={"save_projection": False},  # PEFT would save the same random matrices once per layer
    ),
    "ln_tuning": AdapterType(
        config="LNTuningConfig", paper="Zhao et al. 2023, arXiv:2312.11420", reads={},
        trained=lambda _adapter, outputs, _inputs: outputs,
    ),
    "osf": AdapterType(
        config="OSFConfig", paper="Nayak et al. 2025, arXiv:2504.07097", reads={"rank": "rank_pattern"}, trained=_osf
    ),
}  # fmt: skip
# Architectures whose experts are parameters of three dimensions on which PEFT can put a LoRA, from PEFT's own table.
MIXTURES = (
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum",
    "minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
_OF_SOME_TYPES = frozenset(name for row in ADAPTERS.values() for name in row.reads)


# Why an adapter on the head is merged.
ON_HEAD = "is on the head, whose weights losses read directly, so that they would leave it out"


def why_not_stacked(config: Mapping[str, object]) -> str | None:
    """Why a saved adapter cannot stay under another one; None: it can.

    Args:
        config: its ``adapter_config.json``.
    """
    kind = str(getattr(config.get("peft_type"), "value", config.get("peft_type")))
    if kind != "LORA":
        return f"is of type {kind.lower()}, and only a LoRA can stay under another one"
    if config.get("use_dora"):
        return (
            "is of type dora, which scales the sum of the weights below it: beside another adapter it is another model"
        )
    if config.get("trainable_token_indices"):
        return (
            "trains rows of the embedding (trainable_token_indices), which PEFT keeps for the adapter in training alone"
        )
    targets_of = config.get("target_modules")
    names = targets_of if isinstance(targets_of, list | set | tuple) else [targets_of]
    return ON_HEAD if any(str(name).rpartition(".")[2] in HEADS for name in names) else None


def why_rows_stay(adapter: Adapter, ids: Sequence[int], *, tied: bool, scores: bool) -> str | None:
    """Why an adapter leaves the rows of new tokens as they were made; None: it trains them.

    Args:
        ids: of the tokens that the source of the model adds.
        tied: whether the head has the weights of the embedding.
        scores: whether the model has no head over the vocabulary.
    """
    saved = {name.rpartition(".")[2] for name in adapter.saved_names}
    in_rows = set(ids) <= set(adapter.trainable_token_indices or ())
    if (in_rows and (tied or scores)) or (saved & {*EMBEDDINGS} and (scores or saved & {*HEADS})):
        return None
    rows = f"adapter.trainable_token_indices=[{','.join(map(str, sorted(ids)))}] (of type lora or dora)"
    whole = "adapter.modules_to_save with the names of embedding and head, such as 'embed_tokens,lm_head'"
    return (
        f"the rows of its new tokens ({', '.join(map(str, sorted(ids)))}) would stay the mean of the others, since the "
        f"base is frozen; set {rows if tied or scores else whole}, or adapter=null for the first training"
    )


def reference_of(adapter: Adapter | None, adapter_in: str | None) -> Literal["off", "copy", "model"]:
    """How the frozen start of a policy with an adapter is represented.

    ``off``: the policy without its adapter. ``copy``: the policy with a frozen copy of the adapter, which did not start
    at zero. ``model``: a separate model, because the adapter changes weights of the base, or is on top of another one.
    """
    if adapter is None or adapter.bias is not None or adapter_in == "stack":
        return "model"
    if adapter_in == "continue":
        return "copy" if ADAPTERS[adapter.type].config == "LoraConfig" else "model"
    return "copy" if adapter.init in FROM_DATA or adapter.changes_the_base else "off"


def is_plain(adapter: Adapter) -> bool:
    """Whether PEFT itself can find its targets: all linear layers, or names of some."""
    names = adapter.target_names
    beyond = any(name in (*GROUPS, HEAD) or _GLOB.search(name) or "." in name for name in names)
    beyond |= ALL_LINEAR in names and len(names) > 1  # beside others PEFT reads it as the name of a layer
    return not (beyond or adapter.excluded_names or adapter.layers is not None or adapter.type == "ln_tuning")


def adapts_experts(adapter: Adapter) -> bool:
    """Whether PEFT also puts it on the experts of a mixture, which are parameters rather than linear layers."""
    on_parameters = ADAPTERS[adapter.type].config == "LoraConfig"
    return on_parameters and is_plain(adapter) and adapter.target_modules == ALL_LINEAR


def why_not_on_experts(adapter: Adapter) -> str | None:
    """The setting that PEFT cannot apply to the experts of a mixture; None: none, or they get no adapter."""
    return why_not_on_parameters(adapter) if adapts_experts(adapter) else None


def why_not_on_parameters(adapter: Adapter) -> str | None:
    """The setting that PEFT cannot apply where it puts a LoRA on a parameter rather than on its layer; None: none."""
    if adapter.type == "dora":
        return "type=dora"
    if adapter.init not in (None, "gaussian"):
        return f"init={adapter.init}"
    return f"dropout={adapter.dropout:g}" if adapter.dropout else None


def no_module(adapter: Adapter, wanted: str, names: Iterable[str]) -> ConfigError:
    """The error for a name in ``modules_to_save`` of no module."""
    ends = sorted({name.rpartition(".")[2] for name in names if name and not name[-1].isdigit()})
    return ConfigError(
        f"adapter.modules_to_save={adapter.modules_to_save}: the model has no module {wanted}; it has "
        f"{', '.join(ends)}; name some of these"
    )


def require_sizes(adapter: Adapter, layers: Iterable[tuple[str, int, int]]) -> None:
    """Requires that PEFT puts an adapter on layers as it is set.

    Args:
        layers: name, outputs and inputs of each that gets it.

    Raises:
        ConfigError: PEFT would refuse the number of frequencies, or silently use another block size.
    """
    layers = list(layers)
    if adapter.type == "fourierft":
        most, name = min(((outputs * inputs, name) for name, outputs, inputs in layers), default=(math.inf, ""))
        if adapter.value("num_frequencies") > most:
            raise ConfigError(
                f"adapter.num_frequencies={adapter.value('num_frequencies')}: {name} has at most {most} frequencies; "
                f"set adapter.num_frequencies={most} or less, or other target_modules"
            )
    size = adapter.value("block_size") if adapter.type in ("oft", "boft") else 1
    for name, _, inputs in layers:
        if inputs % size:
            fitting = next(each for each in range(size, 0, -1) if not any(inputs % each for _, _, inputs in layers))
            raise ConfigError(
                f"adapter.block_size={size}: {name} has {inputs} inputs, which do not divide into such blocks; set "
                f"adapter.block_size={fitting}, or other target_modules"
            )


def targets(adapter: Adapter, modules: Sequence[str]) -> list[str]:
    """The full names of the modules that get an adapter.

    PEFT itself ignores a name that matches nothing, and reads a glob as a regular expression.

    Args:
        modules: the full names of those that could: linear layers, or for ``ln_tuning`` the norms.

    Raises:
        ConfigError: a name matches nothing, or nothing is left.
    """
    found = _matched("target_modules", adapter.target_modules, adapter.target_names, modules)
    excluded = _matched("exclude_modules", adapter.exclude_modules, adapter.excluded_names, found)
    found = [name for name in found if name not in set(excluded)]
    if adapter.layers is not None:
        there = {index for name in found if (index := block_of(name)) is not None}
        missing = [str(index) for index in adapter.layers if index not in there]
        if missing:
            raise ConfigError(
                f"adapter.layers={list(adapter.layers)}: the targets are in no layer {', '.join(missing)}; they are in "
                f"{', '.join(map(str, sorted(there))) or 'none'}; name some of these"
            )
        found = [name for name in found if block_of(name) in adapter.layers]
    if not found:
        raise ConfigError(
            f"adapter.target_modules={adapter.target_modules}: no module is left; set other target_modules, or exclude "
            "fewer"
        )
    return found


def _matched(field_name: str, value: str | None, names: Iterable[str], modules: Sequence[str]) -> list[str]:
    matches = {name: [module for module in modules if _matches(name, module)] for name in names}
    missing = [name for name, found in matches.items() if not found]
    if missing:
        ends = sorted({module.rpartition(".")[2] for module in modules})
        raise ConfigError(
            f"adapter.{field_name}={value}: the model has no linear layer {', '.join(missing)}; it has "
            f"{', '.join(ends)}; name some of these, a glob over full names such as *.{ends[0] if ends else 'q_proj'}, "
            f"or {ALL_LINEAR}"
        )
    chosen = {module for found in matches.values() for module in found}
    return [module for module in modules if module in chosen]


def _matches(name: str, module: str) -> bool:
    if name == ALL_LINEAR:
        return True
    if name == HEAD:
        return module.rpartition(".")[2] in (*HEADS, HEAD)
    if name in GROUPS:
        parents = module.split(".")[:-1]
        return any(word in parent for parent in parents for word in GROUPS[name])
    if _GLOB.search(name):
        return fnmatch.fnmatchcase(module, name)
    return module == name or module.endswith(f".{name}")

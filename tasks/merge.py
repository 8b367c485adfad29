"""Merges models: an adapter into its base, or several models into one.

linear: Wortsman et al. 2022, arXiv:2203.05482. slerp: Shoemake 1985, "Animating rotation with quaternion curves".
task_arithmetic: Ilharco et al. 2022, arXiv:2212.04089. ties: Yadav et al. 2023, arXiv:2306.01708. dare: Yu et al. 2023,
arXiv:2311.03099.
"""

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from lineage.source.model_files import INDEX, read_json
from lineage.source.model_source import vocabulary_of
from tasks.context import Metrics, TrainContext
from tasks.model.merging import (
    BASE,
    POLICY,
    Places,
    adapters_on_one_base,
    cast_weights,
    compared,
    drawn,
    golden_texts_for,
    golden_values,
    largest_difference,
    merge_adapters,
    places_of,
    plain_lora,
    read_tensor,
    require_same_config,
    require_same_template,
    require_same_values,
    require_same_vocabulary,
    shape_of,
    slerp,
    template_of,
    write_config,
)
from tasks.model.remote_code import trust, trusts
from tasks.recipe import Input, Inputs, Method
from tasks.train.best import MERGES
from tasks.train.models.quantization import torch_dtype

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

_MAX_DIFFERENCE = 0.05  # nats per token
_TOLERANCE = 1e-6  # of the sum of weights
_COMBINED = "combined"  # adapter

Watch = Callable[["PeftModel"], None]
Dtype = Literal["fp32", "bf16", "fp16"]
Name = Literal[
    "linear", "slerp", "task_arithmetic", "ties", "dare_linear", "dare_ties", "cat", "svd", "ties_svd",
    "dare_linear_svd", "dare_ties_svd",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Combination:
    """What a combination does, and so what it reads.

    Args:
        deltas: adds up differences to a base; else averages weights, so that their shares sum to 1.
        reads: further fields.
        space: where it is defined.
    """

    deltas: bool = True
    reads: Collection[str] = ()
    space: Collection[str] = ("weights",)


_BOTH, _ADAPTERS = ("weights", "adapters"), ("adapters",)
COMBINATIONS: Mapping[str, Combination] = {
    "linear": Combination(deltas=False, space=_BOTH),
    "slerp": Combination(deltas=False),
    "task_arithmetic": Combination(),
    "ties": Combination(reads=("density", "majority_sign"), space=_BOTH),
    "dare_linear": Combination(reads=("density", "seed"), space=_BOTH),
    "dare_ties": Combination(reads=("density", "majority_sign", "seed"), space=_BOTH),
    "cat": Combination(space=_ADAPTERS),
    "svd": Combination(reads=("svd_rank",), space=_ADAPTERS),
    "ties_svd": Combination(reads=("density", "majority_sign", "svd_rank"), space=_ADAPTERS),
    "dare_linear_svd": Combination(reads=("density", "seed", "svd_rank"), space=_ADAPTERS),
    "dare_ties_svd": Combination(reads=("density", "majority_sign", "seed", "svd_rank"), space=_ADAPTERS),
}


@dataclass(frozen=True, kw_only=True)
class Merge(Method):
    """Merges the adapter of ``policy`` into its base, or ``policy`` with the models of all further slots.

    The output has the tokenizer, the chat template and the config of ``policy``. Differences are to the model in the
    slot ``base``; in the space of adapters, to the base of the adapters. Weights are combined tensor by tensor, so that
    memory holds one model.

    Args:
        combination: of several models; None: the only model's adapter is merged.
        space: weights, or the matrices of LoRAs on one base (``add_weighted_adapter`` of PEFT). There ``cat``
            and all ``svd`` take adapters of any ranks; the others combine A and B apart, a rough approximation (PEFT).
        weights: by slot; None: equal shares of an average, and of differences each whole.
        density: share of a tensor's differences that is kept: the largest of ties, random ones of dare.
        majority_sign: how ties elects a sign: by the sum of differences, or by their count; None: total.
        svd_rank: of the combined adapter; None: the largest of its parts.
        seed: of what dare keeps; None: 0.
        dtype: of the output; None: fp32 where an adapter is merged, else that of the policy's weights.
        max_difference: largest difference of a golden prompt's mean log-probability, in nats, between adapters on their
            base and the output; of a reward model of its score. None: 0.05.
    """

    consumes: ClassVar[Mapping[str, Kind]] = {POLICY: Kind.CHECKPOINT, BASE: Kind.CHECKPOINT, "*": Kind.CHECKPOINT}
    optional: ClassVar[frozenset[str]] = frozenset({BASE, "*"})
    produces: ClassVar[Kind] = Kind.CHECKPOINT
    measures: ClassVar[tuple[str, ...]] = ("merge/models", "parameters")
    cluster_workers: ClassVar[Literal["all", "one", "none"]] = "one"

    combination: Name | None = None
    space: Literal["weights", "adapters"] | None = None
    weights: Mapping[str, float] | None = None
    density: Annotated[float, Gt(0), Le(1)] | None = None
    majority_sign: Literal["total", "frequency"] | None = None
    svd_rank: Annotated[int, Gt(0)] | None = None
    seed: Annotated[int, Ge(0)] | None = None
    dtype: Dtype | None = None
    max_difference: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        row = COMBINATIONS[self.combination] if self.combination else None
        space = self.space or "weights"
        if row and space not in row.space:
            names = [name for name, each in COMBINATIONS.items() if space in each.space]
            raise ConfigError(
                f"combination={self.combination} with space={space}: accepted there: {', '.join(names)}; set one of "
                f"them, or space={row.space[0] if isinstance(row.space, tuple) else 'weights'}"
            )
        reads = {*row.reads, "space", "weights"} if row else set()
        if not row or space == "adapters":
            reads.add("max_difference")
        for name in ("space", "weights", "density", "majority_sign", "svd_rank", "seed", "max_difference"):
            if getattr(self, name) is not None and name not in reads:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: combination={self.combination or 'null'} has none; it reads "
                    f"{', '.join(sorted({*reads, 'dtype'}))}; set {name}=null, or another combination"
                )
        if row and "density" in row.reads and self.density is None:
            raise ConfigError(
                f"combination={self.combination}: density is not set, the share of differences that is kept; set "
                f"density={'0.2' if 'dare' not in str(self.combination) else '0.5'}"
            )
        for slot, weight in (self.weights or {}).items():
            if not math.isfinite(weight):
                raise ConfigError(f"weights.{slot}={weight}: a finite number is accepted; correct it")

    def check_inputs(self, slots: Collection[str]) -> None:
        """Requires the slots that the combination combines, and a weight for each."""
        models = [slot for slot in slots if slot != BASE]
        row = COMBINATIONS[self.combination] if self.combination else None
        if row is None:
            if len(models) > 1:
                raise ConfigError(
                    f"combination is not set, and there are {len(models)} models ({', '.join(models)}); set "
                    "combination=linear, or another, or leave one model"
                )
        elif len(models) < 2 and (not row.deltas or self.space == "adapters"):
            raise ConfigError(
                f"combination={self.combination}: {', '.join(models)} is the only model; fill a further slot, such as "
                "inputs.other=STAGE"
            )
        if self.combination == "slerp" and len(models) != 2:
            raise ConfigError(
                f"combination=slerp: it is between two models, and there are {len(models)} ({', '.join(models)}); "
                "leave two, or set combination=linear"
            )
        needs_base = row is not None and row.deltas and self.space != "adapters"
        if needs_base != (BASE in slots):
            do = (
                f"fill inputs.{BASE} with the model that they were trained from" if needs_base
                else f"remove inputs.{BASE}"
            )  # fmt: skip
            found = "adds up differences to a base" if needs_base else "reads no base"
            raise ConfigError(f"combination={self.combination or 'null'}: it {found}; {do}")
        self._check_weights(models, is_average=row is not None and not row.deltas and self.space != "adapters")

    def _check_weights(self, models: Sequence[str], *, is_average: bool) -> None:
        if self.weights is None:
            return
        if {*self.weights} != {*models}:
            raise ConfigError(
                f"weights has {', '.join(self.weights)}, and the models are {', '.join(models)}; set a weight for each"
            )
        total = sum(self.weights.values())
        if is_average and abs(total - 1) > _TOLERANCE:
            raise ConfigError(
                f"weights sum to {total:g}: {self.combination} averages models, and would scale all of their weights; "
                "set weights that sum to 1, or combination=task_arithmetic with a base"
            )

    def measured_metrics(self, slots: Collection[str], *, of_steps: bool = False) -> tuple[str, ...] | None:
        found = super().measured_metrics(slots, of_steps=of_steps)
        of_values = "merge/scores_" if self.produces == Kind.REWARD_MODEL else "merge/logps_"
        whole = self.combination is not None and self.space != "adapters"
        merges = ["merge/golden"] if whole else [each for each in MERGES if each.startswith(of_values)]
        return found and (*found, *merges, *(f"weights/{slot}" for slot in slots))

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.model.adapter_files import base_and_adapters
        from tasks.train.generation.one_policy import digests_of_weights, version_metrics
        from tasks.train.models.load import Kept, require_base, save_whole, whole_model
        from tasks.train.sharding import leave_out_deepspeed

        leave_out_deepspeed()
        self.check_inputs(inputs)
        versions = version_metrics(digests_of_weights(inputs))
        require_alike(inputs)
        policy = inputs[POLICY]
        ctx.output_dir.mkdir(parents=True, exist_ok=True)
        before, kept = list[float](), Kept.of(policy.path, ctx.work_dir)
        base, may_run = base_and_adapters(policy.path)[0], trusts(policy.path)
        if self.combination is None or self.space == "adapters":
            model = self._with_adapters(inputs, ctx, lambda adapted: before.extend(_golden(adapted, kept.directory)))
            ctx.loaded()
            cast_weights(model, torch_dtype(self.dtype or "fp32"))
            save_whole(model, base, ctx.output_dir, kept.weights, partial(require_base, ctx), own=True)
        else:
            self._combine_weights(inputs, ctx)
            ctx.loaded()
        kept.write(ctx.output_dir)
        if may_run:  # its code was copied too
            trust(ctx.output_dir)
        if self.combination is not None and self.space != "adapters":
            model = whole_model(self.produces, ctx.output_dir)
        after = _loaded_again(self.produces, model, ctx.output_dir, kept.directory, may_run=may_run)
        models, parameters = float(len(inputs.keys() - {BASE})), float(model.num_parameters())
        size = {"merge/models": models, "parameters": parameters, **versions}
        if not before:
            return {**size, "merge/golden": sum(after) / len(after)}
        metrics = compared(before, after, is_reward_model=self.produces == Kind.REWARD_MODEL)
        most = _MAX_DIFFERENCE if self.max_difference is None else self.max_difference
        accepted = f"max_difference={1.1 * largest_difference(before, after):.2g}"
        remedy = f"set dtype=fp32, or {accepted} if that is meant"
        require_same_values(before, after, most, "merging", remedy, DataError, "max_difference")
        return {**size, **metrics}

    def shares(self, models: Collection[str]) -> dict[str, float]:
        """Slot -> weight, in one order: another order of a sum gives other last bits."""
        if self.weights is not None:
            return {slot: self.weights[slot] for slot in sorted(self.weights)}
        is_average = not COMBINATIONS[str(self.combination)].deltas and self.space != "adapters"
        return dict.fromkeys(sorted(models), 1 / len(models) if is_average else 1.0)

    def _with_adapters(self, inputs: Inputs, ctx: TrainContext, watch: "Watch") -> "PreTrainedModel":
        """The model with its adapters merged; ``watch`` sees it before the last of them is."""
        from tasks.model.adapter_files import Intake, base_and_adapters
        from tasks.train.models.load import whole_model

        policy = inputs[POLICY]
        if self.combination is None:
            if not base_and_adapters(policy.path)[1] and self.dtype is None:
                raise ConfigError(
                    f"{policy.name} has no adapter, and dtype is not set: nothing is merged; an output of a stage with "
                    "save=adapter, or an adapter of PEFT, is accepted; set dtype=bf16 to convert a whole model"
                )
            return whole_model(policy.kind, policy.path, watch=watch)
        base, below, adapters = adapters_on_one_base(inputs)
        taken = Intake(base=base, merged=below)
        model = whole_model(policy.kind, policy.path, taken=taken)
        return self._combined(model, policy.path, adapters, ctx.work_dir, watch)

    def _combined(
        self, model: "PreTrainedModel", policy: Path, adapters: Mapping[str, Path], work: Path, watch: "Watch"
    ) -> "PreTrainedModel":
        from peft import PeftModel

        from tasks.train.models.quantized_base import detect_quantized_layers

        detect_quantized_layers(False)
        names = {slot: f"input{number}" for number, slot in enumerate(adapters)}
        adapted: PeftModel | None = None
        for slot, adapter in adapters.items():
            plain = plain_lora(slot, adapter, work / names[slot])
            if adapted is None:
                adapted = PeftModel.from_pretrained(model, plain, adapter_name=names[slot])
            else:
                adapted.load_adapter(str(plain), names[slot])
        assert adapted is not None
        shares = self.shares(adapters)
        own = {"density": self.density, "majority_sign_method": self.majority_sign, "svd_rank": self.svd_rank}
        try:
            with drawn(self.seed or 0, _COMBINED):
                adapted.base_model.add_weighted_adapter(
                    list(names.values()), [shares[slot] for slot in names], _COMBINED, str(self.combination),
                    **{name: value for name, value in own.items() if value is not None},
                )  # fmt: skip
        except ValueError as error:
            raise ConfigError(
                f"space=adapters, combination={self.combination}: PEFT refuses it: {error}; cat and svd take adapters "
                "of any ranks; set one of these, or space=weights"
            ) from error
        adapted.set_adapter(_COMBINED)
        watch(adapted)
        return merge_adapters(adapted, golden_texts_for(model, [policy]), _COMBINED).model

    def _combine_weights(self, inputs: Inputs, ctx: TrainContext) -> None:
        """Writes the combined weights, in the files that those of the policy are in."""
        from safetensors.torch import save_file

        places = whole_weights(inputs, ctx.work_dir)
        shares = self.shares([slot for slot in inputs if slot != BASE])
        sizes: Counter[str] = Counter()  # by dtype
        for path in sorted(set(places[POLICY].values())):
            tensors = {}
            for name in (each for each, place in places[POLICY].items() if place == path):
                found = {slot: read_tensor(files, name) for slot, files in places.items()}
                tensors[name] = self.combined(name, found, shares)
                sizes[str(tensors[name].dtype).removeprefix("torch.")] += tensors[name].nbytes
            save_file(tensors, ctx.output_dir / path.name, metadata={"format": "pt"})
        if len(set(places[POLICY].values())) > 1:
            files = {name: path.name for name, path in places[POLICY].items()}
            index = {"metadata": {"total_size": sizes.total()}, "weight_map": files}
            (ctx.output_dir / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        write_config(inputs[POLICY].path, ctx.output_dir, sizes.most_common(1)[0][0])

    def combined(self, name: str, found: "Mapping[str, Tensor]", shares: Mapping[str, float]) -> "Tensor":
        """One tensor of the output: computed in fp64, so that a share of 1 beside shares of 0 is that input to the bit.

        Args:
            found: the tensor of each slot.
        """
        import torch

        first = found[POLICY]
        if not first.is_floating_point():
            if any(not torch.equal(first, each) for each in found.values()):
                raise ConfigError(
                    f"{name} has whole numbers, which cannot be combined, and differs between the models; models that "
                    "share it are accepted"
                )
            return first
        used = {slot: weight for slot, weight in shares.items() if weight}
        result = self._floats(name, {slot: each.double() for slot, each in found.items()}, used)
        result = result.to(torch_dtype(self.dtype) if self.dtype else first.dtype).contiguous()
        if not result.isfinite().all():
            raise DataError(
                f"{name}: the merge has non-finite values; finite weights of the models are accepted, and a dtype that "
                "holds their combination; set dtype=fp32, or check the models"
            )
        return result

    def _floats(self, name: str, found: "Mapping[str, Tensor]", shares: Mapping[str, float]) -> "Tensor":
        if self.combination == "slerp" and len(shares) > 1:
            (left, _), (right, share) = ((found[slot], weight) for slot, weight in shares.items())
            return slerp(left, right, share)
        if not COMBINATIONS[str(self.combination)].deltas:
            return reduce(add, (weight * found[slot] for slot, weight in shares.items()))
        deltas = [found[slot] - found[BASE] for slot in shares]
        if not deltas:
            return found[BASE]
        with drawn(self.seed or 0, name):
            return found[BASE] + self._added(deltas, list(shares.values()))

    def _added(self, deltas: "list[Tensor]", shares: list[float]) -> "Tensor":
        """Differences combined by PEFT's functions."""
        import torch
        from peft.utils import merge_utils

        weights = torch.tensor(shares, dtype=deltas[0].dtype)
        if self.combination == "task_arithmetic":
            return merge_utils.task_arithmetic(deltas, weights)
        assert self.density is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The density")  # of 1, which keeps all
            if self.combination == "dare_linear":
                return merge_utils.dare_linear(deltas, weights, self.density)
            ties = merge_utils.ties if self.combination == "ties" else merge_utils.dare_ties
            return ties(deltas, weights, self.density, self.majority_sign or "total")


def _loaded_again(
    kind: Kind, model: "PreTrainedModel", directory: Path, tokenizer: Path, *, may_run: bool
) -> list[float]:
    """The golden values of a merged model in fp32, after it was loaded as a user would and is the same.

    Raises:
        DataError: they are non-finite.
        PipelineError: another model is loaded.
    """
    import torch

    from tasks.train.models.load import require_output_loads

    config, prompts = read_json(directory, "config.json"), golden_texts_for(model, [tokenizer])
    assert isinstance(config, dict)
    cast_weights(model, torch.float32)
    found = golden_values(model, prompts)
    if not all(map(math.isfinite, found)):
        raise DataError(
            f"the merged model gives non-finite log-probabilities ({', '.join(map(str, found))}); a model with "
            "finite weights is accepted; set dtype=fp32 or dtype=bf16, or other weights"
        )
    cast_weights(model, getattr(torch, str(config["dtype"])))  # as it was written, which loses nothing
    require_output_loads(kind, model, directory, prompts, may_run=may_run)
    return found


def _golden(model: "PreTrainedModel | PeftModel", tokenizer: Path) -> list[float]:
    from tasks.train.kernels.machine import plain

    return golden_values(model, golden_texts_for(plain(model), [tokenizer]))


@dataclass(frozen=True, kw_only=True)
class MergeRewardModels(Merge):
    """Averages reward models: Ramé et al. 2024, arXiv:2401.12187; or merges the adapter of one.

    They have no base to differ from: a base has no head that gives scores.
    """

    consumes: ClassVar[Mapping[str, Kind]] = {POLICY: Kind.REWARD_MODEL, "*": Kind.REWARD_MODEL}
    optional: ClassVar[frozenset[str]] = frozenset({"*"})
    produces: ClassVar[Kind] = Kind.REWARD_MODEL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.combination not in (None, "linear", "slerp") or self.space == "adapters":
            space = f" with space={self.space}" if self.space else ""
            raise ConfigError(
                f"combination={self.combination}{space}: reward models are averaged, their heads too; "
                "combination=linear or slerp is accepted, in the space of weights; set combination=linear"
            )


def require_alike(inputs: "Inputs") -> None:
    """Requires that all models have the policy's architecture, vocabulary and chat template."""
    from tasks.train.models.load import load_config

    policy = inputs[POLICY]
    ours = load_config(policy.path).to_dict()
    known = vocabulary_of(read_json(policy.path, "tokenizer.json"))
    for slot, other in inputs.items():
        if slot == POLICY:
            continue
        require_same_config(policy.name, other.name, ours, load_config(other.path).to_dict())
        vocabulary = vocabulary_of(read_json(other.path, "tokenizer.json"))
        if known and vocabulary:
            require_same_vocabulary(policy.name, other.name, known, vocabulary)
        if slot != BASE:
            require_same_template(policy.name, other.name, template_of(policy.path), template_of(other.path))


def whole_weights(inputs: "Inputs", work: Path) -> dict[str, Places]:
    """Where the weights of each slot are: in its own files, or in ``work`` if an adapter has to be merged first.

    Raises:
        ConfigError: the models have different weights.
    """
    places = {slot: places_of(_merged_directory(slot, each, work)) for slot, each in inputs.items()}
    if len({frozenset(each) for each in places.values()}) > 1:  # the same weights may have other names on the hub
        places = {slot: places_of(_merged_directory(slot, each, work, again=True)) for slot, each in inputs.items()}
    ours = places[POLICY]
    for slot, theirs in places.items():
        apart = sorted(ours.keys() ^ theirs.keys()) or [
            name for name in ours if shape_of(ours, name) != shape_of(theirs, name)
        ]
        if apart:
            raise ConfigError(
                f"{inputs[POLICY].name} and {inputs[slot].name} have different weights: {len(apart)} differ, such as "
                f"{apart[0]}; models that were trained from one base are accepted; leave {inputs[slot].name} out"
            )
    return places


def _merged_directory(slot: str, model_input: "Input", work: Path, *, again: bool = False) -> Path:
    """The directory with a model's whole weights; written to ``work`` where it has adapters. One model is in memory."""
    from tasks.model.adapter_files import base_and_adapters
    from tasks.train.models.load import save_whole, whole_model

    base, adapters = base_and_adapters(model_input.path)
    if not adapters and not again:
        return base
    if not (work / slot).is_dir():
        save_whole(whole_model(model_input.kind, model_input.path), base, work / slot, own=True)
    return work / slot

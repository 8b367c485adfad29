"""Estimates a training: a worker's peak memory, term by term, and its arithmetic. Imports no torch."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from importlib.util import find_spec

from tasks.context import Resources
from tasks.data.images import Images
from tasks.judgement.disk_need import NOT_LINEAR, Shapes, frozen_names, parts_trained, weights_of_adapter
from tasks.recipe import FROZEN_POLICY, REWARD_HEAD, REWARD_MODEL, TEACHER, VALUE_MODEL, TrainingRecipe
from tasks.train.evaluation import BATCH_LOGITS, BATCH_TOKENS
from tasks.train.sharding import BUCKET_ELEMENTS, STRATEGIES, Part, divided_over, holds_parts

_FLOAT = 4
_BITS = {"nf4": 4, "fp4": 4, "quanto_int4": 4, "hqq": 4, "gptq": 4, "awq": 4, "aqlm": 2, "mxfp4": 4}  # others: 8
_SCALES = 1.03  # with the rounded scales of blocks of 64 weights: QLoRA, arXiv:2305.14314, section 3
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}
# Families whose MLP has two matrices and no gate.
_UNGATED = (
    "gpt2", "openai-gpt", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "codegen", "opt", "bloom",
    "falcon", "mpt", "phi", "starcoder2", "persimmon", "nemotron", "xglm", "biogpt", "arcee",
)  # fmt: skip
# Numbers per token and layer that the backward pass keeps, in units of the hidden size: input, normalized and scaled
# input of two norms (6), queries, the output of attention and the copy of it that the last projection reads (3).
_KEPT_HIDDEN = 9
_KEPT_MLP = 4  # gate, its activation, up, their product: in units of the intermediate size
_KEPT_OF_TOWER = {"silu": 4, "quick_gelu": 3}  # activation of a tower: the same in its MLP; 2 of all others
_KEPT_ENDS = 3  # before and behind the layers of a tower, in units of its hidden size
_OF_ATTENTION = tuple(f"self_attn.{each}_proj" for each in ("q", "k", "v", "out"))  # layers of a tower
_MOST_PIXELS = 12_845_056  # of an image, where the processor's files do not say it: Qwen2-VL's
_LOGIT_COPIES = 3  # logits, log-probabilities, their gradient
MOST_TOKENS = 2**16  # of a forward pass under micro_batch_size=auto: more fill no GPU better
_CPU_TOKENS = 2**12  # the same on a CPU
_LONGER_STEPS = 1.1  # tokens of a long step, in those of a mean one
_KEPT_TOKENS = 512  # of a row, up to which attention in bf16 on a CPU keeps its probabilities
_MAX_LOGITS = 2**27  # above, the head computes chunks of tokens x vocabulary: tasks.train.kernels.padding_free
_CHUNK = (4096, 32768)
_FILL = 0.88  # share of the memory that such a pass is planned to take


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The numbers that determine what a model does to read an image.

    Args:
        patches: that its layers read of an image, at most, in all of its tiles.
        merged: patches of a token of the text.
        scales: whether a larger image has more patches.
        numbers: that a patch is made of; side: its pixels in one direction.
        activation: of its MLPs; silu has a gate.
    """

    hidden: int
    intermediate: int
    layers: int
    patches: int
    merged: float
    scales: bool
    numbers: int
    side: int
    activation: object

    @property
    def gated(self) -> bool:
        return self.activation == "silu"

    @property
    def kept(self) -> int:
        """Numbers per patch and layer that the backward pass keeps, as counted with each family."""
        # Two norms (4), queries, keys, values and the output of attention (4); before they are rotated, also three.
        rotated = (3 + self.gated) * self.hidden if self.scales else 0
        return 8 * self.hidden + rotated + _KEPT_OF_TOWER.get(str(self.activation), 2) * self.intermediate

    @property
    def flops(self) -> float:
        """Operations of a forward pass over an image."""
        layer = self.hidden * (4 * self.hidden + (3 if self.gated else 2) * self.intermediate)
        return (
            2.0 * self.patches * (self.layers * (layer + 2 * self.patches * self.hidden) + self.numbers * self.hidden)
        )

    def shapes(self, hidden: int) -> Shapes:
        """The shapes of its weights, and of a projector to text of this width, under the names of LLaVA."""
        own: dict[str, tuple[int, ...]] = dict.fromkeys(_OF_ATTENTION, (self.hidden, self.hidden))
        own |= {each: (self.hidden,) for each in ("layer_norm1", "layer_norm2")}
        gate = {"mlp.gate": (self.intermediate, self.hidden)} if self.gated else {}
        own |= {**gate, "mlp.fc1": (self.intermediate, self.hidden), "mlp.fc2": (self.hidden, self.intermediate)}
        of_layers = {f"layers.{i}.{name}.weight": shape for i in range(self.layers) for name, shape in own.items()}
        tower = {"embeddings.patch_embedding.weight": (self.hidden, self.numbers), **of_layers}
        projector = {"linear_1": (hidden, round(self.hidden * self.merged)), "linear_2": (hidden, hidden)}
        return {
            **{f"model.vision_tower.{name}": shape for name, shape in tower.items()},
            **{f"model.multi_modal_projector.{name}.weight": shape for name, shape in projector.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The numbers that determine the size of a decoder.

    Args:
        family: ``model_type``.
        heads, kv_heads, head: attention: queries, keys and values, and dimensions of each.
        experts, active: of a mixture of experts: how many there are in a layer, and how many process a token; 1: none.
        gated: whether its MLP has a gate beside the projections up and down, as that of Llama; GPT-2's has none.
        tower: of a model that reads images.
    """

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    tied: bool
    experts: int = 1
    active: int = 1
    gated: bool = True
    tower: Tower | None = None

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    def shapes(self) -> Shapes:
        """The shapes of the weights, under the names of the Llama family."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        own = {
            "self_attn.q_proj": (queries, self.hidden), "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden), "self_attn.o_proj": (self.hidden, queries),
            "input_layernorm": (self.hidden,), "post_attention_layernorm": (self.hidden,),
        }  # fmt: skip
        gate = {"gate_proj": (self.intermediate, self.hidden)} if self.gated else {}
        mlp = {**gate, "up_proj": (self.intermediate, self.hidden), "down_proj": (self.hidden, self.intermediate)}
        if self.experts == 1:
            own |= {f"mlp.{name}": shape for name, shape in mlp.items()}
        else:
            own |= {f"mlp.experts.{i}.{name}": shape for i in range(self.experts) for name, shape in mlp.items()}
            own["mlp.gate"] = (self.experts, self.hidden)
        layers = {f"model.layers.{i}.{name}.weight": shape for i in range(self.layers) for name, shape in own.items()}
        ends = {"model.embed_tokens.weight": (self.vocabulary, self.hidden), "model.norm.weight": (self.hidden,)}
        head = {} if self.tied else {"lm_head.weight": (self.vocabulary, self.hidden)}
        return {**ends, **layers, **head, **(self.tower.shapes(self.hidden) if self.tower else {})}


def architecture(config: Mapping[str, object], processor: object = None) -> Architecture | None:
    """The architecture in a ``config.json``; None: a number is missing.

    Args:
        processor: the file of the processor of images, which says how large they may be.
    """
    nested, tower = config.get("text_config"), _tower(config, processor if isinstance(processor, Mapping) else {})
    if isinstance(nested, Mapping):
        config = {**config, **nested}
    found = {name: _number(config, *keys) for name, keys in _NAMES.items()}
    hidden, layers, heads, vocabulary = (found[name] for name in ("hidden", "layers", "heads", "vocabulary"))
    if not (hidden and layers and heads and vocabulary):
        return None
    return Architecture(
        family=str(config.get("model_type", "unknown")), vocabulary=vocabulary, hidden=hidden, layers=layers,
        intermediate=_number(config, "moe_intermediate_size", "intermediate_size", "n_inner") or 4 * hidden,
        heads=heads, kv_heads=_number(config, "num_key_value_heads") or heads,
        head=_number(config, "head_dim") or hidden // heads,
        tied=bool(config.get("tie_word_embeddings", config.get("model_type") in ("gpt2", "gemma", "gemma2"))),
        experts=_number(config, "num_local_experts", "num_experts", "n_routed_experts") or 1,
        active=_number(config, "num_experts_per_tok") or 1,
        gated=config.get("model_type") not in _UNGATED, tower=tower,
    )  # fmt: skip


def _tower(config: Mapping[str, object], processor: Mapping[str, object]) -> Tower | None:
    """What reads images; None: nothing does, or a number is missing."""
    vision, files = config.get("vision_config"), processor.get("image_processor", processor)
    if not isinstance(vision, Mapping) or not isinstance(files, Mapping):
        return None
    hidden = _number(vision, "embed_dim", *_NAMES["hidden"])
    layers, patch = _number(vision, "depth", *_NAMES["layers"]), _side(vision, "patch_size")
    if not (hidden and layers and patch):
        return None
    size, merge = files.get("size"), _number(vision, "spatial_merge_size")
    ratio, pooled = config.get("downsample_ratio"), _number(config, "mm_tokens_per_image")
    pixels = _number(files, "max_pixels") or (_number(size, "longest_edge") if isinstance(size, Mapping) else None)
    if merge:  # images of any size
        patches = (pixels or _MOST_PIXELS) // patch**2
    elif not (side := _side(vision, "image_size")):
        return None
    else:
        patches = _tiles(config, vision, files, side) * (side // patch) ** 2
    numbers = (_number(vision, "num_channels", "in_channels") or 3) * patch**2
    merged: float = (merge or _number(config, "scale_factor") or 1) ** 2
    if pooled:
        merged = max(1.0, patches / pooled)
    elif isinstance(ratio, float) and ratio > 0:
        merged = 1 / ratio**2
    is_quick = vision.get("model_type") in ("clip_vision_model", "qwen2_vl")  # whose files may leave it out
    return Tower(
        hidden=hidden, layers=layers + (_number(vision, "num_global_layers") or 0), patches=patches,
        intermediate=_number(vision, "intermediate_size") or (_number(vision, "mlp_ratio") or 4) * hidden,
        merged=merged, scales=bool(merge), numbers=numbers * (_number(vision, "temporal_patch_size") or 1),
        side=patch, activation=vision.get("hidden_act", "quick_gelu" if is_quick else None),
    )  # fmt: skip


def _tiles(config: Mapping[str, object], vision: Mapping[str, object], files: Mapping[str, object], side: int) -> int:
    """Into how many pictures of the tower's size a processor divides an image, at most."""
    if found := _number(vision, "max_num_tiles"):
        return found
    if isinstance(pinpoints := config.get("image_grid_pinpoints"), list):
        return 1 + max(int(height) * int(width) // side**2 for height, width in pinpoints)
    if files.get("crop_to_patches") and (most := _number(files, "max_patches")):
        return 1 + most
    edges = [_number(each, "longest_edge") if isinstance(each := files.get(name), Mapping) else None
             for name in ("size", "max_image_size")]  # fmt: skip
    if edges[0] and edges[1] and files.get("do_image_splitting", True):
        return 1 + math.ceil(edges[0] / edges[1]) ** 2
    return 1


def _side(config: Mapping[str, object], name: str) -> int | None:
    found = config.get(name)
    return _number({name: found[0]}, name) if isinstance(found, list | tuple) and found else _number(config, name)


def _number(config: Mapping[str, object], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), None)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one worker at the peak of a step, by purpose.

    Args:
        frozen: reference, teacher and reward model.
        cache: keys and values of the completions that are being generated: all those of a worker in a step, at once.
        shared: of gradients and activations: where a step is one pass, gradients come as activations go.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    frozen: int
    cache: int
    shared: int = 0

    @property
    def model(self) -> int:
        """Bytes that do not depend on the rows."""
        return self.weights + self.gradients + self.optimizer + self.frozen

    @property
    def total(self) -> int:
        """All bytes; generation ends before the backward pass begins, so that only the larger of the two counts."""
        return self.model + max(self.activations + self.logits - self.shared, self.cache)

    def to_dict(self) -> dict[str, float]:
        """The terms and their total in GiB."""
        found = {name: count for name, count in asdict(self).items() if name != "shared"}
        return {name: count / 2**30 for name, count in {**found, "total": self.total}.items()}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Numbers of weights of a policy.

    Args:
        base: of the model that it starts from.
        trained: that get gradients.
        beside: of an adapter.
    """

    base: int
    trained: int
    beside: int


def num_weights(shapes: Shapes) -> int:
    """The number of weights of a model."""
    return sum(map(math.prod, shapes.values()))


def trained_weights(method: TrainingRecipe, shapes: Shapes) -> Trained:
    """How many weights a training holds and changes."""
    base = num_weights(shapes)
    if method.adapter is None:
        frozen = sum(math.prod(shapes[name]) for name in frozen_names(method, shapes))
        return Trained(base=base, trained=base - frozen, beside=0)
    trained, saved = weights_of_adapter(method, shapes)
    return Trained(base=base, trained=trained, beside=saved)


def tokens_at_once(
    method: TrainingRecipe, resources: Resources, found: Architecture, shapes: Shapes, capacity: int
) -> int:
    """Tokens of a forward pass under ``micro_batch_size=auto``: as many as fit, and no more than fill a GPU.

    Args:
        capacity: bytes of a worker; 0: unknown.
    """
    if not resources.gpus_per_worker:
        return _CPU_TOKENS
    if not capacity:
        return MOST_TOKENS
    rows = replace(resources, micro_batch_size=1)  # one row as long as all tokens together
    most = MOST_TOKENS // sequences(method)
    none, full = (memory(method, rows, found, shapes, tokens) for tokens in (0, most))
    per_token = (full.activations + full.logits - none.activations - none.logits) / MOST_TOKENS
    left = _FILL * capacity - none.model - none.activations - none.logits
    return max(1, min(MOST_TOKENS, int(left / per_token)))


def memory(
    method: TrainingRecipe, resources: Resources, found: Architecture, shapes: Shapes, tokens: int,
    frozen: Mapping[str, int] | None = None, *, mean: float | None = None, capacity: int = 0,
) -> Memory:  # fmt: skip
    """Peak memory of one worker.

    Args:
        mean: tokens of a row in the mean, with all its sequences; None: unknown, all are as long as the longest.
        capacity: bytes of a worker, which ``micro_batch_size=auto`` fills; 0: unknown.
        shapes: of the weights; ``found.shapes()`` where those of the files are not known.
        tokens: of the longest row: prompt and completion.
        frozen: filled slot of a teacher or reward model -> number of weights; None: all, each of the policy's size.
    """
    weights, precision = trained_weights(method, shapes), method.precision
    dtype = 2 if resources.frozen_dtype(precision) == "bf16" else _FLOAT
    whole = _whole(_of_island(method, resources), shapes)
    copies = 2 if VALUE_MODEL in method.models.values() else 1  # policy and value model are trained
    linear = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name)
    rest = weights.base - linear
    of_rest = float(dtype if method.adapter or method.quantization else _FLOAT)
    of_linear = _BITS.get(method.quantization.format, 8) / 8 if method.quantization else of_rest
    scales = int(linear * of_linear * (_SCALES - 1)) if method.quantization else 0
    base = int(linear * of_linear + rest * of_rest) + scales
    # optimizer.weights=bf16: a weight and its gradient in half, and the other half of the weight with the optimizer.
    split = _matrices(shapes) if method.optimizer.weights else 0
    trained_split = split * weights.trained // weights.base
    width = 2 if precision in ("bf16", "fp16", "fp8") else _FLOAT
    at_once, passes = _largest_pass(method, resources, found, shapes, tokens, mean, capacity)
    generated = -(-method.global_batch_size // resources.num_workers) if _completions(method) else 0
    fixed = resources.micro_batch_size != "auto" and resources.accumulation_steps(method.global_batch_size)
    is_one_pass = (fixed or passes) == 1
    gradients = _gradients(method, resources, whole, weights.trained, trained_split, copies, is_one_pass=is_one_pass)
    base -= split * (_FLOAT - 2)
    held = ((base - scales) // whole.parts + scales) * copies * ("weights" not in whole.offloaded)
    gathered = whole.ends * of_rest + (whole.gathered - whole.ends) * of_linear if whole.gathered else 0
    optimizer = weights.trained * (method.optimizer.state_bytes + whole.copied) + trained_split * 2
    beside = _frozen_weights(method, resources, weights.base, frozen) * dtype
    activations, logits = _activations_and_logits(method, resources, found, at_once, width, tokens)
    row = (mean / sequences(method) if mean else tokens) or 1
    rows = _rows_of_pass(method, resources, at_once, row)
    activations = _with_images(method, resources, found, rows, row, activations, width)
    if resources.gpus_per_worker and not (method.adapter or resources.checkpointed_layers or split) and width < _FLOAT:
        activations += linear * width  # the casts of autocast, which the backward pass reads
    # The outer weights and momentum of an island are in the CPU's memory of its first worker.
    outer = 0 if method.diloco is None or resources.gpus_per_worker else 2 * _FLOAT * weights.trained
    return Memory(
        weights=held + copies * (int(gathered) + weights.beside * _FLOAT // (1 if whole.is_fsdp else whole.parts)),
        gradients=gradients,
        optimizer=whole.part("optimizer", copies * optimizer, method) + outer,
        activations=activations,
        logits=logits,
        shared=min(gradients, activations + logits) if passes == 1 else 0,
        frozen=beside // whole.over + beside * whole.ends // weights.base if whole.divides_weights else beside,
        cache=2 * found.layers * found.kv_heads * found.head * tokens * generated * width,
    )  # fmt: skip


def scoring_memory(
    method: TrainingRecipe, found: Architecture, shapes: Shapes, judge: tuple[Architecture, Shapes] | None = None
) -> int:
    """Peak memory of the process that scores checkpoints beside a training: one model at a time, without gradients.

    Args:
        judge: the reward model that judges answers, which may be larger than the policy.
    """
    setting = method.evaluation
    if setting is None:
        return 0
    weights = trained_weights(method, shapes)
    models = [(weights.base + weights.beside, found), *([(num_weights(judge[1]), judge[0])] if judge else [])]
    tokens, in_bf16 = min(BATCH_TOKENS, setting.rows * method.max_length), bool(setting.gpus)
    return max(scored_memory(count, each, tokens, method.max_length, in_bf16=in_bf16) for count, each in models)


def scored_memory(weights: int, found: Architecture, tokens: int, max_length: int, *, in_bf16: bool) -> int:
    """Peak memory of a model of so many weights that scores rows and answers.

    Args:
        tokens: of a batch.
    """
    width = 2 if in_bf16 else _FLOAT
    at_once = min(tokens, max(BATCH_LOGITS // found.vocabulary, max_length))
    logits = at_once * found.vocabulary * (width + _FLOAT * (1 if width == _FLOAT else 2))
    cache = 2 * found.layers * found.kv_heads * found.head * tokens * width
    return weights * width + max(logits, cache) + tokens * _kept(found) * width


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """What of a divided training is whole on a worker, in numbers of weights.

    Args:
        over: workers that divide.
        ends: gathered by FSDP2 from the start of a forward pass to the end of its backward pass: the head, the last
            norm, and an embedding that is the head.
        gathered: the most at once: the ends, a layer, and the next one, which is gathered ahead; by ZeRO-3 the weights
            of a module.
        passing: whose whole gradients wait for their exchange.
        largest: a weight whose gradient is too large for DeepSpeed's buffer of gradients.
        copied: bytes of a trained weight that the optimizer steps a copy of.
        offloaded: what is in the CPU's memory.
    """

    is_fsdp: bool
    over: int
    ends: int
    gathered: int
    passing: int
    largest: int
    copied: int
    divides: tuple[Part, ...]
    offloaded: tuple[Part, ...]

    @property
    def divides_weights(self) -> bool:
        """Whether a worker holds a part of the weights between steps."""
        return self.is_fsdp or "weights" in self.divides

    @property
    def parts(self) -> int:
        """Into how many parts the weights are divided between steps."""
        return self.over if self.divides_weights else 1

    def part(self, name: Part, count: int, method: TrainingRecipe) -> int:
        """A worker's bytes; under FSDP2 an adapter is whole on every worker."""
        if name in self.offloaded:
            return 0
        is_whole = name not in self.divides or (self.is_fsdp and method.adapter is not None)
        return count if is_whole else count // self.over


def _of_island(method: TrainingRecipe, resources: Resources) -> Resources:
    """Resources of the workers that divide a training: all, or an island's."""
    islands = method.num_islands
    workers, nodes = max(1, resources.num_workers // islands), max(1, resources.num_nodes // islands)
    return replace(resources, num_workers=workers, num_nodes=nodes)


def _whole(resources: Resources, shapes: Shapes) -> _Whole:
    strategy, over = STRATEGIES[resources.sharding], divided_over(resources)
    layers: dict[str, int] = {}
    for name, shape in shapes.items():
        if found := re.search(r"\.(\d+)\.", name):
            layers[found[1]] = layers.get(found[1], 0) + math.prod(shape)
    layer, base = max(layers.values(), default=0), num_weights(shapes)
    embedding = max((math.prod(shape) for name, shape in shapes.items() if "embed" in name or "wte" in name), default=0)
    is_tied = not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in shapes)
    ends = base - sum(layers.values()) - (0 if is_tied else embedding)
    layer = resources.wrap if isinstance(resources.wrap, int) else layer
    at_once = ends + (2 + resources.prefetch) * layer
    is_fsdp = strategy.engine == "fsdp"
    sizes = sorted(map(math.prod, shapes.values()), reverse=True)
    if strategy.zero_stage == 3:
        ends, at_once = 0, sum(sizes[:2])
    offloaded = (*strategy.divides, "weights") if resources.offload else strategy.offloads
    gathers = is_fsdp or "weights" in strategy.divides
    return _Whole(
        is_fsdp=is_fsdp, over=over, ends=ends, divides=strategy.divides, copied=_FLOAT if strategy.zero_stage else 0,
        gathered=0 if not gathers else base if resources.sharding == "fsdp_grad" else min(base, at_once),
        passing=min(base, ends + layer) if is_fsdp else 0,
        largest=sizes[0] if strategy.zero_stage > 1 and sizes[0] > BUCKET_ELEMENTS else 0,
        offloaded=tuple(offloaded) if resources.gpus_per_worker else (),
    )  # fmt: skip


def traffic(method: TrainingRecipe, resources: Resources, shapes: Shapes, passes: int) -> int:
    """Bytes that a worker sends in a step, in rings: Rajbhandari et al. 2020, arXiv:1910.02054, section 7.

    Args:
        passes: forward and backward passes of a worker in a step.
    """
    resources = _of_island(method, resources)
    workers, over = resources.num_workers, divided_over(resources)
    weights, strategy = trained_weights(method, shapes), STRATEGIES[resources.sharding]
    reduced = weights.trained * (2 if resources.reduce_dtype == "bf16" else _FLOAT)
    ring = (workers - 1) / workers
    if strategy.engine is None or (strategy.engine == "fsdp" and method.adapter):  # an adapter's, once in a step
        exchanged = 2 * ring * reduced
    elif strategy.zero_stage in (1, 2):  # every worker gets the sum of all gradients; ZeRO-2 adds up in each pass
        times = passes if strategy.zero_stage == 2 else 1
        exchanged = ring * (times * 2 * reduced + weights.trained * _FLOAT)
    else:
        exchanged = passes * (
            (over - 1) / over * reduced + 2 * (workers // over - 1) / (workers // over) * reduced / over
        )
    whole = _whole(resources, shapes)
    if not whole.divides_weights:
        return round(exchanged)
    dtype = 2 if resources.frozen_dtype(method.precision) == "bf16" and method.adapter else _FLOAT
    ends = whole.ends
    times = 1 if resources.sharding == "fsdp_grad" else 2
    gathered = (ends + times * (weights.base - ends)) * dtype
    return round(exchanged + passes * (over - 1) / over * gathered)


def _matrices(shapes: Shapes) -> int:
    """Weights of linear layers, the head's too where it has its own."""
    matrices = (name for name, shape in shapes.items() if len(shape) > 1 and not any(map(name.count, NOT_LINEAR)))
    return sum(math.prod(shapes[name]) for name in matrices)


def _at_once(
    method: TrainingRecipe, resources: Resources, found: Architecture, shapes: Shapes, row: float, capacity: int,
    longest: int = 0,
) -> tuple[int, int]:  # fmt: skip
    """Tokens of a forward pass under ``micro_batch_size=auto``, and how many passes a worker takes in a step.

    Args:
        row: tokens of a row in the mean, which is never divided; longest: of the longest.
    """
    budget, rows = tokens_at_once(method, resources, found, shapes, capacity), method.global_batch_size
    step = max(1, round(rows * row / resources.num_workers))
    passes = min(math.ceil(step / budget), math.ceil(rows / resources.num_workers))
    return max(longest, min(budget, round(step * _LONGER_STEPS))), passes


def _largest_pass(
    method: TrainingRecipe, resources: Resources, found: Architecture, shapes: Shapes, tokens: int,
    mean: float | None, capacity: int,
) -> tuple[int, int]:  # fmt: skip
    """Tokens of the largest forward pass, and how many passes a worker takes in a step; 2: of a set micro batch."""
    completions, rows = _completions(method), resources.rows_at_once * sequences(method)
    if resources.micro_batch_size == "auto":
        row, longest = mean or tokens * sequences(method), tokens * sequences(method)
        if completions:
            row, longest = (row + completions) / 2, (longest + completions) // 2
        return _at_once(method, resources, found, shapes, row, capacity, longest)
    # A prompt is read once for its completions; each keeps its keys and values.
    return rows * (tokens + completions) // 2 if completions else rows * tokens, 2


def _activations_and_logits(
    method: TrainingRecipe, resources: Resources, found: Architecture, tokens: int, width: int, longest: int
) -> tuple[int, int]:
    """Bytes of both for so many tokens at once; of a reward model, a score of each row in place of logits.

    Args:
        longest: tokens of a row.
    """
    is_head = method.models["policy"] == REWARD_HEAD
    if resources.gpus_per_worker:
        logits = 0 if is_head else _logits_of_gpu(found, tokens, width, is_trained=method.adapter is None)
        return _activations_of_gpu(method, resources, found, tokens, width), logits
    scores = resources.rows_at_once * sequences(method) * _FLOAT
    logits = scores if is_head else tokens * found.vocabulary * _LOGIT_COPIES * _FLOAT
    # Probabilities in bf16, of half of the pairs of a row's tokens: tasks.train.kernels.machine.CausalInBf16.
    attention = found.heads * min(longest, _KEPT_TOKENS) // 2 if width < _FLOAT else 0
    return _activations(found, tokens, width, resources.checkpointed_layers, attention), logits


def _with_images(
    method: TrainingRecipe, resources: Resources, found: Architecture, rows: float, tokens: float, others: int,
    width: int,
) -> int:  # fmt: skip
    """Bytes of activations, with those of an image in each row that is read at once.

    A tower that is not trained keeps nothing but its output: what a layer of it takes is freed before text is read.

    Args:
        rows, tokens: rows of a pass, and tokens of a row.
        others: bytes of those of the text.
    """
    tower = _tower_in_use(method, found, tokens)
    if tower is None:
        return others
    patches, trains = round(rows * tower.patches), parts_trained(method)
    inputs = patches * (tower.numbers * _FLOAT + tower.hidden * width)
    if "projector" in trains:
        inputs += round(patches * (2 * tower.hidden + 3 * found.hidden / tower.merged) * width)
    if "vision" not in trains:
        return inputs + max(others, patches * tower.kept * width)
    every = resources.checkpointed_layers
    kept = (tower.layers if every is None else 1) * tower.kept + _KEPT_ENDS * tower.hidden
    if every is not None:
        kept += math.ceil(tower.layers / every) * tower.hidden
    return inputs + others + patches * kept * width


def _tower_in_use(method: TrainingRecipe, found: Architecture, tokens: float) -> Tower | None:
    """What reads the images of a training whose rows have so many tokens; None: they have none."""
    images: Images | None = getattr(method, "images", None)
    if images is None or found.tower is None:
        return None
    tower = found.tower
    if not tower.scales:
        return tower
    most = min(tokens, method.max_length) * tower.merged
    of_pixels = images.max_pixels // tower.side**2 if images.max_pixels else tower.patches
    return replace(tower, patches=max(1, min(of_pixels, round(most))))


def _rows_of_pass(method: TrainingRecipe, resources: Resources, at_once: int, row: float) -> float:
    """Rows of a forward pass of so many tokens."""
    if resources.micro_batch_size == "auto":
        return at_once / row
    return max(resources.rows_at_once * sequences(method), at_once / method.max_length)


def _activations_of_gpu(
    method: TrainingRecipe, resources: Resources, found: Architecture, tokens: int, width: int
) -> int:
    """Bytes that the backward pass keeps, and half a layer's gradients; of real tokens, because there is no padding.

    Under autocast a full training sums the outputs of layers in fp32, and a frozen base in bf16 in bf16. Liger keeps
    neither normalized states nor the activation of a gate. The coefficients are those of an H100 (bench/gpu.py).
    """
    is_fused, has_fp32_sums = uses_fused_layers(method, resources), width < _FLOAT and method.adapter is None
    queries, keys = found.heads * found.head, 2 * found.kv_heads * found.head
    sums = found.hidden * (3 * _FLOAT if has_fp32_sums else 2 * width)
    norms = 2 * found.hidden * (width if is_fused else width + 2 * _FLOAT)
    if method.adapter and not is_fused:  # a frozen norm keeps no more than its input in fp32 and its output
        norms = 2 * found.hidden * (width + _FLOAT) - sums
    mlp = (3 if is_fused else 4) * found.intermediate * found.active
    layer = sums + norms + (2 * queries + keys + mlp) * width
    every = resources.checkpointed_layers
    if every is None:
        return round(tokens * layer * (found.layers + 0.5))
    kept = math.ceil(found.layers / every)  # inputs of the checkpointed layers, and one of them in full
    return round(tokens * (kept * sums / (3 if has_fp32_sums else 2) + (found.layers - kept + 1.5) * layer))


def _logits_of_gpu(found: Architecture, tokens: int, width: int, *, is_trained: bool) -> int:
    """Bytes of the head: a chunk of logits, and the hidden states of trained tokens with their gradients."""
    if tokens * found.vocabulary <= _MAX_LOGITS:
        return tokens * found.vocabulary * (width + 2 * _FLOAT)
    columns = min(found.vocabulary, _CHUNK[1])
    chunk = (_CHUNK[0] + found.hidden) * columns * width
    return chunk + tokens * found.hidden * (2 * _FLOAT + width) + is_trained * found.vocabulary * found.hidden * _FLOAT


def uses_fused_layers(method: TrainingRecipe, resources: Resources) -> bool:
    """Whether a GPU's layers are Liger's, as far as the plan knows (``tasks.train.kernels.machine.uses_liger``)."""
    if resources.liger != "auto":
        return resources.liger
    is_off = resources.is_deterministic or resources.resolved_precision(method.precision) == "fp32"
    return bool(resources.gpus_per_worker) and not is_off and find_spec("liger_kernel") is not None


GRAPHS = "a CUDA graph a token where the architecture is plain attention"  # tasks.train.generation.rollouts.decodes


def kernels_in_use(method: TrainingRecipe, resources: Resources) -> dict[str, str]:
    """What a training on a GPU computes its layers and samples its completions with; what steps weights in bf16.

    The log says it of the model, whose architecture must be known to them.
    """
    kept = f"{method.optimizer.name}, which keeps the lower 16 bits of weights in bf16 (optimizer.weights=bf16)"
    steps = {"steps": kept} if method.optimizer.weights else {}
    if not resources.gpus_per_worker:
        return steps
    compiled = ", compiled (resources.compile=true)" if resources.compile else ""
    layers = {"layers": _layers_in_use(method, resources) + compiled}
    return {**layers, **_sampler_in_use(method, resources), **steps}


def _layers_in_use(method: TrainingRecipe, resources: Resources) -> str:
    if resources.liger != "auto":
        return f"{'Liger' if resources.liger else 'transformers'} (resources.liger={str(resources.liger).lower()})"
    if find_spec("liger_kernel") is None:
        return "transformers (liger-kernel is not installed: pip install 'posttrain[gpu]')"
    if resources.is_deterministic:
        return "transformers (Liger is not deterministic)"
    if resources.resolved_precision(method.precision) == "fp32":
        return "transformers (precision=fp32)"
    return f"Liger where it has the architecture (liger-kernel {version('liger-kernel')} is installed)"


def _sampler_in_use(method: TrainingRecipe, resources: Resources) -> dict[str, str]:
    if not _completions(method):
        return {}
    vllm = getattr(method, "vllm", None)
    if vllm:
        return {"completions": f"vLLM (method.vllm={vllm})"}
    is_there = find_spec("vllm") is not None
    choice = "method.vllm=colocate, which changes the recipe, takes vLLM" if is_there else "vLLM is not installed"
    if method.quantization:
        return {"completions": f"transformers (a base in few bits; {choice})"}
    if getattr(getattr(method, "sampling", None), "repetition_penalty", 1.0) != 1:
        return {"completions": f"transformers (sampling.repetition_penalty; {choice})"}
    if holds_parts(resources):
        return {"completions": f"transformers (sharding={resources.sharding} divides the weights; {choice})"}
    return {"completions": f"{GRAPHS} ({choice})"}


def _gradients(
    method: TrainingRecipe, resources: Resources, whole: _Whole, trained: int, split: int, copies: int, *,
    is_one_pass: bool,
) -> int:  # fmt: skip
    """Bytes of the gradients of a step.

    Args:
        trained: weights, of which ``split`` have gradients in half.
        copies: of the model.
    """
    found = _gradient_copies(method, resources) * copies * (trained * _FLOAT - split * (_FLOAT - 2))
    found = whole.part("gradients", found, method)
    if resources.sharding == "zero2_offload" and not resources.gpus_per_worker:
        found *= 1 + (not is_one_pass)  # in the CPU's memory is the sum of earlier passes too
    if whole.passing and not method.adapter:
        # In the first pass, no worker has its part yet of what it passes on.
        found += copies * _FLOAT * (whole.passing - is_one_pass * whole.passing // whole.over)
    if whole.copied and ("gradients" in whole.divides or trained > BUCKET_ELEMENTS):  # DeepSpeed's
        found += _FLOAT * (min(trained, BUCKET_ELEMENTS) + whole.largest * (not method.adapter))
    return found


def _gradient_copies(method: TrainingRecipe, resources: Resources) -> int:
    """How often a worker holds the gradients: in the buckets that workers exchange alone, or also outside of them.

    Gradients are views of the buckets. Those of micro batches before a step's last are not exchanged, and lie beside.
    """
    if resources.num_workers == 1 or resources.sharding != "none" or method.has_own_loop:
        return 1
    return 2 if resources.accumulation_steps(method.global_batch_size) > 1 else 1


def _activations(found: Architecture, tokens: int, width: int, every: int | None, attention: int = 0) -> int:
    per_token = _kept(found) + attention
    if every is None:
        return tokens * per_token * found.layers * width
    kept = math.ceil(found.layers / every)  # inputs of the checkpointed layers, and one of them in full
    return tokens * (kept * found.hidden + (found.layers - kept + 1) * per_token) * width


def _kept(found: Architecture) -> int:
    """Numbers per token that the backward pass keeps of a layer."""
    keys = 2 * found.kv_heads * found.head
    return _KEPT_HIDDEN * found.hidden + keys + _KEPT_MLP * found.intermediate * found.active


def sequences(method: TrainingRecipe) -> int:
    """Sequences of a row in one forward pass: chosen and rejected, or prompt and completion."""
    reads = getattr(method, "reads", None)
    return max(1, len(reads.answers)) if reads is not None else 1


def _completions(method: TrainingRecipe) -> int:
    value = getattr(method, "max_completion_length", None)
    return value if isinstance(value, int) else 0


def frozen_slots(method: TrainingRecipe) -> list[str]:
    """Slots of the models that are held beside the policy, without its reference."""
    return [slot for slot, role in method.models.items() if role in (TEACHER, REWARD_MODEL)]


def _frozen_weights(method: TrainingRecipe, resources: Resources, base: int, frozen: Mapping[str, int] | None) -> int:
    """Weights of the models held beside the policy.

    A reference under an adapter is the policy without it, unless the adapter lies on another one or trains biases.
    """
    adapter = method.adapter
    own = base if adapter is None or adapter.bias is not None or method.adapter_in == "stack" else 0
    has_reference = FROZEN_POLICY in method.models.values() and method.has_reference
    reference = own if has_reference and not resources.precompute_reference else 0
    return reference + sum(base if frozen is None else frozen.get(slot, 0) for slot in frozen_slots(method))


def describe(found: Memory) -> str:
    """The terms above one hundredth of the total, the largest first."""
    terms = {each.name: getattr(found, each.name) for each in fields(found) if each.name != "shared"}
    shown = sorted((name for name in terms if terms[name] * 100 > found.total), key=lambda name: -terms[name])
    return ", ".join(f"{name} {terms[name] / 2**30:.2f}" for name in shown)


def flops_per_token(
    found: Architecture, method: TrainingRecipe, resources: Resources, tokens: int, slots: Collection[str] = ()
) -> float:
    """Operations of a training step, forward and backward, per token: Kaplan et al. 2020, arXiv:2001.08361, table 1.

    Two per weight in the forward pass, four in the backward pass (two, where the weights are frozen and an adapter is
    trained); attention over a row; two more per weight for each frozen model, for recomputed activations, and for
    completions that are generated. A reward model, trained or read, has no head over the vocabulary. PPO trains a value
    model as well, in several passes over the completions, all of which are measured before.

    Args:
        tokens: of a row.
        slots: optional slots that are filled; a reward model's must be where there are no reward functions.
    """
    queries, keys = found.heads * found.head, found.kv_heads * found.head
    mlp = found.mlp_matrices * found.hidden * found.intermediate * found.active
    layer = found.hidden * (2 * queries + 2 * keys) + mlp
    attention = 4 * found.layers * queries * tokens / 2  # on average, a token attends to half of its row
    scored = 2 * found.layers * layer + attention  # of a model whose head gives one number
    forward = scored if method.models["policy"] == REWARD_HEAD else scored + 2 * found.hidden * found.vocabulary
    is_frozen = bool(method.adapter or method.quantization)
    is_recomputed = bool(resources.checkpointed_layers)
    reference = 0 if resources.precompute_reference or not method.has_reference else forward
    teachers = forward * sum(role == TEACHER for role in method.models.values())
    rewards = scored * sum(
        role == REWARD_MODEL and (slot in slots or not getattr(method, "rewards", None))
        for slot, role in method.models.items()
    )
    generated = forward if _completions(method) else 0
    trained = ((2 if is_frozen else 3) + is_recomputed) * forward
    if VALUE_MODEL in method.models.values():
        epochs = getattr(method, "num_ppo_epochs", 1)
        value = (3 + is_recomputed) * scored  # all its weights are trained
        trained = trained * epochs + forward + value * epochs + scored
    return trained + reference + teachers + rewards + generated


def _flops_of_images(method: TrainingRecipe, found: Architecture, tokens: float) -> float:
    """Operations of a row's image: a forward pass of the tower in each of its sequences, and the backward pass."""
    tower = _tower_in_use(method, found, tokens)
    return sequences(method) * tower.flops * (3 if "vision" in parts_trained(method) else 1) if tower else 0.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a training computes.

    Args:
        tokens: over all steps and workers.
        flops: the same.
        passes: forward and backward passes of one worker.
        moved: numbers that layers and the head write, over all steps and workers.
    """

    tokens: int
    flops: float
    passes: int
    moved: int


def work(
    method: TrainingRecipe, resources: Resources, found: Architecture, shapes: Shapes, *, num_steps: int, tokens: float,
    slots: Collection[str] = (), capacity: int = 0,
) -> Work:  # fmt: skip
    """Estimates the arithmetic.

    Args:
        num_steps: optimizer steps.
        tokens: of a row in the mean, all of its sequences.
        slots: that are filled.
        capacity: as for ``memory``.
    """
    rows = num_steps * method.global_batch_size
    total = round(rows * tokens)
    each = tokens / sequences(method)
    head = 0 if method.models["policy"] == REWARD_HEAD else _LOGIT_COPIES * found.vocabulary
    passes = resources.accumulation_steps(method.global_batch_size)
    if resources.micro_batch_size == "auto":
        _, passes = _at_once(method, resources, found, shapes, tokens, capacity)
    flops = total * flops_per_token(found, method, resources, round(each), slots)
    return Work(
        tokens=total, flops=flops + rows * _flops_of_images(method, found, each),
        passes=num_steps * passes,
        moved=total * (found.layers * _kept(found) + head),
    )  # fmt: skip

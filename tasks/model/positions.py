"""Tables of positions: which architectures have one, and how long a row they read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lineage.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedConfig, PreTrainedModel

# Architectures with a table of positions, learned or computed once; all others compute positions as needed.
_FIRST_POSITION_IS_0 = (
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small",
    "codegen", "ctrl", "electra", "ernie", "git", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "marian", "mbart",
    "megatron-bert", "mpt", "mvp", "openai-gpt", "opt", "pegasus", "plbart", "rembert", "roc_bert", "roformer", "trocr",
    "xlm",
)  # fmt: skip
# Their positions start after the pad token's id; these are the ids where a config has none.
FIRST_POSITION_IS_BEHIND = {
    "camembert": 1, "data2vec-text": 1, "roberta": 1, "roberta-prelayernorm": 1, "xlm-roberta": 1,
    "xlm-roberta-xl": 1, "xmod": 1,
}  # fmt: skip
LEARNED_POSITIONS = frozenset({*_FIRST_POSITION_IS_0, *FIRST_POSITION_IS_BEHIND})
# They compute positions, and what they read at a place depends on its number: sinusoids, or a norm after the rotation.
_BY_NUMBER = ("hunyuan_v1_dense", "hunyuan_v1_moe", "xglm")
NUMBERED = LEARNED_POSITIONS - {*FIRST_POSITION_IS_BEHIND} | {*_BY_NUMBER}
# What they read before a row changes the row, whatever the mask says: a state or a window of a convolution, tokens that
# are compressed in blocks, positions that no argument sets.
SCORED = ("gemma3", "qwen3_5")  # models that read images, of which transformers has a class with a head for scores
_READ_PADDING = frozenset({
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "deepseek_v4", "marian", "mbart", "mvp",
    "pegasus", "plbart", "prophetnet", "recurrent_gemma", "rwkv", "trocr", "whisper", *FIRST_POSITION_IS_BEHIND,
})  # fmt: skip
_OF_ROWS = 2  # dimensions of an attention mask that says which tokens are padding
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")


def require_positions(config: "PreTrainedConfig", max_length: int) -> None:
    """Requires causal attention, and a position for every token of a row in a model with a table of positions.

    Raises:
        ConfigError: it sees later tokens; or it has fewer positions, and the first long row would raise an IndexError.
    """
    text = config.get_text_config()
    if why := why_not_causal(config.to_dict()):
        raise ConfigError(why)
    positions = learned_positions(text.to_dict())
    if positions is not None and max_length > positions:
        raise ConfigError(too_few_positions(max_length, positions, text.model_type))


def scale_by_row(model: "PreTrainedModel") -> None:
    """Lets LongRoPE (arXiv:2402.13753) and dynamic NTK scaling choose the factors of each row by that row's length.

    transformers chooses them by the longest row of a batch, padding included, so that the rows of a micro batch would
    change each other; with dynamic NTK also by the longest row before. ``fix_length`` sets one length for all rows.
    Shapes: B rows, L tokens of the longest.
    """
    import torch

    rotary = next((each for each in model.modules() if _by_length(getattr(each, "rope_type", None))), None)
    if rotary is None:
        return
    whole, masks_BL = rotary.forward, list["Tensor | None"]()

    def remember(_module: object, _args: object, kwargs: dict[str, object]) -> None:
        mask = kwargs.get("attention_mask")
        is_first = kwargs.get("cache") is None and isinstance(mask, torch.Tensor) and mask.ndim == _OF_ROWS
        masks_BL[:] = [mask if is_first else None]

    def forward(x: "Tensor", position_ids: "Tensor", layer_type: str | None = None) -> "tuple[Tensor, Tensor]":
        own = {} if layer_type is None else {"layer_type": layer_type}
        kind = rotary.rope_type[layer_type] if layer_type else rotary.rope_type
        if not _by_length(kind):
            return whole(x, position_ids, **own)  # type: ignore[no-any-return]
        if (longest := getattr(rotary, _LONGEST, None)) is not None:
            last_B1 = torch.full_like(position_ids[:, :1], longest - 1)
            cos, sin = whole(x, torch.cat([position_ids, last_B1], 1), **own)
            return cos[:, :-1], sin[:, :-1]
        settings = rotary.config.rope_parameters[layer_type] if layer_type else rotary.config.rope_parameters
        is_longrope = kind == "longrope"
        original = settings["original_max_position_embeddings"] if is_longrope else rotary.original_max_seq_len
        mask_BL = masks_BL[0] if masks_BL else None
        if mask_BL is not None and mask_BL.shape[1] == position_ids.shape[1]:
            length_BL = mask_BL.sum(1, keepdim=True).expand(-1, position_ids.shape[1])
        else:  # rows end to end, whose positions start again
            number_BL = (position_ids == 0).long().cumsum(-1)
            last_BL = torch.zeros_like(position_ids).scatter_reduce(
                -1, number_BL, position_ids, "amax", include_self=False
            )
            length_BL = last_BL.gather(-1, number_BL) + 1
        if is_longrope:  # all above the original length are alike
            length_BL = length_BL.masked_fill(length_BL > original, int(position_ids.max()) + 1)
        length_BL = length_BL.clamp(min=original)
        found: tuple[Tensor, Tensor] | None = None
        for length in length_BL.unique().tolist():
            if not is_longrope:
                _forget_lengths(rotary, f"{layer_type}_" if layer_type else "", original)
            part = whole(x, position_ids.clamp(max=length - 1), **own)
            chosen_BL1 = (length_BL == length)[..., None]
            found = (
                part
                if found is None
                else (torch.where(chosen_BL1, part[0], found[0]), torch.where(chosen_BL1, part[1], found[1]))
            )
        assert found is not None
        return found

    rotary.forward = forward
    setattr(rotary, _LONGEST, None)
    model.get_decoder().register_forward_pre_hook(remember, with_kwargs=True)


_LONGEST = "longest_row"  # of what is generated; None: each row's own length


def fix_length(model: "Module", longest: int | None) -> int | None:
    """Chooses the factors of all rows by one length, where they depend on it (``scale_by_row``); None: by each row's.

    A completion grows over the lengths at which factors change, and keys of other factors are in its cache; so vLLM
    chooses them by the longest row that it serves. Who samples and who scores it must choose alike.

    Returns:
        The length before.
    """
    before: int | None = None
    for each in model.modules():
        if hasattr(each, _LONGEST):
            before = getattr(each, _LONGEST)
            setattr(each, _LONGEST, longest)
    return before


def scales_by_length(model: "Module") -> bool:
    """Whether its factors depend on lengths, which a CUDA graph cannot read."""
    return any(hasattr(each, _LONGEST) for each in model.modules())


def _by_length(rope_type: object) -> bool:
    """Whether factors of rotary positions depend on the length of what is read; of layers of several types, any's."""
    if isinstance(rope_type, Mapping):
        return any(map(_by_length, rope_type.values()))
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)


def _forget_lengths(rotary: "Module", prefix: str, original: int) -> None:
    """Sets the factors of dynamic NTK scaling to those of short rows, whatever was read before."""
    factors = getattr(rotary, f"{prefix}inv_freq")
    rotary.register_buffer(
        f"{prefix}inv_freq", getattr(rotary, f"{prefix}original_inv_freq").to(factors.device), persistent=False
    )
    setattr(rotary, f"{prefix}max_seq_len_cached", original)


# Encoders unless they are configured as decoders; and models that see later tokens whatever their config says.
_ENCODERS = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
_NEVER_CAUSAL = ("cpmant", "paligemma", "xlnet")


def why_not_causal(config: Mapping[str, object]) -> str | None:
    """Why a model with this ``config.json`` is not trained to predict the next token: it sees it; None: it does not."""
    name, text = config.get("model_type"), config.get("text_config")
    if isinstance(text, Mapping) and (found := why_not_causal(text)):
        return found
    setting = "take another model"
    if name in _ENCODERS and not config.get("is_decoder"):
        setting = "set is_decoder=true in its config.json"
    elif name == "xlm" and not config.get("causal"):
        setting = "set causal=true in its config.json"
    elif config.get("use_bidirectional_attention") in (True, "all"):
        setting = "set use_bidirectional_attention=false in its config.json"
    elif name not in _NEVER_CAUSAL:
        return None
    return (
        f"the model ({name}) reads later tokens at each place, so that it would be trained on what it already sees; "
        f"one with causal attention is accepted: {setting}"
    )


def no_scores(model_type: object) -> str:
    """Why a model that reads more than text gets no head for scores."""
    return (
        f"a model of type {model_type} reads more than text, and gets no head for scores; a model of text, or one that "
        "reads images, is accepted; start from one of these"
    )


def reads_padding(config: Mapping[str, object]) -> bool:
    """Whether padding on the left changes a row for a model with this ``config.json``."""
    return config.get("model_type") in _READ_PADDING


def why_not_sampled(model_type: object) -> str:
    """The error message of a training that generates with a model that reads its padding."""
    return (
        f"the model ({model_type}) reads the padding before a prompt, so that a completion would depend on the other "
        "prompts of its batch; a model of another type is accepted, or a method that trains rows, such as sft or dpo"
    )


def learned_positions(config: Mapping[str, object]) -> int | None:
    """How many tokens a model with this ``config.json`` can read; None: no table limits it, or its size is not set."""
    architecture = str(config.get("model_type"))
    found = next((config[name] for name in _POSITIONS if name in config), None)
    if architecture not in LEARNED_POSITIONS or not isinstance(found, int):
        return None
    if architecture not in FIRST_POSITION_IS_BEHIND:
        return found
    pad = config.get("pad_token_id", FIRST_POSITION_IS_BEHIND[architecture])
    return found - pad - 1 if isinstance(pad, int) else found


def too_few_positions(max_length: int, positions: int, model_type: str) -> str:
    """The error message."""
    return (
        f"max_length={max_length}: the model ({model_type}) has a table of {positions} positions, and a longer row "
        f"would end its training; set max_length={positions} or less"
    )

"""Tables of positions: which architectures have one, and how long a row they read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lineage.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")


def require_positions(config: "PreTrainedConfig", max_length: int) -> None:
    """Requires a position for every token of a row, in a model with a table of positions.

    Raises:
        ConfigError: it has fewer, and the first long row would raise an IndexError.
    """
    text = config.get_text_config()
    positions = learned_positions(text.to_dict())
    if positions is not None and max_length > positions:
        raise ConfigError(too_few_positions(max_length, positions, text.model_type))


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

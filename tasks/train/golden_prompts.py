"""Golden prompts: what a model says of a few fixed rows before and after its adapter is merged into its base.

A base in few bits is merged in full precision, which is another model by the quantization error of the base. How much
that moves answers is measured where it is made, and recorded with the stage.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tasks.data.tokens.cache import TokenizedRows

NUM_PROMPTS = 4
_TEXTS = (  # where a stage reads no rows
    "The capital of France is Paris, and the river that flows through it is the Seine.",
    "def add(left: int, right: int) -> int:\n    return left + right\n",
    "Question: a train leaves at 9:40 and arrives at 11:05. How long does it take?\nAnswer: 1 hour and 25 minutes.",
    "Water boils at a lower temperature on a mountain, because the pressure of the air is lower there.",
)
_MAX_TOKENS = 256
_ANSWERS = ("chosen_ids", "completion_ids")

logger = logging.getLogger(__name__)

Golden = Sequence[Sequence[int]]


def golden_prompts(rows: "TokenizedRows") -> Golden:
    """The tokens of the first rows of a stage: a prompt with its answer, or with the chosen one."""
    first = rows.examples.select(range(min(NUM_PROMPTS, len(rows))))
    return [_tokens(row)[:_MAX_TOKENS] for row in first]


def golden_texts(tokenizer: "PreTrainedTokenizerBase") -> Golden:
    """The tokens of fixed texts."""
    return [tokenizer(text)["input_ids"][:_MAX_TOKENS] for text in _TEXTS]


def _tokens(row: Mapping[str, list[int]]) -> list[int]:
    if "input_ids" in row:
        return row["input_ids"]
    return [*row["prompt_ids"], *next((row[name] for name in _ANSWERS if name in row), [])]


def golden_values(model: "PreTrainedModel | PeftModel", prompts: Golden) -> list[float]:
    """Of each row the mean log-probability of its tokens, in nats; of a reward model its score."""
    import torch
    from peft import PeftModel

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    is_training = base.training
    base.eval()
    found = []
    dtypes = {each.dtype for each in base.parameters() if each.is_floating_point()}
    # Where the frozen part is in bf16 and the trained one in fp32, layers of both meet only under autocast.
    is_mixed = {torch.bfloat16, torch.float32} <= dtypes
    with torch.no_grad(), torch.autocast(base.device.type, torch.bfloat16, enabled=is_mixed):
        for prompt in prompts:
            ids_BT = torch.tensor([prompt], device=base.device)
            # The class's forward: that of a model in training reads batches without padding.
            logits = type(base).forward(base, input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits.float()
            if base.get_output_embeddings() is None:
                found.append(float(logits))
                continue
            logps_BT = logits[:, :-1].log_softmax(-1).gather(-1, ids_BT[:, 1:, None])
            found.append(float(logps_BT.mean()))
    base.train(is_training)
    return found


def compared(before: Sequence[float], after: Sequence[float], *, is_reward_model: bool) -> dict[str, float]:
    """Metrics of a merge, which are logged too: means before and after it, and the largest difference of one row."""
    name = "scores" if is_reward_model else "logps"
    apart = max(abs(left - right) for left, right in zip(before, after, strict=True))
    logger.info(
        "merge golden_prompts=%d %s_before=%s %s_after=%s max_difference=%.3g", len(before), name, _shown(before), name,
        _shown(after), apart,
    )  # fmt: skip
    return {
        f"merge/{name}_before": sum(before) / len(before),
        f"merge/{name}_after": sum(after) / len(after),
        f"merge/{name}_difference": apart,
    }


def _shown(values: Sequence[float]) -> str:
    return ",".join(f"{value:.4f}" for value in values)

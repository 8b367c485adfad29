"""Completions of a policy in training: sampled, scored, watched, and kept as samples.

In a loop of its own:

    rollouts = Rollouts(run)
    examples = rollouts.examples(step)
    completion_ids = rollouts.generate(model, examples, step)
    rewards_BK = rollouts.score(step, examples, completion_ids)
    metrics = rollouts.record(step, examples, completion_ids, rewards_BK)

The prompt of a group of completions is read once: its keys and values serve all of them, because attention is causal
and the hidden states of a prompt do not depend on later tokens. Of each row the layers then read only the last prompt
token and the completion, as does TRL's head, which on a CPU also projects positions without a loss. The numbers are
those of whole rows up to the order of additions.

On a GPU ``transformers.generate`` starts some hundred kernels per token and layer from Python, which the GPU waits for.
``decode`` keeps keys and values in buffers of the final length, so that every token runs the same kernels on the same
memory. They are captured as a CUDA graph once for each generation, which takes as long as one token without it.

Shapes: P tokens of the longest prompt; B completions of this worker, N of all workers, K rewards, V vocabulary;
of ``decode`` N new tokens, and L = P + N rounded up.
"""

import functools
import inspect
import itertools
import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Cache, DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from lineage.errors import PipelineError
from tasks.data.kinds import PLACES
from tasks.evaluate.scoring import generating, padded
from tasks.model.positions import NUMBERED, scales_by_length
from tasks.reward_functions import check_columns, scorers
from tasks.train.generation.generating import MISSING_EOS, REWARD_MODEL_NAME, Completing, Generating, Sampling
from tasks.train.generation.one_policy import (
    Sampled,
    Weights,
    digest_of,
    digests_of_weights,
    token_logps,
    version_metrics,
)
from tasks.train.kernels.machine import plain
from tasks.train.kernels.padding_free import is_padding_free
from tasks.train.losses.rewards import sequence_scores
from tasks.train.models.quantized_base import is_quantized
from tasks.train.sharding import gather_again, is_divided

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from tasks.model.vision import Vision
    from tasks.train.run import TrainingRun

    Example = Mapping[str, object]  # a prompt, its tokens and its columns

logger = logging.getLogger(__name__)

_ATTENTION = "decoding"
_MULTIPLE = 16  # of L, for aligned masks
_BLOCK = 8  # tokens whose noise is drawn at once, and between two checks whether all completions have ended

Draw = Callable[["Tensor"], None]  # fills (B, V) with the noise of the next token
SAMPLES_FILE = "samples.parquet"
SAMPLES_PER_STEP = 16  # from the first prompts of a step
MAX_SAMPLES = 10_000  # in the output; a longer training keeps those of every n-th step
LOGGED = 10  # samples in the log
_ROUNDING = 1e-6  # error of sums in fp32, relative to the largest term
_FUSED = {"input_ids", "attention_mask", "labels"}  # tensors of TRL's fused forward
_TOKENS = ("prompt", "prompt_ids", PLACES)  # of an example, beside its columns


class Rollouts:
    """The completions of one training.

    Attributes:
        names, weights: of the rewards: the functions, then the reward model, then the penalty of a missing end.
        equal_steps: the last steps in a row that teach nothing; see ``watch``.
        logp_temperature: of the trainer's log-probabilities, which those of ``sampled`` are compared with.
        sampled: what the sampler left of the last generation.
        sampled_by: the weights of the last completions, with their step.
        scored_by: the digest of the reward model's files, by its slot; empty: there is none.
        samples: the samples kept so far.
    """

    def __init__(self, run: "TrainingRun") -> None:
        method = run.method
        assert isinstance(method, Generating)
        method.check_slots(frozenset(run.inputs))
        self.run, self.ctx, self.method = run, run.ctx, method
        self.tokenizer = run.tokenizer
        self.scorers = scorers(method.rewards or {}, self.tokenizer)
        has_model, penalty = REWARD_MODEL_NAME in run.inputs, method.missing_eos_penalty
        self.names = [*(each.name for each in self.scorers), *[REWARD_MODEL_NAME] * has_model]
        self.weights = [*(each.weight for each in self.scorers), *[method.reward_model_weight or 1.0] * has_model]
        if penalty is not None:
            self.names, self.weights = [*self.names, MISSING_EOS], [*self.weights, 1.0]
        self.equal_steps = 0
        self.logp_temperature = method.sampling.temperature
        self.sampled = Sampled()
        self.sampled_by = Weights(digest=None)
        self.scored_by = digests_of_weights({name: run.inputs[name] for name in {REWARD_MODEL_NAME} & {*run.inputs}})
        self.samples: list[dict[str, object]] = []
        self._check_columns()
        run.writers.append(self.write_samples)

    @cached_property
    def reward_model(self) -> "PreTrainedModel | None":
        """On the training's device; None: the slot is empty."""
        if REWARD_MODEL_NAME not in self.run.inputs:
            return None
        model = self.run.model(REWARD_MODEL_NAME)
        assert model is not None
        if not is_divided(model):
            model = model.to(self.run.device)
        self._loaded = digest_of(dict(model.named_parameters()))
        return model

    @property
    def num_local(self) -> int:
        """Number of this worker's completions in a step."""
        return self.method.global_batch_size // self.ctx.world_size

    def examples(self, step: int) -> "list[Example]":
        """This worker's prompts of a step, counted from 0, each as often as it has completions here."""
        rows, size = self.run.ordered_rows, self.method.global_batch_size
        first = step * size + self.ctx.rank * self.num_local
        indices = [place // self.method.num_generations for place in range(first, first + self.num_local)]
        found = {index: rows[index] for index in dict.fromkeys(indices)}
        return [found[index] for index in indices]

    def generate(
        self, model: "PreTrainedModel | PeftModel", examples: "Sequence[Example]", step: int
    ) -> list[list[int]]:
        """Samples a completion of each example's prompt, up to its end token, with this policy; sets ``sampled``.

        Args:
            model: without the wrapper of a process group; called under autocast where that is used.
            step: of the generation; its noise differs from that of other steps.
        """
        seeds = seeds_of(self.method.seed, step, self.ctx.rank * self.num_local, len(examples))
        prompts = [list(map(int, each["prompt_ids"])) for each in examples]  # type: ignore[call-overload]
        self.sampled = Sampled(self.logp_temperature)
        return sample(
            model, prompts, self.method.sampling, seeds, max_new_tokens=self.method.max_completion_length,
            pad_token_id=self.pad_token_id, stop_tokens=self.stop_tokens, sampled=self.sampled, vision=self.run.vision,
            images=images_of(examples),
        )  # fmt: skip

    @cached_property
    def stop_tokens(self) -> list[int]:
        """The tokens that end a completion."""
        found = self.run.stop_tokens
        return [*dict.fromkeys([*found, *filter(None, [self.tokenizer.eos_token_id])])]

    @property
    def pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)

    def score(self, step: int, examples: "Sequence[Example]", completion_ids: Sequence[Sequence[int]]) -> "Tensor":
        """The rewards (B, K) of completions, without their weights; on the training's device.

        Args:
            step: counted from 0.

        Raises:
            PipelineError: a reward function raises, or a reward is non-finite; names step, worker, row, function and
                value.
        """
        try:
            return self._scores(examples, completion_ids)
        except PipelineError as error:
            worker = f" on worker {self.ctx.rank}" if self.ctx.world_size > 1 else ""  # rows are counted per worker
            raise type(error)(f"step {step + 1}{worker}, which is not taken: {error}") from error

    def _scores(self, examples: "Sequence[Example]", completion_ids: Sequence[Sequence[int]]) -> "Tensor":
        texts = self.texts(completion_ids)
        prompts = [each["prompt"] for each in examples]
        names = dict.fromkeys(name for each in examples for name in each if name not in _TOKENS)
        columns = {name: [each.get(name) for each in examples] for name in names}
        found = [torch.tensor(scorer(prompts, texts, columns)) for scorer in self.scorers]  # type: ignore[arg-type]
        if self.reward_model is not None:
            found.append(self._model_scores(examples, completion_ids, texts))
        if self.method.missing_eos_penalty is not None:
            found.append(-self.method.missing_eos_penalty * self.truncated(completion_ids).float())
        return torch.stack([each.float() for each in found], dim=1).to(self.run.device)

    def truncated(self, completion_ids: Sequence[Sequence[int]]) -> "Tensor":
        """Which completions (B) have no end."""
        return torch.tensor([not ids or ids[-1] not in self.stop_tokens for ids in completion_ids])

    def texts(self, completion_ids: Sequence[Sequence[int]]) -> list[str]:
        """The texts of completions for reward functions, without special tokens."""
        found: list[str] = self.tokenizer.batch_decode([*completion_ids], skip_special_tokens=True)
        return found

    def record(
        self, step: int, examples: "Sequence[Example]", completion_ids: Sequence[Sequence[int]], rewards_BK: "Tensor"
    ) -> dict[str, float]:
        """Keeps samples, and watches the rewards of all workers.

        Args:
            step: counted from 0.

        Returns:
            Metrics with TRL's names, over all workers: ``reward``, ``reward_std``, ``rewards/NAME/mean``,
            ``frac_reward_zero_std`` and the completions' lengths.

        Raises:
            PipelineError: ``equal_rewards_patience`` steps in a row taught nothing.
        """
        lengths = torch.tensor([[len(ids) for ids in completion_ids], self.truncated(completion_ids).tolist()])
        rewards_NK = self.gathered(rewards_BK)
        lengths_N2 = self.gathered(lengths.T.float().to(rewards_BK.device))
        self.watch(step, rewards_NK, completion_ids)
        self.keep(step, examples, completion_ids, rewards_BK)
        total_N = self.total(rewards_NK)
        means = {f"rewards/{name}/mean": float(rewards_NK[:, index].mean()) for index, name in enumerate(self.names)}
        return {
            **means,
            "reward": float(total_N.mean()),
            "reward_std": float(total_N.std()) if len(total_N) > 1 else 0.0,
            "frac_reward_zero_std": float(self.equal_groups(rewards_NK).float().mean()),
            "completions/mean_length": float(lengths_N2[:, 0].mean()),
            "completions/max_length": float(lengths_N2[:, 0].max()),
            "completions/clipped_ratio": float(lengths_N2[:, 1].mean()),
            **version_metrics(self.scored_by),
        }

    def total(self, rewards_NK: "Tensor") -> "Tensor":
        """The weighted sum (N) of rewards."""
        return rewards_NK @ torch.tensor(self.weights, device=rewards_NK.device)

    def equal_groups(self, rewards_NK: "Tensor") -> "Tensor":
        """Whether all rewards of each prompt are equal; with one completion per prompt, whether all of the step are."""
        size, clip = self.method.num_generations, getattr(self.method, "reward_clip", None) or math.inf
        groups = self.total(rewards_NK).clamp(-clip, clip).view(-1, size if size > 1 else len(rewards_NK))
        return self.is_rounding(groups - groups.mean(1, keepdim=True), rewards_NK)

    def is_rounding(self, differences_GN: "Tensor", rewards_NK: "Tensor") -> "Tensor":
        """Whether all differences between the rewards of a group (G) are no more than rounding makes them."""
        clip = getattr(self.method, "reward_clip", None) or math.inf
        terms_N = rewards_NK.abs() @ torch.tensor(self.weights, device=rewards_NK.device).abs()
        largest_G = terms_N.clamp(max=clip).view_as(differences_GN).amax(1)
        return differences_GN.abs().amax(1) <= _ROUNDING * largest_G

    def gathered(self, values_B: "Tensor") -> "Tensor":
        """The values of all workers, or those of an island, in the order of the batch."""
        if self.ctx.together == 1:
            return values_B
        found = [torch.empty_like(values_B) for _ in range(self.ctx.together)]
        torch.distributed.all_gather(found, values_B.contiguous())
        return torch.cat(found)

    def watch(self, step: int, rewards_NK: "Tensor", completion_ids: Sequence[Sequence[int]]) -> None:
        """Counts the steps that teach nothing: all completions of a prompt have equal rewards, or none gets a loss.

        Args:
            completion_ids: of this worker; ``rewards_NK`` is of all.

        Raises:
            PipelineError: as of ``record``.
        """
        if step == 0:
            warn_if_all_truncated(
                self.gathered(self.truncated(completion_ids).float().to(self.run.device)), self.method
            )
        if bool(self.equal_groups(rewards_NK).all()):
            found, why = "equal", "all completions of each prompt had equal rewards"
            remedy = (
                "make the prompts easier or harder, give partial credit, raise sampling.temperature or num_generations"
            )
        elif self._all_masked(completion_ids):
            found, remedy = "masked", "raise max_completion_length, set mask_truncated=false"
            why = (
                f"no completion ended within max_completion_length={self.method.max_completion_length} tokens, and "
                "mask_truncated=true leaves out those without an end"
            )
        else:
            self.equal_steps = 0
            return
        self.equal_steps += 1
        means = ", ".join(f"{name}={float(rewards_NK[:, index].mean()):g}" for index, name in enumerate(self.names))
        patience = self.method.equal_rewards_patience
        if patience is not None and self.equal_steps >= patience:
            raise PipelineError(
                f"for {self.equal_steps} steps up to step {step + 1}, {why} (means of the last: {means}), so there is "
                "nothing to learn; rewards that differ within a group are accepted, of completions that get a loss; "
                f"{remedy}, or set equal_rewards_patience=null"
            )
        if self.equal_steps == 1:
            logger.warning(
                "step=%d rewards=%s: %s, so the step learns nothing from them; %s", step + 1, found, why, means
            )

    def _all_masked(self, completion_ids: Sequence[Sequence[int]]) -> bool:
        masks = getattr(self.method, "mask_truncated", False)
        return masks and bool(self.gathered(self.truncated(completion_ids).float().to(self.run.device)).all())

    def keep(
        self, step: int, examples: "Sequence[Example]", completion_ids: Sequence[Sequence[int]], rewards_BK: "Tensor"
    ) -> None:
        """Keeps the first completions of a step as samples, on rank 0."""
        num_generations = math.ceil(self.run.num_steps / self.method.steps_per_generation)
        every = math.ceil(num_generations * SAMPLES_PER_STEP / MAX_SAMPLES)
        number = step // self.method.steps_per_generation
        if self.ctx.rank != 0 or (number % every and number != num_generations - 1):
            return
        shown = completion_ids[:SAMPLES_PER_STEP]
        truncated = self.truncated(shown).tolist()
        for index, text in enumerate(self.texts(shown)):
            rewards = dict(zip(self.names, rewards_BK[index].tolist(), strict=True))
            self.samples.append({
                "step": step + 1,
                "prompt": json.dumps(examples[index]["prompt"], ensure_ascii=False),
                "completion": text,
                "num_tokens": len(shown[index]),
                "truncated": truncated[index],
                "reward": float(self.total(rewards_BK[index : index + 1])),
                **{f"rewards/{name}": value for name, value in rewards.items()},
                "weights_step": self.sampled_by.step,
                "weights": self.sampled_by.digest,
                **{f"weights/{slot}": digest for slot, digest in self.scored_by.items()},
            })  # fmt: skip

    def write_samples(self, directory: Path) -> None:
        """Writes the samples to ``samples.parquet``, and the last ten to the log."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(self.samples), directory / SAMPLES_FILE)
        for each in self.samples[-LOGGED:]:
            logger.info(
                "step=%d reward=%g prompt=%s completion=%r", each["step"], each["reward"], each["prompt"],
                each["completion"],
            )  # fmt: skip

    def state_dict(self) -> dict[str, object]:
        """For checkpoints."""
        return {"samples": self.samples, "equal_steps": self.equal_steps}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        samples, equal_steps = state["samples"], state["equal_steps"]
        assert isinstance(samples, list) and isinstance(equal_steps, int)
        self.samples, self.equal_steps = samples, equal_steps

    def _model_scores(
        self, examples: "Sequence[Example]", completion_ids: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> "Tensor":
        """The reward model reads the tokens that the policy read and wrote; it must be the one that was loaded."""
        assert self.reward_model is not None
        gather_again(self.reward_model)
        found = digest_of(dict(self.reward_model.named_parameters()))
        if found != self._loaded:
            raise PipelineError(
                f"the weights of the reward model {self.run.inputs[REWARD_MODEL_NAME].name} were {self._loaded} when "
                f"it was loaded, and are {found} now; one that stays is accepted; see what else writes into them"
            )
        whole = [[*each["prompt_ids"], *ids] for each, ids in zip(examples, completion_ids, strict=True)]  # type: ignore[misc]
        scored, size, images = [], self.ctx.resources.rows_at_once, images_of(examples)
        for start in range(0, len(whole), size):
            part = whole[start : start + size]
            ids_BT, mask_BT = padded(part, self.run.device, left=False, pad=self.pad_token_id)
            seen = self.run.vision.inputs(images[start : start + size], ids_BT) if self.run.vision else {}
            with torch.no_grad():
                scores_B = sequence_scores(self.reward_model, ids_BT, mask_BT, **seen)
            scored.append(scores_B.cpu())
        scores = torch.cat(scored)
        for index in (~torch.isfinite(scores)).nonzero().flatten().tolist():
            raise PipelineError(
                f"the reward model {self.run.inputs[REWARD_MODEL_NAME].name} gave {scores[index]} for row {index} of "
                f"the batch (completion {texts[index][:200]!r}); a finite score is accepted; train it again"
            )
        return scores

    def _check_columns(self) -> None:
        """Checks the columns of all prompts that reward functions need, before the first step."""
        if not self.scorers:
            return
        rows = self.run.rows
        examples = rows.dataset(range(len(rows)))[:]
        check_columns(self.scorers, {name: values for name, values in examples.items() if name not in _TOKENS})


def warn_if_all_truncated(truncated_N: "Tensor", method: Completing) -> None:
    """Warns where no completion of the first batch has an end: the policy may end its turns in another token."""
    if bool(truncated_N.all()):
        logger.warning(
            "step=1 completions/clipped_ratio=1: none of %d completions ended within max_completion_length=%d tokens; "
            "they end at the tokens of the model's generation_config.json, its tokenizer's eos_token and the end of "
            "turn of its chat template; raise max_completion_length, or train the policy on answers that end (sft)",
            len(truncated_N), method.max_completion_length,
        )  # fmt: skip


def seeds_of(seed: int, step: int, first: int, num_completions: int) -> list[int]:
    """The seeds of completions' noise; ``first`` is the position of the first one in the batch of all workers."""
    places = range(first, first + num_completions)
    return [random.Random(f"{seed} {step} {place}").getrandbits(63) for place in places]


@functools.cache
def log_sampler(model_type: str, *, by_graphs: bool) -> None:
    """Once in a stage."""
    logger.info("completions=%s model_type=%s", "one CUDA graph a token" if by_graphs else "transformers", model_type)


def sample(
    model: "PreTrainedModel | PeftModel", prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int], *,
    max_new_tokens: int, pad_token_id: int, stop_tokens: Sequence[int], sampled: Sampled | None = None,
    vision: "Vision | None" = None, images: Sequence[Sequence[int]] = (),
) -> list[list[int]]:  # fmt: skip
    """Samples a completion of each prompt, up to its first stop token, which is part of it.

    Args:
        model: its own settings of generation (``generation_config``) are not used.
        seeds: of each completion's noise.
        sampled: gets the model's weights, and its log-probabilities of the tokens.
        images: the places of each prompt's images among those of ``vision``; no token of an image is sampled then.
    """
    if sampled is not None:
        sampled.by(model)
    model = plain(model)
    ids_BT, mask_BT = padded(prompts, model.device, left=True, pad=pad_token_id)
    with generating(
        model, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad_token_id,
        eos_token_id=[*stop_tokens], disable_compile=True,
    ):  # fmt: skip
        whole = None if sampled is None else _Whole()
        temperature = 1.0 if sampled is None else sampled.temperature
        warpers, draw = _warpers(sampling, mask_BT), _Draw(seeds, model.device, whole, temperature)
        seen = vision.inputs(images, ids_BT) if vision else {}
        if vision:
            unwritten = [each for each in vision.processor.image_token_ids if each is not None]
            warpers.insert(0, SuppressTokensLogitsProcessor(unwritten, device=model.device))
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)  # as ``generate`` counts them
        by_graphs = decodes(model) and ids_BT.shape[1] > 1 and sampling.repetition_penalty == 1 and not vision
        if ids_BT.shape[1] > 1:
            log_sampler(model.config.model_type, by_graphs=by_graphs)
        if by_graphs:
            found_BN, logps_BN = decode(
                model, ids_BT, mask_BT, prompt_cache(model, ids_BT, mask_BT, positions_BT),
                max_new_tokens=max_new_tokens, pad_token_id=pad_token_id, stop_tokens=stop_tokens, warpers=warpers,
                draw=draw.fill, temperature=temperature,
            )  # fmt: skip
        else:
            processors = LogitsProcessorList([*([whole] if whole else []), *warpers, draw])
            found_BT = model.generate(
                input_ids=ids_BT, attention_mask=mask_BT, logits_processor=processors, **seen,
                **({} if vision else {"cache": prompt_cache(model, ids_BT, mask_BT, positions_BT)}),
            )  # fmt: skip
            found_BN = found_BT[:, ids_BT.shape[1] :]
            logps_BN = torch.stack(draw.logps, dim=1) if draw.logps else None
    completions = [_ended(ids, stop_tokens) for ids in found_BN.tolist()]
    if sampled is not None and logps_BN is not None:
        rows = logps_BN.tolist()
        sampled.logps = [row[: len(ids)] for row, ids in zip(rows, completions, strict=True)]
    return completions


def images_of(examples: "Sequence[Example]") -> list[list[int]]:
    """The places of the images of prompts."""
    return [list(map(int, each.get(PLACES) or ())) for each in examples]  # type: ignore[call-overload]


def prompt_cache(
    model: "PreTrainedModel", ids_BP: "Tensor", mask_BP: "Tensor", position_ids_BP: "Tensor | None" = None
) -> "Cache | None":
    """Keys and values of all tokens of the prompts except the last.

    Args:
        ids_BP: padded on the left; equal prompts side by side.
        position_ids_BP: None: those that the model counts, padding included.

    Returns:
        None: prompts have no such groups of one size, or the layers are not known to be plain causal attention; or
            they are divided over workers, whose prompts differ in this.
    """
    if ids_BP.shape[1] < 2 or not _is_plain(model) or is_divided(model):
        return None
    prompts = itertools.groupby(ids_BP.masked_fill(mask_BP == 0, -1).tolist())
    size = math.gcd(*(len(list(equal)) for _, equal in prompts))
    if size == 1:
        return None
    positions = {} if position_ids_BP is None else {"position_ids": position_ids_BP[::size, :-1]}
    cache: Cache = model.base_model(
        input_ids=ids_BP[::size, :-1], attention_mask=mask_BP[::size, :-1], use_cache=True, **positions
    ).cache
    cache.batch_repeat_interleave(size)
    return cache


def read_prompts_once(model: "PreTrainedModel | PeftModel") -> None:
    """Replaces the forward that computes log-probabilities (``add_fused_lm_head``), not that of generation.

    Only where each row of a prompt computes the same: without noise of its own. A model that recomputes its
    activations has no cache, and reads whole rows.
    """
    base = plain(model)
    whole = base.forward

    @functools.wraps(whole)
    def forward(*args: object, **inputs: object) -> object:
        tensors = {name: each for name, each in inputs.items() if isinstance(each, torch.Tensor)}
        recomputes = base.training and base.is_activation_checkpointing
        if not inputs.get("fused_lm_head") or tensors.keys() != _FUSED or recomputes:
            return whole(*args, **inputs)
        ids_BT, mask_BT, labels_BT = tensors["input_ids"], tensors["attention_mask"], tensors["labels"]
        length = int((labels_BT == -100).all(0).long().cumprod(0).sum())  # no row trains a token of the prompts
        some = length < labels_BT.shape[1]  # else each completion is masked, and the end of the prompts is unknown
        cache = prompt_cache(base, ids_BT[:, :length], mask_BT[:, :length]) if some else None
        if cache is None:
            return whole(*args, **inputs)
        last = slice(length - 1, None)
        read = {"input_ids": ids_BT[:, last], "labels": labels_BT[:, last], "cache": cache}
        return whole(*args, **{**inputs, **read})

    base.forward = forward


def number_real_tokens(model: "PreTrainedModel | PeftModel") -> None:
    """Numbers positions from the first token after the padding, in a model that reads their numbers.

    Trainers of TRL pad prompts on the left and pass no positions, so that such a model would read a prompt at other
    positions than those it was sampled at.
    """
    backbone, architecture = plain(model).base_model, model.config.get_text_config().model_type
    if architecture not in NUMBERED or "position_ids" not in inspect.signature(backbone.forward).parameters:
        return  # its positions are relative, or it derives them from the mask or the tokens

    def numbered(
        _backbone: torch.nn.Module, args: tuple[object, ...], kwargs: "dict[str, Tensor | None]"
    ) -> "tuple[tuple[object, ...], dict[str, Tensor | None]]":
        mask = kwargs.get("attention_mask")
        if mask is None or mask.dim() != 2 or kwargs.get("position_ids") is not None:
            return args, kwargs
        return args, {**kwargs, "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}

    backbone.register_forward_pre_hook(numbered, with_kwargs=True)


class _Whole(LogitsProcessor):
    """Keeps the scores of a step as the model gave them: before the settings of sampling change and mask them."""

    def __call__(self, input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        self.scores_BV = scores
        return scores


class _Draw(LogitsProcessor):
    """Adds Gumbel noise, so that the largest score is a sample of the softmax.

    Each row has a generator of its own: other rows, and how many there are, do not change its noise.

    Args:
        whole: keeps the scores whose log-probabilities are collected; None: none are.
        temperature: of these log-probabilities.

    Attributes:
        logps: of the tokens (B) of each step.
    """

    def __init__(
        self, seeds: Sequence[int], device: torch.device, whole: _Whole | None = None, temperature: float = 1.0
    ) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.whole, self.temperature = whole, temperature
        self.logps: list[Tensor] = []

    def __call__(self, input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        noise_BV = torch.empty_like(scores, dtype=torch.float32)
        self.fill(noise_BV)
        drawn_BV = scores.float() - noise_BV.clamp_(min=torch.finfo(torch.float32).tiny).log_()
        if self.whole is not None:  # ``generate`` takes the same maximum
            self.logps.append(token_logps(self.whole.scores_BV, drawn_BV.argmax(-1), self.temperature))
        return drawn_BV

    def fill(self, noise_BV: "Tensor") -> None:
        """Draws the noise of the next token, before its logarithm."""
        for noise_V, generator in zip(noise_BV, self.generators, strict=True):
            noise_V.exponential_(generator=generator)


class _RepetitionPenalty(RepetitionPenaltyLogitsProcessor):
    """transformers' penalty without the padding before a prompt, whose token may be the one that ends completions."""

    def __init__(self, penalty: float, mask_BP: "Tensor") -> None:
        super().__init__(float(penalty))
        self.is_padding_BP = mask_BP == 0

    def __call__(self, input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        length = self.is_padding_BP.shape[1]
        last_B1 = input_ids[:, length - 1 : length]  # of the prompt, so that no other token gets the penalty
        prompts_BP = torch.where(self.is_padding_BP, last_B1, input_ids[:, :length])
        found: Tensor = super().__call__(torch.cat([prompts_BP, input_ids[:, length:]], dim=1), scores)
        return found


def _warpers(sampling: Sampling, mask_BP: "Tensor") -> list[LogitsProcessor]:
    """The logits processors of transformers, in its order."""
    found: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        found.append(_RepetitionPenalty(sampling.repetition_penalty, mask_BP))
    if sampling.temperature != 1:
        found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p != 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


def _ended(ids: list[int], stop_tokens: Sequence[int]) -> list[int]:
    end = next((index for index, each in enumerate(ids) if each in stop_tokens), len(ids))
    return ids[: end + 1]


def decodes(model: "PreTrainedModel") -> bool:
    """Whether its layers are known to be plain causal attention, on one GPU as a whole, and not in few bits."""
    on_gpu = model.device.type == "cuda" and _is_plain(model) and not is_quantized(model)
    return on_gpu and not is_divided(model) and not scales_by_length(model)


def _is_plain(model: "PreTrainedModel") -> bool:
    """Whether its layers are known to be plain causal attention, whose positions are those of no earlier images."""
    return is_padding_free(model) and not hasattr(model.base_model, "rope_deltas")


@torch.no_grad()
def decode(
    model: "PreTrainedModel", ids_BP: "Tensor", mask_BP: "Tensor", cache: Cache | None, *, max_new_tokens: int,
    pad_token_id: int, stop_tokens: Sequence[int], warpers: "Sequence[LogitsProcessor]" = (), draw: Draw | None = None,
    temperature: float = 1.0,
) -> tuple["Tensor", "Tensor"]:  # fmt: skip
    """Samples after prompts of at least two tokens what ``generate`` gives for the same noise.

    Args:
        model: in evaluation mode, under autocast where that is used.
        ids_BP: padded on the left.
        cache: of all prompt tokens but the last; None: it is computed.
        warpers: of the logits; they must not read the tokens.
        draw: None: the most likely token is taken.
        temperature: of the log-probabilities.

    Returns:
        The tokens, and their log-probabilities under the softmax over all tokens: (B, N) each.
    """
    positions_BP = (mask_BP.cumsum(1) - 1).clamp(min=0)
    if cache is None:
        cache = model.base_model(
            input_ids=ids_BP[:, :-1], attention_mask=mask_BP[:, :-1], position_ids=positions_BP[:, :-1],
            cache=DynamicCache(), use_cache=True,
        ).cache  # fmt: skip
    state = _State(model, ids_BP, mask_BP, positions_BP, cache, max_new_tokens, is_noisy=draw is not None)
    stops = torch.tensor([*stop_tokens], device=model.device)

    def step() -> None:
        logits_BV = model.get_output_embeddings()(state.hidden(model)).float()
        whole_BV = logits_BV
        for warper in warpers:
            logits_BV = warper(state.tokens_B1, logits_BV)
        # The logarithm of exponential noise is Gumbel noise: the largest sum is a sample of the softmax.
        token_B = (logits_BV - state.noise()).argmax(-1)
        logps_B = token_logps(whole_BV, token_B, temperature)
        state.add(token_B.where(~state.ended_B, pad_token_id), logps_B, stops)

    with _attention(model):
        run = _captured(step, state) if model.device.type == "cuda" else step
        for number in range(max_new_tokens):
            if number % _BLOCK == 0:
                if bool(state.ended_B.all()):
                    break
                if draw:
                    state.draw(draw)
            run()
    return state.found_BN, state.logps_BN


def _captured(step: Callable[[], None], state: "_State") -> Callable[[], None]:
    """The step as a CUDA graph; a first run outside of it loads kernels and casts weights."""
    before = state.copy()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    state.restore(before)
    replay: Callable[[], None] = graph.replay
    return replay


class _State(Cache):
    """Everything that a token changes, in place, and the keys and values of all layers as transformers' cache."""

    def __init__(
        self, model: "PreTrainedModel", ids_BP: "Tensor", mask_BP: "Tensor", positions_BP: "Tensor", cache: Cache,
        max_new_tokens: int, *, is_noisy: bool,
    ) -> None:  # fmt: skip
        (rows, length), device = ids_BP.shape, model.device
        whole = -(-(length + max_new_tokens) // _MULTIPLE) * _MULTIPLE
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else None
        super().__init__(layers=[])
        self.keys, self.values = (
            [_longer(each, whole, dtype) for each in states]
            for states in zip(*((layer.keys, layer.values) for layer in cache.layers), strict=True)
        )
        self.tokens_B1, self.positions_B1 = ids_BP[:, -1:].clone(), positions_BP[:, -1:].clone()
        self.mask_B11L = torch.zeros(rows, 1, 1, whole, dtype=torch.bool, device=device)
        self.mask_B11L[:, 0, 0, :length] = mask_BP.bool()
        self.place = torch.tensor([length - 1], device=device)
        self.number = torch.zeros(1, dtype=torch.long, device=device)
        self.ended_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self.found_BN = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
        self.logps_BN = torch.zeros(rows, max_new_tokens, device=device)
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self._noise = torch.zeros(_BLOCK if is_noisy else 1, rows, vocabulary if is_noisy else 1, device=device)

    def hidden(self, model: "PreTrainedModel") -> "Tensor":
        """The last hidden states (B, H) of the newest tokens."""
        self.mask_B11L.index_fill_(3, self.place, True)
        found: Tensor = model.base_model(
            input_ids=self.tokens_B1, position_ids=self.positions_B1, attention_mask=self.mask_B11L,
            cache=self, use_cache=True,
        ).last_hidden_state[:, -1]  # fmt: skip
        return found

    def update(
        self, key_states: "Tensor", value_states: "Tensor", layer_idx: int, *args: object, **kwargs: object
    ) -> tuple["Tensor", "Tensor"]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.index_copy_(2, self.place, key_states.to(keys.dtype))
        values.index_copy_(2, self.place, value_states.to(values.dtype))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and mask are given

    def draw(self, draw: Draw) -> None:
        for noise_BV in self._noise:
            draw(noise_BV)
        self._noise.clamp_(min=torch.finfo(torch.float32).tiny).log_()

    def noise(self) -> "Tensor":
        return self._noise.index_select(0, self.number % len(self._noise))[0]

    def add(self, token_B: "Tensor", logps_B: "Tensor", stops: "Tensor") -> None:
        """Continues with the next token."""
        self.logps_BN.index_copy_(1, self.number, logps_B.unsqueeze(1))
        self.found_BN.index_copy_(1, self.number, token_B.unsqueeze(1))
        self.ended_B.logical_or_((token_B.unsqueeze(1) == stops).any(1))
        self.tokens_B1.copy_(token_B.unsqueeze(1))
        for each in (self.positions_B1, self.number, self.place):
            each.add_(1)

    @property
    def _small(self) -> list["Tensor"]:
        return [
            self.tokens_B1, self.positions_B1, self.mask_B11L, self.place, self.number, self.ended_B, self.found_BN
        ]  # fmt: skip

    def copy(self) -> list["Tensor"]:
        return [each.clone() for each in self._small]

    def restore(self, before: list["Tensor"]) -> None:
        for each, saved in zip(self._small, before, strict=True):
            each.copy_(saved)


def _longer(states: "Tensor", length: int, dtype: torch.dtype | None) -> "Tensor":
    """Keys or values (B, heads, P - 1, d) in a buffer for L tokens."""
    rows, heads, known, size = states.shape
    whole = torch.zeros(rows, heads, length, size, dtype=dtype or states.dtype, device=states.device)
    whole[:, :, :known] = states
    return whole


def _attend(
    module: torch.nn.Module, query: "Tensor", key: "Tensor", value: "Tensor", attention_mask: "Tensor",
    scaling: float | None = None, **kwargs: object,
) -> tuple["Tensor", None]:  # fmt: skip
    """Attention of one new token; a group's query heads stand in for positions, so that no key is repeated."""
    rows, heads, _, size = query.shape
    query = query.view(rows, key.shape[1], heads // key.shape[1], size).to(value.dtype)
    found = F.scaled_dot_product_attention(query, key.to(value.dtype), value, attention_mask, scale=scaling)
    return found.reshape(rows, 1, heads, size), None


@contextmanager
def _attention(model: "PreTrainedModel") -> "Iterator[None]":
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    config = model.config.get_text_config()
    before = config._attn_implementation
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)

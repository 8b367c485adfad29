"""TRL's trainers that generate, with the completions and rewards of ``Rollouts``.

TRL draws noise from a worker's single generator, so that completions depend on the workers and on earlier draws. It
reloads the reference from a path, ignores a reward that is not a number, shuffles completions, and loses them
between the steps of a generation when a training resumes. These trainers do none of this.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal, cast
from unittest import mock

import torch
from accelerate.utils import DistributedType, send_to_device
from torch.nn.utils.rnn import pad_sequence
from trl import DistillationConfig, DistillationTrainer, GRPOTrainer, RLOOTrainer
from trl.generation import vllm_generation
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import add_fused_lm_head, nanstd, split_tensor_dict, use_adapter

from lineage.errors import ConfigError
from tasks.data.kinds import PLACES
from tasks.train.generation.generating import Generating, Sampling
from tasks.train.generation.one_policy import (
    COMPARED_ROWS,
    OnePolicy,
    Sampled,
    Weights,
    digest_of,
    is_noisy,
    token_logps,
    version_metrics,
    weights_of,
)
from tasks.train.generation.rollouts import (
    Rollouts,
    images_of,
    number_real_tokens,
    read_prompts_once,
    sample,
    seeds_of,
    warn_if_all_truncated,
)
from tasks.train.kernels.machine import plain
from tasks.train.kernels.padding_free import has_own_head, logits
from tasks.train.models.adapted import REFERENCE
from tasks.train.sharding import autocast, is_divided, through

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, Trainer

    from tasks.context import TrainContext
    from tasks.model.vision import Vision
    from tasks.train.generation.generating import Completing
    from tasks.train.run import TrainingRun

Scale = Literal["group", "batch", "none", "normalize"]

logger = logging.getLogger(__name__)

SAMPLER_LOGPS = "sampler_logps"  # of a batch: (B, C)
_COMPARED_TOKENS = 64  # whose logits are there at once
_EPSILON = 1e-4  # of a standard deviation, as in TRL
# Metrics of TRL that are means over the tokens of a micro batch; the latter where ratios are of tokens.
_OF_TOKENS = ("kl", "entropy")
_OF_RATIOS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def generating_trainer(
    run: "TrainingRun", trainer_class: type, config_class: type, *, scale: Scale, **own: object
) -> "Trainer":
    """Builds a trainer of TRL that generates.

    Args:
        trainer_class: GRPO's or RLOO's, or a subclass of one.
        scale: of advantages: see ``scaled``; TRL scales none.
        own: as for ``run.trl``; ``kl_beta`` is the weight of the KL.
    """
    method, rollouts = run.method, Rollouts(run)
    assert isinstance(method, Generating)
    sampling = method.sampling
    shared: dict[str, object] = {
        "num_generations": method.num_generations,
        "num_iterations": method.steps_per_generation,
        "max_completion_length": method.max_completion_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "shuffle_dataset": False,  # the rows are in the order of training
        "reward_funcs": [_named(name) for name in rollouts.names],
        "reward_weights": rollouts.weights,
        "use_vllm": method.vllm is not None,
        "vllm_mode": method.vllm or "colocate",
        # For vLLM. The temperature too: that above is the one of the log-probabilities, 1 in online DPO.
        "generation_kwargs": (
            {"stop_token_ids": rollouts.stop_tokens, "temperature": sampling.temperature} if method.vllm else None
        ),
        "proof": run.start_proof() if method.has_reference else None,
    }
    if share := run.ctx.resources.vllm_gpu_memory_utilization:
        shared["vllm_gpu_memory_utilization"] = share
    if issubclass(trainer_class, GRPOTrainer):
        shared["scale_rewards"] = "none"
    joined = type(trainer_class.__name__, (WithRollouts, trainer_class), {})
    return run.trl(joined, config_class, rollouts=rollouts, scale=scale, **{**shared, **own})


def scaled(advantages_GN: "Tensor", rewards_GN: "Tensor", scale: Scale) -> "Tensor":
    """Advantages of G groups, divided by a standard deviation.

    Args:
        advantages_GN: the distances of rewards from the baselines of their groups.
        scale: ``group``, ``batch``: that of the rewards of a group, or of all; ``normalize``: that of all advantages,
            less their mean.
    """
    if scale == "group":
        return advantages_GN / (nanstd(rewards_GN, dim=1).unsqueeze(1) + _EPSILON)
    if scale == "batch":
        return advantages_GN / (nanstd(rewards_GN) + _EPSILON)
    if scale == "normalize":
        return (advantages_GN - advantages_GN.mean()) / (nanstd(advantages_GN) + _EPSILON)
    return advantages_GN


def _named(name: str) -> Callable[..., list[float]]:
    """Stands for a reward in TRL's list of them; ``Rollouts`` scores."""

    def reward(**columns: object) -> list[float]:
        raise NotImplementedError

    reward.__name__ = name
    return reward


@contextmanager
def _vllm_engine(is_eager: bool) -> Iterator[None]:
    """vLLM starts without CUDA graphs where ``is_eager``, for which TRL has no argument."""
    if not is_eager:
        yield
        return
    with mock.patch.object(vllm_generation, "LLM", partial(vllm_generation.LLM, enforce_eager=True)):
        yield


class WithRollouts(_BaseTrainer):
    """A base class in front of a trainer of TRL that generates.

    Attributes:
        metric_weights: metric -> the weight of each of its values of the step, which are of one micro batch each.
        kl_in_loss: the KL to the reference is a term of the loss, beside the advantages.
        has_signal: something in the completions changes the policy; without, a step changes no weight.
        has_moved: a step has changed the policy, so that it may differ from its reference.
    """

    def __init__(
        self, *args: object, rollouts: "Rollouts", kl_beta: float, scale: Scale,
        ref_model: "PreTrainedModel | None" = None, proof: "Callable[[Tensor], None] | None" = None, **kwargs: object,
    ) -> None:  # fmt: skip
        kwargs["args"].beta = 0.0  # type: ignore[attr-defined]  # else it would load a reference of its own
        with _vllm_engine(rollouts.ctx.resources.vllm_enforce_eager):
            super().__init__(*args, **kwargs)
        self.rollouts, self.beta, self.ref_model, self.proof = rollouts, kl_beta, ref_model, proof
        self.scale, self.has_signal, self.has_moved = scale, True, False
        self.kl_in_loss = bool(kl_beta) and not isinstance(self, RLOOTrainer | OnlineDPOTrainer)
        self._plain_backward, self.accelerator.backward = self.accelerator.backward, self._backward
        self.metric_weights: dict[str, list[Tensor]] = defaultdict(list)  # read when they are logged
        number_real_tokens(self.model)
        method = rollouts.method
        if not (method.neftune_alpha or (method.adapter and method.adapter.dropout)):  # noise of each row
            read_prompts_once(self.model)
        if ref_model is not None:
            add_fused_lm_head(ref_model, temperature=self.temperature)
            number_real_tokens(ref_model)
            read_prompts_once(ref_model)
        self._buffered: list[dict[str, Tensor]] = []
        self._of_generation: dict[str, list[float]] = {}
        self._check = SamplerCheck(self, rollouts.method, rollouts.ctx, self.temperature)
        rollouts.logp_temperature = self.temperature
        if self.use_vllm:
            self._check.watch(self.vllm_generation)

    def _prepare_inputs(self, examples: list[dict[str, object]]) -> "dict[str, Tensor]":
        """The completions of a micro batch, in the order of the batch; the first one of a generation generates all."""
        number, accumulation = self._step % self.args.steps_per_generation, self.args.steps_per_generation
        if number == 0 and (self.state.global_step % self.num_iterations == 0 or not self._buffered):
            generated = self._generate_and_score_completions(examples)
            if self.state.global_step == 0 and self.proof is not None:
                self._prove(self.proof, split_tensor_dict(generated, accumulation)[0])
            self._buffered = split_tensor_dict(generated, accumulation)
            self._of_generation = {name: [*values] for name, values in self._metrics["train"].items()}
        found: dict[str, Tensor] = self._buffered[number]
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> object:
        """Also reports the share of equal rewards: TRL's is that of the whole batch with ``scale_rewards=batch``, and
        of rewards less the KL in RLOO. Rounding gives the completions of a group with equal rewards no advantage: a
        mean of 0.3 in fp32 is not 0.3, and Adam turns any gradient into a full step."""
        self._examples, self._images = inputs, images_of(inputs)
        found: dict[str, Tensor] = super()._generate_and_score_completions(inputs)
        if self.rollouts.run.vision:
            places = [torch.tensor(each, dtype=torch.long) for each in self._images]
            found[PLACES] = pad_sequence(places, batch_first=True, padding_value=-1).to(found["completion_ids"].device)
        rollouts, rewards_NK, metrics = self.rollouts, self._rewards_NK, self._metrics["train"]
        plain_GN = rollouts.gathered(found["advantages"]).view(-1, self.num_generations)
        advantages_GN = scaled(plain_GN, rollouts.total(rewards_NK).view_as(plain_GN), self.scale)
        advantages_GN = advantages_GN.masked_fill(rollouts.is_rounding(plain_GN, rewards_NK).unsqueeze(1), 0.0)
        first = self.accelerator.process_index * len(found["advantages"])
        found["advantages"] = advantages_GN.flatten()[first : first + len(found["advantages"])]
        has_loss_N = rollouts.gathered(found["completion_mask"].any(1).float()) > 0
        differs = self.kl_in_loss and self.has_moved
        self.has_signal = bool((has_loss_N & ((advantages_GN.flatten() != 0) | differs)).any())
        metrics["frac_reward_zero_std"][-1] = float(rollouts.equal_groups(rewards_NK).float().mean())
        for name, value in version_metrics(rollouts.scored_by).items():
            metrics[name].append(value)
        metrics["advantages/max"].append(float(advantages_GN.max()))
        metrics["advantages/min"].append(float(advantages_GN.min()))
        found[SAMPLER_LOGPS] = self._check.logps(found["completion_ids"])
        return found

    def _backward(self, loss: "Tensor", **kwargs: object) -> None:
        """The backward pass of a step with a signal; without, neither momentum nor weight decay change a weight."""
        self.has_moved |= self.has_signal
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.has_signal:
            self._plain_backward(loss, **kwargs)
        elif is_deepspeed or self.accelerator.scaler is not None:  # these count each step; the schedule sets its rate
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
            self._plain_backward(loss * 0.0, **kwargs)
        elif is_divided(self.model):
            plain(self.model).reset_iter_state()  # its forward has no backward

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: object, **kwargs: object) -> object:
        step, rollouts = self.state.global_step, self.rollouts
        if self.use_vllm:
            self._check.sampled = Sampled(self.temperature)
            found = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        else:
            with self.accelerator.autocast(), autocast(self.args):
                completions = rollouts.generate(self.model, self._examples, step)
            self._check.sampled = rollouts.sampled
            found = completions if isinstance(self, RLOOTrainer) else (completions, None)
        self._check.require_same_weights(step)
        rollouts.sampled_by = self._check.policy.weights
        return found

    def _calculate_rewards(
        self, inputs: object, prompts: object, completions: object, completion_ids: Sequence[Sequence[int]]
    ) -> "Tensor":
        step = self.state.global_step
        rewards_BK = self.rollouts.score(step, self._examples, completion_ids)
        rewards_NK: Tensor = self.rollouts.gathered(rewards_BK)
        self._rewards_NK = rewards_NK
        self.rollouts.watch(step, rewards_NK, completion_ids)
        self.rollouts.keep(step, self._examples, completion_ids, rewards_BK)
        return rewards_NK

    def _compute_loss(self, model: "PreTrainedModel", inputs: "Mapping[str, Tensor]") -> object:
        self._images = _images_in(inputs)
        num_tokens = self.accelerator.reduce(inputs["completion_mask"].sum().float(), "sum")
        of_ratios = _OF_RATIOS if getattr(self, "importance_sampling_level", None) == "token" else ()
        for name in (*_OF_TOKENS, *of_ratios):
            self.metric_weights[name].append(num_tokens)
        with self._check.comparing(inputs) as compares:
            loss = super()._compute_loss(model, inputs)
        if compares and (self._step + 1) % self.current_gradient_accumulation_steps == 0:
            found = self._check.policy.require(self.state.global_step)
            self._metrics["train"] |= {name: [value] for name, value in found.items()}
            self._of_generation |= {name: [value] for name, value in found.items()}
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: object, *args: object, **kwargs: object
    ) -> "tuple[Tensor, Tensor | None, Tensor | None]":
        vision = self.rollouts.run.vision
        seeing = _Seeing(cast("Callable[..., object]", model), vision, self._images) if vision else model
        found: tuple[Tensor, Tensor | None, Tensor | None] = super()._get_per_token_logps_and_entropies(
            seeing, *args, **kwargs
        )
        self._check.trainer_BC = found[0].detach()
        return found

    def measure(self, batch: "Mapping[str, Tensor]") -> None:
        """Computes the policy's log-probabilities of completions, for ``SamplerCheck``."""
        self._images = _images_in(batch)
        self._get_per_token_logps_and_entropies(self.model, *_whole(batch))

    def _prove(self, proof: "Callable[[Tensor], None]", batch: "Mapping[str, Tensor]") -> None:
        """Requires that policy and reference agree on the first micro batch."""
        arguments, self._images = _whole(batch), _images_in(batch)
        self.model.eval()
        with torch.no_grad():
            policy_BC, *_ = self._get_per_token_logps_and_entropies(self.model, *arguments)
            if self.ref_model is not None:
                reference_BC, *_ = self._get_per_token_logps_and_entropies(self.ref_model, *arguments)
            else:
                name = REFERENCE if REFERENCE in self.model.peft_config else None
                with use_adapter(self.model, adapter_name=name):
                    reference_BC, *_ = self._get_per_token_logps_and_entropies(self.model, *arguments)
        self.model.train()
        proof(((policy_BC - reference_BC) * batch["completion_mask"]).sum(1))

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Logs at each step the metrics of its generation; a metric for which no token has a value is 0.

        TRL averages the means of micro batches, in which one without a token counts as much as one of many.
        """
        metrics = self._metrics["train"]
        for name, of_batches in self.metric_weights.items():
            weights = torch.stack(of_batches).tolist()
            values, total = metrics.get(name, []), math.fsum(weights)
            if len(values) == len(weights) and total:
                values[:] = [math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total]
        self.metric_weights.clear()
        for name, values in self._of_generation.items():
            metrics.setdefault(name, [*values])
        metrics.pop("step_time", None)  # of the clock
        for values in metrics.values():
            values[:] = [0.0 if math.isnan(value) else value for value in values]
        super().log(logs, *args, **kwargs)

    def own_state(self) -> "Mapping[str, object]":
        """For checkpoints: what this worker generated and has not used."""
        reused = self.state.global_step % self.num_iterations != 0
        return {
            "rollouts": self.rollouts.state_dict(),
            "buffered": self._buffered if reused else [],
            "of_generation": self._of_generation if reused else {},
            "has_signal": self.has_signal,
            "has_moved": self.has_moved,
        }

    def load_own_state(self, state: "Mapping[str, object]", *, same: bool) -> None:
        self.rollouts.load_state_dict(cast("Mapping[str, object]", state["rollouts"]))
        if same:
            self._buffered = send_to_device(state["buffered"], self.args.device)
            self._of_generation = cast("dict[str, list[float]]", state["of_generation"])
        self.has_signal, self.has_moved = bool(state["has_signal"]), bool(state["has_moved"])


def _whole(batch: "Mapping[str, Tensor]") -> "tuple[Tensor, Tensor, int]":
    """Tokens and mask of prompts with their completions, and the columns of these."""
    ids_BT, mask_BT = (torch.cat([batch[f"prompt_{each}"], batch[f"completion_{each}"]], 1) for each in ("ids", "mask"))
    return ids_BT, mask_BT, batch["completion_ids"].size(1)


def _images_in(batch: "Mapping[str, Tensor]") -> list[list[int]]:
    """The places of the images of each row of a batch."""
    rows = batch[PLACES].tolist() if PLACES in batch else []
    return [[place for place in row if place >= 0] for row in rows]


class _Seeing:
    """A model that gets the images of its rows, batch by batch in their order."""

    def __init__(self, model: Callable[..., object], vision: "Vision", images: Sequence[Sequence[int]]) -> None:
        self.model, self.vision, self.images = model, vision, list(images)

    def __call__(self, *, input_ids: "Tensor", **inputs: object) -> object:
        images, self.images = self.images[: len(input_ids)], self.images[len(input_ids) :]
        return self.model(input_ids=input_ids, **inputs, **self.vision.inputs(images, input_ids))


class SamplerCheck:
    """The comparison of ``OnePolicy`` in a trainer of TRL, whatever engine samples.

    Args:
        temperature: of the trainer's log-probabilities.

    Attributes:
        sampled: what the sampler left of the last generation.
        trainer_BC: the trainer's log-probabilities of the last forward with the policy.
    """

    def __init__(self, trainer: "Trainer", method: "Completing", ctx: "TrainContext", temperature: float) -> None:
        self.trainer, self.policy, self.temperature = trainer, OnePolicy(ctx), temperature
        self.step: int | None = None  # of the last generation
        self.trainer_BC: Tensor | None = None
        self.sampled = Sampled(temperature)
        self._is_noisy: bool | None = None
        self._engine: object = None
        self._arrived: tuple[str, str | None] | None = None  # digests after a sync: the engine's, the trainer's
        sampling = method.sampling
        masks = {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        default = Sampling()
        self._changed = [f"{name}={value}" for name, value in masks.items() if value != getattr(default, name)]
        if sampling.temperature != temperature:
            self._changed.append(f"temperature={sampling.temperature}")

    def watch(self, engine: object) -> None:
        """Reads the log-probabilities of vLLM's tokens, and whether weights that it is sent arrive in it."""
        self._engine = engine
        if getattr(engine, "logprobs", None) is None:  # RLOO asks for none
            engine.logprobs = 0  # type: ignore[attr-defined]
        generate, sync = engine.generate, engine.sync_weights  # type: ignore[attr-defined]
        if self._changed:
            logger.warning(
                "sampler=unproven: vLLM's log-probabilities are those after %s, which the trainer's are not; its "
                "weights are still compared by step", ", ".join(self._changed),
            )  # fmt: skip

        def generated(*args: object, **kwargs: object) -> object:
            found = generate(*args, **kwargs)
            rows = [] if self._changed or found[2] is None else found[2]
            self.sampled.logps = [[math.nan if each[0] is None else each[0] for each in row] for row in rows]
            return found

        def synced() -> None:
            sync()
            self._require_arrival(engine)

        engine.generate, engine.sync_weights = generated, synced  # type: ignore[attr-defined]

    def _require_arrival(self, engine: object) -> None:
        """Requires that the weights in the engine's memory, where it is in this process, change with the trainer's."""
        weights = _engine_weights(engine)
        if weights is None:
            return
        found, before = (digest_of(weights), weights_of(self.trainer.model).digest), self._arrived
        self._arrived = found
        if before is not None and before[0] == found[0] and before[1] != found[1]:
            self.policy.refuse(
                self.trainer.state.global_step, "the engine was sent new weights, and has those of the sync before"
            )

    def require_same_weights(self, step: int) -> None:
        """Ends a generation, of which ``sampled`` is set.

        Raises:
            PipelineError: the weights that sampled are not the trainer's.
        """
        self.step = step
        if self._engine is not None:
            self.sampled.weights = Weights(digest=None, step=self.trainer._last_loaded_step)
        self.policy.sampled(step, self.sampled, self.trainer.model)

    def logps(self, completion_ids_BC: "Tensor") -> "Tensor":
        """The sampler's log-probabilities (B, C) of the last generation; nan: unknown."""
        if not self.sampled.logps:
            return torch.full(completion_ids_BC.shape, math.nan, device=completion_ids_BC.device)
        return self.sampled.padded(completion_ids_BC.shape[1], completion_ids_BC.device)

    @contextmanager
    def comparing(self, inputs: "Mapping[str, Tensor]") -> "Iterator[bool]":
        """Around the loss of a micro batch; whether the weights are still those that sampled it, so that it compares.

        A model with noise gets a forward of its own, of few rows.
        """
        compares = self.trainer.state.global_step == self.step and SAMPLER_LOGPS in inputs
        if compares and self._is_noisy is None:
            self._is_noisy = is_noisy(self.trainer.model)
        yield compares
        rows, compared = slice(None), compares
        if compares and self._is_noisy:
            rows = slice(COMPARED_ROWS)
            compared = not self.policy.is_begun  # once in a step
            if compared:
                self.trainer.model.eval()
                with torch.no_grad():
                    self.trainer.measure({name: each[rows] for name, each in inputs.items() if each.dim()})
                self.trainer.model.train()
        if compared:
            assert self.trainer_BC is not None
            mask_BC, sampler_BC = inputs["completion_mask"][rows], inputs[SAMPLER_LOGPS][rows]
            size = len(self.trainer_BC)
            self.policy.compare(sampler_BC[:size], self.trainer_BC, mask_BC[:size])


def _engine_weights(engine: object) -> "Mapping[str, Tensor] | None":
    """The weights in the memory of vLLM in this process; None: it is elsewhere."""
    found = engine
    for name in ("llm", "llm_engine", "model_executor", "driver_worker", "model_runner", "model"):
        found = getattr(found, name, None)
    return dict(found.named_parameters()) if isinstance(found, torch.nn.Module) else None


class OnlineDPOTrainer(GRPOTrainer):
    """The loss of DPO on the best and the worst completion of each prompt.

    TRL's trainer of this name generates again for each micro batch, and renders the prompts itself. Shapes: G prompts.
    """

    metric_weights: "dict[str, list[Tensor]]"  # of ``WithRollouts``

    def __init__(self, *args: object, pair_loss: str, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.pair_loss = pair_loss

    def _compute_loss(self, model: "PreTrainedModel", inputs: "Mapping[str, Tensor]") -> "Tensor":
        completion_mask = inputs["completion_mask"]
        policy_BC, entropy_BC, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            completion_mask.size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )
        ratios_B = ((policy_BC - inputs["ref_per_token_logps"]) * completion_mask).sum(1)
        ratios_GN, advantages_GN = (each.view(-1, self.num_generations) for each in (ratios_B, inputs["advantages"]))
        best_G1, worst_G1 = advantages_GN.argmax(1, keepdim=True), advantages_GN.argmin(1, keepdim=True)
        chosen_G, rejected_G = (ratios_GN.gather(1, each).squeeze(1) for each in (best_G1, worst_G1))
        judged_G = (advantages_GN.amax(1) > advantages_GN.amin(1)).float()
        loss = (pair_losses(chosen_G - rejected_G, self.beta, self.pair_loss) * judged_G).mean()
        self._add_metrics(
            {
                "rewards/chosen": self.beta * chosen_G,
                "rewards/rejected": self.beta * rejected_G,
                "rewards/margins": self.beta * (chosen_G - rejected_G),
                "rewards/accuracies": (chosen_G > rejected_G).float(),
            },
            judged_G,
        )
        self._add_metrics({"entropy": entropy_BC, "kl": policy_BC - inputs["ref_per_token_logps"]}, completion_mask)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss
        return loss / self.current_gradient_accumulation_steps

    def _add_metrics(self, values: "Mapping[str, Tensor]", weights: "Tensor") -> None:
        """Means over all workers; 0 where all weights are 0."""
        sums = torch.stack([weights.sum().float(), *((each.detach() * weights).sum() for each in values.values())])
        weight, *totals = self.accelerator.reduce(sums, "sum")
        for name, total in zip(
            values, torch.where(weight > 0, torch.stack(totals) / weight, 0.0).tolist(), strict=True
        ):
            self._metrics["train"][name].append(total)
            if name not in _OF_TOKENS:
                self.metric_weights[name].append(weight)


def pair_losses(log_ratios_G: "Tensor", beta: float, loss: str) -> "Tensor":
    """The loss of pairs, from the chosen log-ratio less the rejected one.

    Source:
        ``sigmoid``: Rafailov et al. 2023, arXiv:2305.18290, eq. 7. ``ipo``: Azar et al. 2024, arXiv:2310.12036, eq. 17.
    """
    if loss == "ipo":
        return (log_ratios_G - 1 / (2 * beta)) ** 2
    return -torch.nn.functional.logsigmoid(beta * log_ratios_G)


class OnPolicyTrainer(DistillationTrainer):
    """TRL's ``DistillationTrainer``, on tokenized prompts, with noise that does not depend on the workers.

    TRL computes the loss without autocast, so that bf16 would train in fp32, and counts padding in the positions.

    Args:
        method: whose sampling it uses.
    """

    def __init__(self, *args: object, method: "Completing", ctx: "TrainContext", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.method, self.ctx = method, ctx
        self._check = SamplerCheck(self, method, ctx, self.temperature)
        redirect = self._forward_redirection
        self._forward_redirection: Callable[..., object] = lambda wrapper, model, compute, *args, **kwargs: (
            through(plain(model), lambda: compute(*args, **kwargs))
            if is_divided(model)
            else redirect(wrapper, model, compute, *args, **kwargs)
        )

    def _generate_single_turn(self, prompt_ids: Sequence[Sequence[int]], *args: object) -> list[list[int]]:
        first = self.ctx.rank * len(prompt_ids)
        seeds = seeds_of(self.method.seed, self.state.global_step, first, len(prompt_ids))
        self._check.sampled = Sampled(self.temperature)
        with self.accelerator.autocast(), autocast(self.args):
            found = sample(
                self.model, [[*ids] for ids in prompt_ids], self.method.sampling, seeds,
                max_new_tokens=self.method.max_completion_length, pad_token_id=self._tokenizer.pad_token_id,
                stop_tokens=self.eos_token_ids, sampled=self._check.sampled,
            )  # fmt: skip
        self._check.require_same_weights(self.state.global_step)
        if self.state.global_step == 0:
            has_no_end = [not ids or ids[-1] not in self.eos_token_ids for ids in found]
            truncated_N = self.accelerator.gather(torch.tensor(has_no_end, device=self.args.device))
            warn_if_all_truncated(truncated_N, self.method)
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> object:
        found = super()._generate_and_score_completions(inputs)
        found[SAMPLER_LOGPS] = self._check.logps(found["completion_ids"])
        return found

    def compute_loss(
        self, model: "PreTrainedModel", inputs: "Mapping[str, Tensor]", *args: object, **kwargs: object
    ) -> object:
        self._completion_ids_BC = inputs["completion_ids"]
        with self._check.comparing(inputs) as compares:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if compares and (self._step + 1) % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"] |= {
                name: [value] for name, value in self._check.policy.require(self.state.global_step).items()
            }
        return loss

    def _compute_loss(self, *args: object) -> object:
        with self.accelerator.autocast():
            return super()._compute_loss(*args)

    def _get_last_hidden_state(self, model: "PreTrainedModel", *args: object, **kwargs: object) -> "Tensor":
        found: Tensor = super()._get_last_hidden_state(model, *args, **kwargs)
        if model is self.accelerator.unwrap_model(self.model):
            self._measure(model, found.detach())
        return found

    def _measure(self, model: "PreTrainedModel", hidden_BCH: "Tensor") -> None:
        """Log-probabilities of the tokens of some completions: its loss needs none."""
        parts, size = [], _COMPARED_TOKENS
        with torch.no_grad(), self.accelerator.autocast():
            for hidden_CH, ids_C in zip(hidden_BCH[:COMPARED_ROWS], self._completion_ids_BC, strict=False):
                found = [
                    token_logps(logits(plain(model), one), two, self.temperature)
                    for one, two in zip(hidden_CH.split(size), ids_C.split(size), strict=True)
                ]
                parts.append(torch.cat(found))
        self._check.trainer_BC = torch.stack(parts)

    def measure(self, batch: "Mapping[str, Tensor]") -> None:
        """As of ``WithRollouts``."""
        self._completion_ids_BC = batch["completion_ids"]
        with self.accelerator.autocast():
            model = self.accelerator.unwrap_model(self.model)
            through(plain(model), lambda: self._get_last_hidden_state(model, *_whole(batch)))

    def log(self, logs: dict[str, float], *args: object) -> None:
        """Omits a duration, which a resume could not reproduce."""
        self._metrics["train"].pop("step_time", None)
        super().log(logs, *args)


def on_policy_trainer(run: "TrainingRun", method: "Completing", **own: object) -> "Trainer":
    """Builds the trainer, with the model in the slot ``teacher``.

    Raises:
        ConfigError: the teacher has logits for fewer tokens than the student, or for others.
    """
    teacher, sampling = run.model("teacher"), method.sampling
    assert teacher is not None
    ours, theirs = (each.config.get_text_config().vocab_size for each in (run.policy.model, teacher))
    if theirs < ours:
        raise ConfigError(
            f"the teacher, {run.inputs['teacher'].name}, has logits for {theirs} tokens and the policy for {ours}: as "
            "many or more are accepted; take another teacher, or distil on rows (conf/stage/distill.yaml), which "
            "leaves out the tokens that one model lacks"
        )
    for name, model in (("policy", run.policy.model), ("teacher", teacher)):
        if has_own_head(model):
            raise ConfigError(
                f"the {name}, {run.inputs[name].name}, makes its logits of more than its last hidden states and the "
                "weights of its head, which this method alone reads; another model is accepted, or distillation on "
                "rows (conf/stage/distill.yaml)"
            )
    if theirs > ours:  # for ids that the tokenizer does not have
        teacher.resize_token_embeddings(ours)
    for model in (run.policy.model, teacher):
        number_real_tokens(model)
    return run.trl(
        OnPolicyTrainer, DistillationConfig, method=method, ctx=run.ctx, teacher_model=teacher, shuffle_dataset=False,
        max_completion_length=method.max_completion_length, temperature=sampling.temperature, **own,
    )  # fmt: skip

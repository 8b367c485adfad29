"""One session: a model in training, and the primitives that change or read it.

The pieces are those of every training: models, adapters, optimizer, schedule, precision, sampling. A session has its
own random state, so that several in one process do not change each other; LoRA sessions share the weights of one base.

Shapes: B rows of a forward pass, T tokens, V vocabulary.
"""

import copy
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from datasets import Dataset

from lineage.errors import ArtifactError, ConfigError
from tasks.data.kinds import PROMPTS
from tasks.data.tokens.token_stats import TokenStats
from tasks.data.tokens.tokenize_rows import TokenizedRows
from tasks.model.merging import golden_texts_for
from tasks.steps import IGNORED, Row, Steps, precision_of, require_workers
from tasks.train.generation.generating import Sampling
from tasks.train.generation.one_policy import Sampled, active_adapters, digest_of, token_logps
from tasks.train.generation.rollouts import sample, seeds_of
from tasks.train.kernels.machine import FIRST_SCALE, deterministic_kernels, plain
from tasks.train.loop.callbacks import seed_worker
from tasks.train.loop.saved_state import Divided, RandomState, random_state, set_random_state
from tasks.train.run import TrainingRun
from tasks.train.sharding import divided_as, gather_again
from tasks.train.steps.losses import ADVANTAGES, LOGPROBS, LOSSES, RANGES, WEIGHTS, Loss
from tasks.train.steps.workers import Optimization, Workers, whole

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from tasks.context import TrainContext
    from tasks.recipe import Input
    from tasks.train.models.load import Policy

STATE_FILE = "session.pt"
_LARGEST_NUMBER = torch.finfo(torch.float32).max
_GROWTH_STEPS = 2000  # with finite gradients, after which the loss scale of fp16 is doubled
_LONGEST = 16  # samples of a call are generated in groups of so many

Bases = dict[tuple[object, ...], "Policy"]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A sampled completion.

    Args:
        tokens: with the stop token.
        logprobs: of each token, under the model's softmax at temperature 1.
        stop_reason: ``stop`` or ``length``.
    """

    tokens: list[int]
    text: str
    logprobs: list[float]
    stop_reason: str


class _Run(TrainingRun):
    """A training whose rows come with each call; of several on one base, the base is loaded once."""

    def __init__(self, method: Steps, policy: "Input", ctx: "TrainContext", bases: Bases | None) -> None:
        super().__init__(method, {"policy": policy}, ctx)
        self._bases = bases

    @functools.cached_property
    def _start(self) -> "Policy":
        """The input policy; its modules are the session's own, its weights those of ``bases``."""
        method, policy = self.method, self.inputs["policy"]
        adapter = method.adapter
        if self._bases is None or not adapter or adapter.changes_the_base or method.adapter_in in ("continue", "stack"):
            return super()._start
        key: tuple[object, ...] = (
            policy.path.resolve(), policy.digest, self._base_dtype, method.quantization, method.precision,
            method.max_length, self.ctx.resources,
        )  # fmt: skip
        if key not in self._bases:
            self._bases[key] = super()._start
        base = self._bases[key]
        base.model.requires_grad_(False)
        shared: dict[int, object] = {id(each): each for each in (*base.model.parameters(), *base.model.buffers())}
        return replace(base, model=copy.deepcopy(base.model, shared))

    @functools.cached_property
    def rows(self) -> TokenizedRows:
        """Texts for the comparison before and after a merge: a session has no rows of a data stage."""
        texts = golden_texts_for(plain(self.policy.model), [self.inputs["policy"].path])
        examples = Dataset.from_list([{"input_ids": [*each]} for each in texts])
        return TokenizedRows(
            kind=PROMPTS, stats=TokenStats(num_examples=len(texts)), examples=examples, outcomes=examples
        )


class Session:
    """A model in training. Calls are made one after the other, by one thread at a time.

    Attributes:
        step_number: optimizer steps so far.
        num_accumulated: backward calls since the last step or ``zero_grad``.
        num_calls: calls of ``generate`` without a seed, from which their seeds are drawn.
        loss_scale: of fp16, by which losses are multiplied, and their gradients divided again.
    """

    def __init__(self, method: Steps, policy: "Input", ctx: "TrainContext", bases: Bases | None = None) -> None:
        require_workers(method, ctx.resources)
        before, self.workers = random_state(), Workers(ctx)
        resources = replace(ctx.resources, micro_batch_size=1)  # a call's rows are of no batch
        ctx = replace(ctx, resources=resources.sharded("none") if self.workers.zero else resources)
        own = replace(method, global_batch_size=ctx.world_size, precision=precision_of(method))
        self.run = _Run(own, policy, ctx, None if self.workers.is_divided else bases)
        self.method, self.ctx = method, ctx
        self.model: PreTrainedModel | PeftModel = self.run.policy.model
        self.tokenizer = self.run.tokenizer
        self.optimization = Optimization(self.run, self.model, self.workers)
        self.step_number = self.num_accumulated = self.num_calls = self._num_finite = 0
        self._scales = method.precision == "fp16"
        self.loss_scale = FIRST_SCALE if self._scales else 1.0
        self._digest: str | None = None
        seed_worker(method.seed, 0, ctx.rank)
        self._random = random_state()
        set_random_state(before)
        self.trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        embeddings = plain(self.model).get_input_embeddings()
        self.vocabulary = int(embeddings.weight.shape[0])

    # --- what reads rows

    def forward(
        self, data: Sequence[Row], loss: str = "cross_entropy", options: Mapping[str, float] | None = None, *,
        logits: bool = False, hidden_states: bool = False,
    ) -> dict[str, object]:  # fmt: skip
        """Log-probabilities of the target tokens and the loss; no gradient, and no dropout.

        Args:
            logits, hidden_states: also those of each token; the hidden states are the last ones.
        """
        more = {name for name, is_wanted in (("logits", logits), ("hidden_states", hidden_states)) if is_wanted}
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self._passes(data, loss, options, more, backward=False)
        finally:
            self.model.train(was_training)

    def backward(
        self, data: Sequence[Row], loss: str = "cross_entropy", options: Mapping[str, float] | None = None, *,
        accumulate: bool = True,
    ) -> dict[str, object]:  # fmt: skip
        """As ``forward``, and adds the loss's gradients to those that are there.

        Args:
            accumulate: False: the gradients take the place of those that are there.

        Returns:
            Also ``grad_norm`` of all gradients so far, and ``overflow``: whether that is non-finite.
        """
        if not accumulate:
            self._checked(data, loss_of(loss, options)[0])  # a call that is refused clears nothing
            self.zero_grad()
        with self._own_random(), self.workers.adding(self.trained, self.optimization, self._scale):
            found = self._passes(data, loss, options, set(), backward=True)
        self.num_accumulated += 1
        norm = _norm(self.workers.norm(self.trained))
        return {**found, **norm, "num_accumulated": self.num_accumulated}

    def _passes(
        self, data: Sequence[Row], loss: str, options: Mapping[str, float] | None, more: set[str], *, backward: bool
    ) -> dict[str, object]:
        row, chosen = loss_of(loss, options)
        rows, own = self._checked(data, row), dict[int, tuple[float, dict[str, list[list[object]]]]]()
        if row.of_call:
            return self._of_call(rows, row, chosen, more, backward=backward)
        with deterministic_kernels(self.ctx.resources.is_deterministic):
            for start, part, factor in self.workers.share(rows, self.method.micro_batch_size, 2 if row.pairs else 1):
                columns = self._columns(part, row)
                outputs = self._outputs(columns["tokens"], "hidden_states" in more)
                logits_BTV = outputs.logits.float()
                logps_BT = token_logps(logits_BTV.flatten(0, 1), columns["target_tokens"].flatten(), 1.0)
                logps_BT = logps_BT.view(columns["tokens"].shape)
                losses = row.compute(logps_BT, columns, chosen).sum()
                if backward:
                    (losses * (factor * self._scale)).backward()
                if not factor:
                    continue
                kept = {"logprobs": logps_BT, "logits": logits_BTV}
                if "hidden_states" in more:
                    kept["hidden_states"] = outputs.hidden_states[-1].float()
                values = {
                    name: [value[: len(each.tokens)].tolist() for each, value in zip(part, kept[name], strict=True)]
                    for name in ("logprobs", *sorted(more))
                }
                own[start] = float(losses.detach()), values
            gather_again(self.model)
        parts = [part for _, part in sorted(item for each in self.workers.gathered(own) for item in each.items())]
        found = {name: [value for _, values in parts for value in values[name]] for name in parts[0][1]}
        total = sum(loss for loss, _ in parts)
        return {"loss": total, "num_tokens": sum(len(each.tokens) for each in rows), **found}

    def _of_call(
        self, rows: Sequence[Row], loss: Loss, options: Mapping[str, float], more: set[str], *, backward: bool
    ) -> dict[str, object]:
        """A loss of all rows of a call: its derivative by each log-probability, without dropout, weighs that token."""
        plain_rows = [replace(each, weights=[1.0] * len(each.tokens)) for each in rows]
        found = self.forward(plain_rows, logits="logits" in more, hidden_states="hidden_states" in more)
        columns, logprobs = self._columns(rows, loss), cast("list[list[float]]", found["logprobs"])
        logps_BT = torch.zeros(columns["tokens"].shape, device=self.run.device)
        for row_T, values in zip(logps_BT, logprobs, strict=True):
            row_T[: len(values)] = torch.tensor(values)
        value = loss.compute(logps_BT.requires_grad_(), columns, options).sum()
        if backward:
            [slopes_BT] = torch.autograd.grad(value, [logps_BT])
            weighted = [
                replace(row, weights=(-slope_T[: len(row.tokens)]).tolist())
                for row, slope_T in zip(rows, slopes_BT, strict=True)
            ]
            found = self._passes(weighted, "cross_entropy", None, set(), backward=True)
        return {**found, "loss": float(value.detach())}

    @property
    def _scale(self) -> float:
        """What losses are multiplied by; of several workers, whose gradients are averaged, each has its share."""
        return self.loss_scale / self.workers.size if self._scales else 1.0

    def _autocast(self) -> AbstractContextManager[object]:
        if self._scales:  # also on CPUs, where transformers' trainer would compute in fp32
            cast_to_half: AbstractContextManager[object] = torch.autocast(self.run.device.type, torch.float16)
            return cast_to_half
        return self.optimization.autocast()

    def _outputs(self, ids_BT: "Tensor", hidden: bool) -> "_Outputs":
        with self._autocast():
            outputs: _Outputs = self.model(input_ids=ids_BT, use_cache=False, output_hidden_states=hidden)
        return outputs

    def _checked(self, data: Sequence[Row], loss: Loss) -> list[Row]:
        """The rows with target tokens, and the columns that the loss reads.

        Raises:
            ConfigError: a row cannot be trained on.
        """
        if not data:
            raise ConfigError("data has no rows; send one or more")
        if loss.pairs and len(data) % 2:
            raise ConfigError(f"data has {len(data)} rows; pairs are accepted: each chosen row, then its rejected one")
        for number, row in enumerate(data):
            self._check_row(f"data[{number}]", row, loss)
        return [each.shifted for each in data]

    def _check_row(self, where: str, row: Row, loss: Loss) -> None:
        self._check_tokens(f"{where}.tokens", row.tokens)
        if row.labels is not None and (row.target_tokens is not None or row.weights is not None):
            raise ConfigError(f"{where}: labels stand in place of target_tokens and weights; leave these out")
        if row.labels is None and row.target_tokens is None:
            raise ConfigError(f"{where}: no target_tokens and no labels; send one of them")
        columns = {name: getattr(row, name) for name in ("target_tokens", "labels", WEIGHTS, LOGPROBS, ADVANTAGES)}
        for name in loss.reads:
            if columns[name] is None and not (name == WEIGHTS and row.labels is not None):
                raise ConfigError(f"{where}.{name} is missing, and this loss reads it; send one value for each token")
        for name, column in columns.items():
            if column is None:
                continue
            if len(column) != len(row.tokens):
                raise ConfigError(
                    f"{where}.{name} has {len(column)} values, and tokens has {len(row.tokens)}; send as many"
                )
            if name in ("target_tokens", "labels"):
                self._check_ids(f"{where}.{name}", [each for each in column if name != "labels" or each != IGNORED])
            elif not all(abs(each) <= _LARGEST_NUMBER for each in column):  # also of no number
                raise ConfigError(f"{where}.{name} has a non-finite number, or one beyond fp32; send finite ones")

    def _check_tokens(self, where: str, tokens: Sequence[int]) -> None:
        if not tokens:
            raise ConfigError(f"{where} is empty; send one token or more")
        if len(tokens) > self.method.max_length:
            raise ConfigError(f"{where} has {len(tokens)} tokens; max_length={self.method.max_length} are accepted")
        self._check_ids(where, tokens)

    def _check_ids(self, where: str, tokens: Sequence[int]) -> None:
        outside = next((each for each in tokens if not 0 <= each < self.vocabulary), None)
        if outside is not None:
            raise ConfigError(f"{where}: {outside} is no token of this model; 0 to {self.vocabulary - 1} are accepted")

    def _columns(self, rows: Sequence[Row], loss: Loss) -> "dict[str, Tensor]":
        """The rows, padded on the right: causal attention needs no mask there."""
        names = ("tokens", "target_tokens", *loss.reads)
        width = max(len(each.tokens) for each in rows)
        found = {}
        for name in names:
            values = [[*getattr(row, name), *[0] * (width - len(row.tokens))] for row in rows]
            dtype = torch.long if name in ("tokens", "target_tokens") else torch.float32
            found[name] = torch.tensor(values, dtype=dtype).to(self.run.device)
        return found

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> dict[str, object]:
        """Log-probability of each token after those before it; None for the first one."""
        if not sequences:
            raise ConfigError("sequences is empty; send one or more")
        for number, tokens in enumerate(sequences):
            self._check_tokens(f"sequences[{number}]", tokens)
        rows = [Row(tokens=[*each], labels=[*each]) for each in sequences]
        found = self.forward(rows)
        values = cast("list[list[float]]", found["logprobs"])
        return {"logprobs": [[None, *each[:-1]] for each in values], "num_tokens": found["num_tokens"]}

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16, num_samples: int = 1, seed: int | None = None,
        temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None,
        stop: str | Sequence[str | int] | None = None,
    ) -> dict[str, object]:  # fmt: skip
        """Samples completions of each prompt.

        Args:
            seed: of the noise; None: drawn from the session's seed and the number of such calls.
            temperature: 0: the most probable token.
            stop: tokens or texts that end a completion, which then has them; None: the model's own stop tokens; an
                empty list: none.
        """
        _check_sampling(max_tokens, num_samples, temperature, top_p, top_k, seed)
        if not prompts:
            raise ConfigError("prompts is empty; send one or more")
        for number, tokens in enumerate(prompts):
            self._check_tokens(f"prompts[{number}]", tokens)
            if len(tokens) + max_tokens > self.method.max_length:
                raise ConfigError(
                    f"prompts[{number}] has {len(tokens)} tokens, and max_tokens={max_tokens}: max_length="
                    f"{self.method.max_length} are accepted in all; send less"
                )
        if seed is None:
            seed, self.num_calls = seeds_of(self.method.seed, self.num_calls, 0, 1)[0], self.num_calls + 1
        texts, stops = self._stops(stop)
        sampling = Sampling(temperature=temperature or 1.0, top_p=top_p, top_k=1 if temperature == 0 else top_k)
        repeated = [list(each) for each in prompts for _ in range(num_samples)]
        seeds, own = seeds_of(seed, 0, 0, len(repeated)), dict[int, list[Completion]]()
        pad = self.tokenizer.pad_token_id
        with deterministic_kernels(self.ctx.resources.is_deterministic), self._autocast():
            for start, part in self.workers.share_prompts(repeated, _LONGEST):
                sampled = _Logps()
                made = sample(
                    self.model, part, sampling, seeds[start : start + len(part)], max_new_tokens=max_tokens,
                    pad_token_id=0 if pad is None else pad, stop_tokens=stops, sampled=sampled,
                )  # fmt: skip
                own[start] = list(map(functools.partial(self._completion, texts, stops), made, sampled.logps))
        parts = {start: part for each in self.workers.gathered(own) for start, part in each.items()}
        found = [each for start in sorted(parts) for each in parts[start]]
        groups = [found[start : start + num_samples] for start in range(0, len(found), num_samples)]
        num_tokens = sum(map(len, repeated)) + sum(len(each.tokens) for each in found)
        completions = [[vars(each) for each in group] for group in groups]
        return {"completions": completions, "seed": seed, "weights": self.digest(), "num_tokens": num_tokens}

    def _stops(self, stop: str | Sequence[str | int] | None) -> tuple[list[str], list[int]]:
        if stop is None:
            own = plain(self.model).generation_config.eos_token_id
            return [], [] if own is None else [own] if isinstance(own, int) else list(own)
        each = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(one, int) or (isinstance(one, str) and one) for one in each):
            raise ConfigError(f"stop={stop}: texts that are not empty, and tokens, are accepted")
        tokens = [one for one in each if isinstance(one, int)]
        if tokens:
            self._check_ids("stop", tokens)
        return [one for one in each if isinstance(one, str)], tokens

    def _completion(
        self, texts: Sequence[str], stops: Sequence[int], tokens: list[int], logps: list[float]
    ) -> Completion:
        """Cut where its text first ends with one of the texts."""
        end = len(tokens) if not texts else next(
            (at for at in range(1, len(tokens) + 1) if self.tokenizer.decode(tokens[:at]).endswith(tuple(texts))), 0
        )  # fmt: skip
        is_cut = bool(texts) and end > 0
        tokens, logps = (tokens[:end], logps[:end]) if is_cut else (tokens, logps)
        reason = "stop" if is_cut or (tokens and tokens[-1] in stops) else "length"
        return Completion(tokens=tokens, text=self.tokenizer.decode(tokens), logprobs=logps, stop_reason=reason)

    # --- what changes the weights

    def step(
        self, *, learning_rate: float | None = None, betas: Sequence[float] | None = None, eps: float | None = None,
        weight_decay: float | None = None, max_grad_norm: float | None = None,
    ) -> dict[str, object]:  # fmt: skip
        """Updates the weights with the gradients, and clears these; with non-finite ones it only clears them.

        Args: settings of this update alone; None: the session's, by its schedule. ``max_grad_norm=0``: no clipping.
        """
        if not self.num_accumulated:
            raise ConfigError("step: there are no gradients; call backward first")
        settings: dict[str, object] = {
            "lr": learning_rate, "betas": betas and tuple(betas), "eps": eps, "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        changed = {name: value for name, value in settings.items() if value is not None}
        for name, value in changed.items():
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(each, int | float) and math.isfinite(each) and each >= 0 for each in numbers):
                raise ConfigError(f"step: {name}={value}; finite numbers of 0 or more are accepted")
        self.optimization.check_betas(betas)
        rate = self.optimization.learning_rate if learning_rate is None else learning_rate
        with self._own_random(), deterministic_kernels(self.ctx.resources.is_deterministic):
            own = self.workers.norm(self.trained) if self.workers.size > 1 else None
            norm = self.optimization.step(own, **changed)
        self._digest = None
        self.zero_grad()
        self.step_number += math.isfinite(norm)
        found = {"step": self.step_number, "learning_rate": rate, **_norm(norm)}
        return {**found, "loss_scale": self._rescaled(is_finite=math.isfinite(norm))} if self._scales else found

    def _rescaled(self, *, is_finite: bool) -> float:
        """The loss scale of the next gradients, as torch's ``GradScaler`` chooses it."""
        self._num_finite = self._num_finite + 1 if is_finite else 0
        if not is_finite:
            self.loss_scale /= 2
        elif self._num_finite == _GROWTH_STEPS:
            self.loss_scale, self._num_finite = 2 * self.loss_scale, 0
        return self.loss_scale

    def zero_grad(self) -> dict[str, object]:
        """Clears the gradients."""
        for each in self.trained.values():
            each.grad = None
        self.num_accumulated = 0
        return {"num_accumulated": 0}

    # --- the state

    def digest(self) -> str:
        """A short digest of the trained weights, computed once after each change."""
        if self._digest is None:
            gather_again(self.model)
            trained = {name: whole(each) for name, each in plain(self.model).named_parameters() if each.requires_grad}
            self._digest = digest_of(cast("Mapping[str, Tensor]", trained), active_adapters(self.model))
        return self._digest

    def save(self, folder: Path) -> dict[str, object]:
        """Writes all that later calls depend on: weights, gradients, optimizer, schedule, loss scale, random state."""
        gradients = {name: each.grad for name, each in self.trained.items() if each.grad is not None}
        random, parts = self.workers.gathered(self._random), [gradients]
        if self.workers.zero == 2:
            parts = self.workers.gathered(gradients)
        state = {
            "weights": whole(self.trained), "optimization": self.optimization.state_dict(),
            "gradients": whole({name: each for part in parts for name, each in part.items()}),
            "random": random if len(random) > 1 else self._random,
            "counts": [self.step_number, self.num_accumulated, self.num_calls],
            **({"scaler": [self.loss_scale, self._num_finite]} if self._scales else {}),
        }  # fmt: skip
        if not self.ctx.rank:
            folder.mkdir(parents=True, exist_ok=True)
            draft = folder / f".{STATE_FILE}.{os.getpid()}"
            with draft.open("wb") as file:
                torch.save(Divided({}, in_one=True).divide(state), file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(folder / STATE_FILE)
        self.workers.gathered(None)  # it is written once each of them returns
        return {"step": self.step_number, "weights": self.digest()}

    def load(self, folder: Path, *, optimizer: bool = True) -> dict[str, object]:
        """Reads what ``save`` wrote.

        Args:
            optimizer: also all that is not the weights; False: the optimizer and the schedule start again.

        Raises:
            ArtifactError: there is no such state.
            ConfigError: it is of a session with other trained weights.
        """
        state = read_saved(folder)
        self._fill(cast("Mapping[str, Tensor]", state["weights"]))
        self.zero_grad()
        self.optimization = Optimization(self.run, self.model, self.workers)
        if optimizer:
            self.optimization.load_state_dict(cast("Mapping[str, object]", state["optimization"]))
            for name, gradient in cast("Mapping[str, Tensor]", state["gradients"]).items():
                if self.workers.zero != 2 or self.optimization.owns(self.trained[name]):
                    self.trained[name].grad = divided_as(gradient.to(self.run.device), self.trained[name])
            self.step_number, self.num_accumulated, self.num_calls = cast("list[int]", state["counts"])
            self._load_random(state["random"])
            if self._scales and "scaler" in state:
                self.loss_scale, self._num_finite = cast("tuple[float, int]", state["scaler"])
        return {"step": self.step_number, "weights": self.digest()}

    def _load_random(self, saved: object) -> None:
        """Each worker's own; of other workers, a new one: dropout then has other noise."""
        states = cast("list[RandomState]", saved if isinstance(saved, list) else [saved])
        if len(states) == self.workers.size:
            self._random = states[self.workers.rank]
            return
        with self._own_random():
            seed_worker(self.method.seed, self.step_number, self.workers.rank)

    @contextmanager
    def weights_of(self, folder: Path) -> Iterator[None]:
        """The model has the weights of a saved state while the block runs."""
        own = {name: each.detach().clone() for name, each in self.trained.items()}
        self._fill(cast("Mapping[str, Tensor]", read_saved(folder)["weights"]))
        try:
            yield
        finally:
            self._fill(own)

    def _fill(self, weights: "Mapping[str, Tensor]") -> None:
        shapes = {name: each.shape for name, each in self.trained.items()}
        if shapes != {name: each.shape for name, each in weights.items()}:
            raise ConfigError(
                f"the state has {len(weights)} trained weights, and this session {len(shapes)} of other names or "
                "shapes; a state of a session with the same model and adapter is accepted"
            )
        self._digest = None
        with torch.no_grad():
            for name, each in self.trained.items():
                each.copy_(divided_as(weights[name], each))
        gather_again(self.model)

    def write_model(
        self, output: Path | None = None, work: Path | None = None, fingerprint: str | None = None
    ) -> dict[str, float]:
        """Writes the model as every training does, into ``output`` or ``ctx.output_dir``; one that FSDP2 divides is
        whole then, and can be trained no further.

        Args:
            fingerprint: of the model that it started from; None: that of the session's.
        """
        own, (policy,) = self.run.ctx, self.run.inputs.values()
        self.run.ctx = replace(own, output_dir=output or own.output_dir, work_dir=work or own.work_dir)
        self.run.inputs = {"policy": replace(policy, fingerprint=fingerprint or policy.fingerprint)}
        return self.run.save()

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        before = random_state()
        set_random_state(self._random)
        try:
            yield
        finally:
            self._random = random_state()
            set_random_state(before)


class _Logps(Sampled):
    """The log-probabilities of a generation; the session itself knows its weights."""

    def by(self, model: "PreTrainedModel | PeftModel") -> None:
        """Reads no weights."""


class _Outputs:
    """Of a causal language model."""

    logits: "Tensor"
    hidden_states: "Sequence[Tensor]"


def read_saved(folder: Path) -> Mapping[str, object]:
    """What ``Session.save`` wrote."""
    if not (folder / STATE_FILE).exists():
        raise ArtifactError(f"{folder}: no state of a session is saved there; save one first")
    found: Mapping[str, object] = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    return found


def loss_of(name: str, options: Mapping[str, float] | None) -> tuple[Loss, dict[str, float]]:
    """A loss, and its options (ConfigError: there is no such loss, or it has no such option)."""
    if name not in LOSSES:
        raise ConfigError(
            f"loss={name}: {', '.join(LOSSES)} are accepted; another one is a function of the log-probabilities, by "
            "forward_backward_custom"
        )
    loss, configured = LOSSES[name], dict(options or {})
    for option, value in configured.items():
        if option not in loss.options:
            raise ConfigError(f"{name} has no option {option}; it has {', '.join(loss.options) or 'none'}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ConfigError(f"{option}={value}: a finite number is accepted")
    chosen = {name: value for name, value in {**loss.options, **configured}.items() if value is not None}
    if missing := sorted(loss.options.keys() - chosen.keys()):
        raise ConfigError(f"{name} needs {missing[0]}; set it in options")
    for option, value in configured.items():
        low, high = RANGES.get(option, (-math.inf, math.inf))
        if not low < value < high:
            ends = f"above {low:g}" if high == math.inf else f"above {low:g} and below {high:g}"
            raise ConfigError(f"{option}={value}: a number {ends} is accepted")
    if chosen.get("clip_low_threshold", -math.inf) > chosen.get("clip_high_threshold", math.inf):
        raise ConfigError(f"{name}: clip_low_threshold is above clip_high_threshold; set it below")
    return loss, chosen


def custom_weights(
    loss: "Callable[[Sequence[Row], list[Tensor]], tuple[Tensor, Mapping[str, float]]]", data: Sequence[Row],
    logprobs: Sequence[Sequence[float]],
) -> tuple[list[Row], float, Mapping[str, float]]:  # fmt: skip
    """Rows for ``cross_entropy`` whose gradients are those of a loss of the caller's own.

    Its derivative by each log-probability, negated, is the weight of that token.

    Args:
        loss: of the rows and the log-probabilities of their target tokens; returns a scalar, and metrics.
        logprobs: of ``forward`` on the rows.
    """
    leaves = [torch.tensor(each, requires_grad=True) for each in logprobs]
    value, metrics = loss(data, leaves)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    weighted = [
        replace(row.shifted, weights=[0.0] * len(row.tokens) if gradient is None else (-gradient).tolist())
        for row, gradient in zip(data, gradients, strict=True)
    ]
    return weighted, float(value.detach()), metrics


def _norm(norm: float) -> dict[str, object]:
    overflow = not math.isfinite(norm)
    return {"grad_norm": None if overflow else norm, "overflow": overflow}


def _check_sampling(
    max_tokens: int, num_samples: int, temperature: float, top_p: float, top_k: int | None, seed: int | None
) -> None:
    refused = {
        f"max_tokens={max_tokens}: 1 or more are accepted": max_tokens < 1,
        f"num_samples={num_samples}: 1 to 1024 are accepted": not 1 <= num_samples <= 1024,
        f"temperature={temperature}: a finite number of 0 or more is accepted": not 0 <= temperature < math.inf,
        f"top_p={top_p}: above 0, up to 1 is accepted": not 0 < top_p <= 1,
        f"seed={seed}: 0 to {2**63 - 1} are accepted": seed is not None and not 0 <= seed < 2**63,
        f"top_k={top_k}: 1 or more is accepted": top_k is not None and top_k < 1,
    }
    if found := next((message for message, is_refused in refused.items() if is_refused), None):
        raise ConfigError(found)

"""The workers of a session: each computes a part of the rows of a call, and all have the same weights after a step.

Losses are sums over the rows of a call, so that gradients are those of one worker up to the order of additions. A saved
state is whole, whatever the workers divide, so that any number of workers reads it.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import distributed

from lineage.errors import ConfigError
from tasks.train.loop import own_loop
from tasks.train.sharding import exchange, zero_stage

if TYPE_CHECKING:
    from torch.nn import Parameter

    from tasks.context import TrainContext
    from tasks.train.run import TrainingRun

Value = TypeVar("Value")


class Workers:
    """One worker's view of all.

    Attributes:
        zero: the stage of ZeRO: 1 divides the optimizer, 2 gradients too.
        is_divided: whether FSDP2 divides weights, so that all workers make as many forward passes.
    """

    def __init__(self, ctx: "TrainContext") -> None:
        self.rank, self.size, self.zero = ctx.rank, ctx.world_size, zero_stage(ctx.resources)
        self.is_divided = not self.zero and ctx.resources.sharding != "none"

    def share(
        self, rows: "Sequence[Value]", most: int, multiple: int = 1
    ) -> Iterator[tuple[int, Sequence[Value], int]]:
        """This worker's parts of a call's rows: where each begins, its rows, and by what its loss is multiplied.

        Args:
            most: rows of a forward pass.
            multiple: what their number is a multiple of.
        """
        each = -(-len(rows) // (self.size * multiple)) * multiple
        size = max(multiple, min(most, each) // multiple * multiple)
        starts = range(0, len(rows), size)
        for number in range(-(-len(starts) // self.size)):
            place = number * self.size + self.rank
            if place < len(starts):
                yield starts[place], rows[starts[place] : starts[place] + size], self.size
            elif self.is_divided:  # the others gather weights in this pass
                yield -1, rows[:size], 0

    def share_prompts(self, prompts: "Sequence[Value]", most: int) -> Iterator[tuple[int, Sequence[Value]]]:
        """This worker's parts of prompts; all of them, where each token takes all workers."""
        if self.is_divided:
            return ((start, prompts[start : start + most]) for start in range(0, len(prompts), most))
        return ((start, part) for start, part, _ in self.share(prompts, most))

    def gathered(self, own: Value) -> list[Value]:
        """What each worker has, on all of them."""
        found = [own] * self.size
        if self.size > 1:
            distributed.all_gather_object(found, own)
        return found

    @contextlib.contextmanager
    def adding(self, trained: "Mapping[str, Parameter]", optimization: "Optimization", scale: float) -> Iterator[None]:
        """Adds the sum of the gradients that the workers compute in the block, over a scale, to those there were."""
        if self.size == 1 and scale == 1:
            yield
            return
        before = {name: each.grad for name, each in trained.items()}
        for each in trained.values():
            each.grad = None
        try:
            yield
            if self.size > 1:
                exchange(trained.values())
        except BaseException:
            for name, each in trained.items():
                each.grad = before[name]
            raise
        for name, each in trained.items():
            if scale != 1 and each.grad is not None:
                each.grad /= scale
            if self.zero == 2 and not optimization.owns(each):
                each.grad = None
            elif (earlier := before[name]) is not None:
                each.grad = earlier if each.grad is None else earlier + each.grad

    def norm(self, trained: "Mapping[str, Parameter]") -> float:
        """Of all gradients."""
        norm = torch.nn.utils.get_total_norm([each.grad for each in trained.values() if each.grad is not None])
        found = float(whole(norm))  # type: ignore[arg-type]
        return math.hypot(*self.gathered(found)) if self.zero == 2 else found


class Optimization(own_loop.Optimization):
    """The optimizer of a session; under ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) each worker updates the
    weights that it owns, and sends them to the others. Weights are not cut, so that an update is that of one worker."""

    def __init__(self, run: "TrainingRun", model: torch.nn.Module, workers: Workers) -> None:
        super().__init__(run, model)
        self._workers, self._groups = workers, self._trainer.optimizer.param_groups
        self._all: list[list[Parameter]] = [list(group["params"]) for group in self._groups]
        weights = [each for group in self._all for each in group]
        loads, self._owner = [0] * workers.size, dict[int, int]()
        for each in sorted(weights, key=lambda each: -each.numel()) if workers.zero else ():
            self._owner[id(each)] = loads.index(min(loads))
            loads[self._owner[id(each)]] += each.numel()
        for group in self._groups:
            group["params"] = list(filter(self.owns, group["params"]))

    def check_betas(self, betas: Sequence[float] | None) -> None:
        """Requires as many decays as the optimizer has, each below 1."""
        known = self._groups[0].get("betas")
        if betas is None or known is None:  # another optimizer has no such setting, which ``step`` refuses
            return
        if len(betas) != len(known) or not all(0 <= each < 1 for each in betas):
            raise ConfigError(f"step: betas={list(betas)}; {len(known)} numbers of 0 or more, below 1, are accepted")

    def owns(self, weight: "Parameter") -> bool:
        """Whether this worker updates a weight."""
        return self._owner.get(id(weight), self._workers.rank) == self._workers.rank

    def step(self, norm: float | None = None, **changed: object) -> float:
        found = super().step(norm, **changed)
        if self._workers.zero and math.isfinite(found):
            for each in (each for group in self._all for each in group):
                distributed.broadcast(each.detach(), self._owner[id(each)])
        return found

    def _places(self) -> dict[int, int]:
        """Number of a weight among all -> its number among this worker's."""
        own = [self.owns(each) for group in self._all for each in group]
        return {place: sum(own[:place]) for place, is_own in enumerate(own) if is_own}

    def state_dict(self) -> Mapping[str, object]:
        """Whole on each worker."""
        found = super().state_dict()
        if not self._workers.zero:
            return cast("Mapping[str, object]", whole(found))
        optimizer = cast("dict[str, dict[int, object]]", found["optimizer"])
        numbers = {own: place for place, own in self._places().items()}
        parts = self._workers.gathered({numbers[own]: values for own, values in optimizer["state"].items()})
        state = {place: values for part in parts for place, values in part.items()}
        places, groups = iter(range(sum(map(len, self._all)))), []
        for group, everything in zip(
            cast("list[dict[str, object]]", optimizer["param_groups"]), self._all, strict=True
        ):
            groups.append({**group, "params": [next(places) for _ in everything]})
        return {**found, "optimizer": {"state": dict(sorted(state.items())), "param_groups": groups}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if self._workers.zero:
            numbers, saved = self._places(), cast("Mapping[str, Mapping[int, object]]", state["optimizer"])
            groups = cast("list[dict[str, list[int]]]", saved["param_groups"])
            own = {
                "state": {numbers[place]: values for place, values in saved["state"].items() if place in numbers},
                "param_groups": [
                    {**each, "params": [numbers[place] for place in each["params"] if place in numbers]}
                    for each in groups
                ],
            }
            state = {**state, "optimizer": own}
        super().load_state_dict(state)


def whole(state: object) -> object:
    """A nested state with each divided tensor whole; all workers call it."""
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(whole, state))
    full = getattr(state, "full_tensor", None)
    return full() if full else state

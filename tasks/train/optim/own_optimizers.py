"""Parameter groups, and optimizers that no package has as a whole, or whose state checkpoints would lose.

A killed training resumes exactly only if ``state_dict`` holds everything that ``step`` reads, in types that
``torch.load`` reads without unpickling code, and if ``load_state_dict`` puts it back. Each class here corrects one that
does not, or joins two.
"""

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from transformers import Trainer

Group = dict[str, object]
State = dict[str, object]

logger = logging.getLogger(__name__)

_MATRIX = 2  # dimensions
_AT_ONCE = 2**26  # weights that are there in fp32 in a step
_HALF = 2**15


def plain_groups(model: nn.Module, decayed: Sequence[str], weight_decay: float) -> list[Group]:
    """The trained parameters, those with weight decay first, as transformers' trainer groups them."""
    return _by_decay(_trained(model), decayed, weight_decay)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _by_decay(trained: Mapping[str, nn.Parameter], decayed: Sequence[str], weight_decay: float) -> list[Group]:
    return [
        {"params": [trained[name] for name in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [trained[name] for name in trained if name not in decayed], "weight_decay": 0.0},
    ]


def linear_weights(model: nn.Module) -> set[str]:
    """Names of the trained matrices of linear layers, but those of the head and of embeddings."""
    heads = {each for each in (_part(model, "get_output_embeddings"), _part(model, "get_input_embeddings")) if each}
    tied = {id(weight) for head in heads for weight in head.parameters()}
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not {"score", "lm_head"} & set(name.split(".")):
            weight = module.weight
            if weight.requires_grad and weight.ndim == _MATRIX and id(weight) not in tied:
                found.add(f"{name}.weight")
    return found


def _part(model: nn.Module, getter: str) -> nn.Module | None:
    with contextlib.suppress(NotImplementedError, AttributeError):
        return cast("nn.Module | None", getattr(model, getter)())
    return None


def split_groups(
    model: nn.Module, decayed: Sequence[str], weight_decay: float, own: Mapping[str, object]
) -> list[Group]:
    """The matrices of linear layers with their own options, then the other parameters as in ``plain_groups``."""
    chosen = linear_weights(model)
    trained = _trained(model)
    first: Group = {"params": [trained[n] for n in trained if n in chosen], "weight_decay": weight_decay, **own}
    others = {name: each for name, each in trained.items() if name not in chosen}
    return [first, *_by_decay(others, decayed, weight_decay)]


class Muon(Optimizer):
    """``torch.optim.Muon`` on the groups marked ``muon``, AdamW on the others, as one optimizer with one state.

    Updates of matrices are scaled to the size of AdamW's, so that one learning rate serves both.
    """

    def __init__(
        self, groups: list[Group], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5,
    ) -> None:  # fmt: skip
        matrices = [group for group in groups if group.get("muon")]
        others = [group for group in groups if not group.get("muon")]
        super().__init__([*matrices, *others], {"lr": lr})
        # Each part reads the same groups; torch's constructor keeps the dictionaries that it is given.
        self.parts: list[Optimizer] = [
            torch.optim.Muon(
                self.param_groups[: len(matrices)], lr=lr, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps,
                adjust_lr_fn="match_rms_adamw",
            ),
            AdamW(self.param_groups[len(matrices) :], lr=lr, betas=betas, eps=eps),
        ]  # fmt: skip
        self._share()

    def _share(self) -> None:
        """Lets both parts use the state and the groups of the whole optimizer."""
        start = 0
        for part in self.parts:
            end = start + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[start:end]
            start = end

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        self._share()


class Split(Optimizer):
    """An optimizer of weights in fp32 whose upper 16 bits, rounded, are the model's weights in bf16.

    The lower 16 bits are here, so that no update is lost. A step joins some of the weights at a time, which the inner
    optimizer reads and changes as parameters of its own.
    """

    def __init__(self, groups: list[Group], make: Callable[[list[Group]], Optimizer]) -> None:
        weights = [each for group in groups for each in cast("list[nn.Parameter]", group["params"])]
        self.direct = [each for each in weights if each.dtype != torch.bfloat16]
        self.joined = {
            each: nn.Parameter(torch.zeros((), device=each.device).expand(each.shape))
            for each in weights if each.dtype == torch.bfloat16
        }  # fmt: skip
        self.lower = {each: torch.zeros_like(each, dtype=torch.int16) for each in self.joined}
        params = [[self.joined.get(each, each) for each in cast("list[nn.Parameter]", one["params"])] for one in groups]
        self.inner = make([{**group, "params": own} for group, own in zip(groups, params, strict=True)])
        super().__init__(self.inner.param_groups, dict(self.inner.defaults))
        self._share()

    def _share(self) -> None:
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.inner.step()  # the weights in fp32 alone: the others have no gradient yet
        gradients = [(each, each.grad) for each in self.direct]
        for each in self.direct:
            each.grad = None
        for part in self._parts():
            for each in part:
                joined = self.joined[each]
                joined.data, joined.grad = join(each, self.lower[each]), each.grad.float()
            self.inner.step()
            for each in part:
                joined = self.joined[each]
                split(joined, each, self.lower[each])
                joined.data, joined.grad = torch.zeros((), device=each.device).expand(each.shape), None
        for each, gradient in gradients:
            each.grad = gradient

    def _parts(self) -> Iterator[list[nn.Parameter]]:
        part, size = list[nn.Parameter](), 0
        for each in self.joined:
            if each.grad is None:
                continue
            if part and size + each.numel() > _AT_ONCE:
                yield part
                part, size = [], 0
            part.append(each)
            size += each.numel()
        if part:
            yield part

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in (*self.direct, *self.joined):
            each.grad = None

    def state_dict(self) -> State:
        return {**self.inner.state_dict(), "lower": [*self.lower.values()]}

    def load_state_dict(self, state_dict: State) -> None:
        inner = dict(state_dict)
        for mine, saved in zip(self.lower.values(), cast("list[Tensor]", inner.pop("lower")), strict=True):
            mine.copy_(saved)
        self.inner.load_state_dict(inner)
        self._share()


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """The weights in fp32 of their halves: bf16, and the int16 that ``split`` leaves."""
    return ((upper.view(torch.int16).int() << 16) + lower.int()).view(torch.float32)


def split(weights: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Writes weights in fp32 into their halves: rounded to bf16, and what that takes from or adds to the bits."""
    bits = weights.data.view(torch.int32)
    rounded = (bits + _HALF) >> 16
    upper.data.view(torch.int16).copy_(rounded)
    lower.copy_(bits - (rounded << 16))


def _class(module: str, name: str) -> type[Optimizer]:
    """A class of a package that may not be installed."""
    return cast("type[Optimizer]", getattr(importlib.import_module(module), name))


def in_few_bits(groups: object, lr: float, kind: str, **options: object) -> Optimizer:
    """An optimizer of bitsandbytes."""
    return cast(Optimizer, _class("bitsandbytes.optim", kind)(groups, lr=lr, **options))


def keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """For optimizers of bitsandbytes, whose state of an embedding is too coarse in 8 bits: arXiv:2110.02861."""
    manager = _class("bitsandbytes.optim", "GlobalOptimManager").get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def torchao_adamw(groups: object, lr: float, bits: int, **options: object) -> Optimizer:
    """AdamW of torchao. On a CPU it is not compiled: that takes a minute, and steps are not faster."""
    base = _class("torchao.optim", f"AdamW{bits}bit")

    class Eager(base):  # type: ignore[misc, valid-type]
        def step(self, closure: Callable[[], float] | None = None) -> None:
            # A group may be empty: where only norms are trained, no weight is decayed.
            trained = (each for group in self.param_groups for each in group["params"])
            if next(trained).device.type != "cpu":
                super().step(closure)
                return
            with torch.compiler.set_stance("force_eager"):
                super().step(closure)

    return cast(Optimizer, Eager(groups, lr=lr, **options))


def schedule_free(groups: object, lr: float, kind: str, momentum: float | None = None, **options: object) -> Optimizer:
    """An optimizer of ``schedulefree`` that returns from evaluation to exactly the weights that it trained.

    Its model is an average of the steps, and it trains other weights, between that and the last step. The package
    computes each from the other, with another rounding each time; here the trained weights are kept meanwhile, and are
    in the checkpoint, beside the model that the checkpoint's own files hold.
    """
    base = _class("schedulefree", kind)
    if momentum is not None:
        options["momentum"] = momentum

    class Exact(base):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def eval(self) -> None:
            for parameter in self._trained() if self.param_groups[0]["train_mode"] else ():
                self.state[parameter]["trained"] = parameter.detach().clone()
            super().eval()

        @torch.no_grad()
        def train(self) -> None:
            for parameter in self._trained():
                if "trained" in self.state[parameter]:
                    parameter.copy_(self.state[parameter].pop("trained"))
            for group in self.param_groups:
                group["train_mode"] = True

        def _trained(self) -> Iterator[Tensor]:
            """The parameters that a step has changed."""
            return (each for group in self.param_groups for each in group["params"] if "z" in self.state.get(each, {}))

    return cast(Optimizer, Exact(groups, lr=lr, **options))


@contextlib.contextmanager
def averaged(optimizer: object) -> Iterator[None]:
    """Switches an averaging optimizer to the model that would be the output, for a measurement or a checkpoint."""
    if not callable(getattr(optimizer, "eval", None)):
        yield
        return
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]


def galore(groups: list[Group], lr: float, **options: object) -> Optimizer:
    """GaLore's AdamW, whose projections are in its state as matrices."""
    base = _class("galore_torch", "GaLoreAdamW")
    return _with_plain_projections(base)(groups, lr=lr, no_deprecation_warning=True, **options)


def apollo(groups: list[Group], lr: float, **options: object) -> Optimizer:
    """APOLLO's AdamW, whose projections are in its state as matrices."""
    return _with_plain_projections(_class("apollo_torch", "APOLLOAdamW"))(groups, lr=lr, **options)


def _with_plain_projections(base: type[Optimizer]) -> type[Optimizer]:
    """The optimizer, with projections in checkpoints as tensors and numbers instead of a pickled class."""

    class Plain(base):
        def state_dict(self) -> State:
            found: State = super().state_dict()
            found["state"] = {key: _without_projector(each) for key, each in cast(State, found["state"]).items()}
            return found

        def load_state_dict(self, state_dict: State) -> None:
            states = {key: dict(cast(State, each)) for key, each in cast(State, state_dict["state"]).items()}
            projections = {key: each.pop("projection", None) for key, each in states.items()}
            super().load_state_dict({**state_dict, "state": states})
            parameters = [each for group in self.param_groups for each in group["params"]]
            groups = {each: group for group in self.param_groups for each in group["params"]}
            for key, values in projections.items():
                if values is not None:
                    parameter = parameters[cast(int, key)]
                    self.state[parameter]["projector"] = self._projector(groups[parameter], values)

        def _projector(self, group: Group, values: object) -> object:
            kind = cast("dict[str, object]", values)
            made = (
                self._initialize_projector(group, {"seed": kind.get("seed", 0)}) if "proj" in group else _galore(group)
            )
            vars(made).update(kind)
            return made

    return Plain


def _without_projector(state: object) -> object:
    if not isinstance(state, dict) or "projector" not in state:
        return state
    return {
        **{key: value for key, value in state.items() if key != "projector"},
        "projection": vars(state["projector"]),
    }


def _galore(group: Group) -> object:
    projector = _class("galore_torch.galore_projector", "GaLoreProjector")
    return projector(**{name: group[name] for name in ("rank", "update_proj_gap", "scale", "proj_type")})


def galore_layerwise(groups: list[Group], lr: float, **options: object) -> Optimizer:
    """GaLore's AdamW, one per weight."""
    return LayerWise(groups, lr, lambda part: galore(part, lr, **options))


class LayerWise(Optimizer):
    """Updates each weight as soon as its gradient is complete, inside the backward pass, and frees the gradient.

    Unlike that of transformers, it has a state, and one learning rate that the schedule sets.
    """

    def __init__(self, groups: list[Group], lr: float, make: Callable[[list[Group]], Optimizer]) -> None:
        super().__init__(groups, {"lr": lr})
        self.parts = {
            each: make([{**group, "params": [each]}]) for group in self.param_groups for each in group["params"]
        }
        self.group_of = {each: number for number, group in enumerate(self.param_groups) for each in group["params"]}
        for each in self.parts:
            each.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        part = self.parts[parameter]
        part.param_groups[0]["lr"] = self.param_groups[self.group_of[parameter]]["lr"]
        part.step()
        parameter.grad = None

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Nothing: the backward pass has done it."""

    def state_dict(self) -> State:
        return {**super().state_dict(), "parts": [part.state_dict() for part in self.parts.values()]}

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        for part, state in zip(self.parts.values(), cast("list[State]", state_dict["parts"]), strict=True):
            part.load_state_dict(state)


def grokadamw(groups: object, lr: float, **options: object) -> Optimizer:
    """GrokAdamW with its moments in the optimizer's state, where a checkpoint saves them."""
    handler, root = logging.NullHandler(), logging.getLogger()
    root.addHandler(handler)  # without one, the import would have everything logged twice
    base = _class("grokadamw", "GrokAdamW")
    root.removeHandler(handler)

    class Kept(base):  # type: ignore[misc, valid-type]
        def _step_impl(self, closure: Callable[[], float] | None) -> None:
            for group in self.param_groups:
                group["state"] = self.state
            super()._step_impl(closure)
            for group in self.param_groups:
                del group["state"]

    # The trainer clips gradients already, by max_grad_norm.
    return cast(Optimizer, Kept(groups, lr=lr, gradient_clipping=0.0, **options))


def lomo(model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """LOMO: its hooks update the model's weights, with the learning rate that the trainer passes to its backward."""
    return cast(Optimizer, _class("lomo_optim", "Lomo")(model, lr=lr, weight_decay=weight_decay))


class PlateauShare:
    """The share of the learning rate: rises to 1 in the warm-up, then falls each time that the loss stops falling."""

    def __init__(self, *, num_warmup_steps: int, factor: float, patience: int, floor: float) -> None:
        self.num_warmup_steps, self.factor, self.patience, self.floor = num_warmup_steps, factor, patience, floor
        self.share, self.num_bad, self.best = 1.0, 0, float("inf")

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.num_warmup_steps) * self.share if self.num_warmup_steps else self.share

    def measured(self, loss: float) -> bool:
        """Counts a loss on held-out rows, as torch's ReduceLROnPlateau does; returns whether it lowers the share."""
        if loss < self.best * (1 - 1e-4):
            self.best, self.num_bad = loss, 0
            return False
        self.num_bad += 1
        if self.num_bad <= self.patience:
            return False
        before, self.num_bad = self.share, 0
        self.share = max(self.share * self.factor, self.floor)
        return self.share < before


class Plateau(LambdaLR):
    """``reduce_lr_on_plateau`` with a warm-up: torch's has none. Its state is saved and loaded as that of a lambda."""

    def __init__(self, optimizer: Optimizer, share: PlateauShare) -> None:
        super().__init__(optimizer, share)

    def measured(self, loss: float) -> bool:
        """Counts a loss on held-out rows; returns whether it lowers the learning rate, from the next step on."""
        if not self.lr_lambdas[0].measured(loss):  # one for all groups
            return False
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.lr_lambdas[0](self.last_epoch)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        return True


def install_plateau(trainer: "Trainer", *, factor: float, patience: int, floor: float) -> None:
    """Lets a trainer of transformers use ``Plateau``: its own schedule needs its own evaluation, and has no warm-up."""

    def create(num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        if trainer.lr_scheduler is None:
            warmup = trainer.args.get_warmup_steps(num_training_steps)
            share = PlateauShare(num_warmup_steps=warmup, factor=factor, patience=patience, floor=floor)
            trainer.lr_scheduler = Plateau(optimizer or trainer.optimizer, share)
        return cast(LambdaLR, trainer.lr_scheduler)

    trainer.create_scheduler = create


def count_measured(trainer: "Trainer", loss: float) -> None:
    """Passes a loss on held-out rows to the schedule if it is a ``Plateau``."""
    schedule = trainer.lr_scheduler
    if isinstance(schedule, Plateau) and schedule.measured(loss):
        logger.info(
            "step=%d learning_rate=%g held_out_loss=%g", trainer.state.global_step, schedule.get_last_lr()[0], loss
        )

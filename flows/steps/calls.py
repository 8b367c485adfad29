"""The primitives: one definition, from which REST, MCP, the SDK and the table of the docs are made."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lineage.errors import ConfigError
from lineage.fingerprint import Setting
from tasks.steps import Row

if TYPE_CHECKING:
    from tasks.train.steps.session import Session

Result = Mapping[str, object]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_CALL_FILE = "call"  # in a saved state: the call that wrote it


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a session's saved states are.

    Args:
        request_id: of the call that runs.
        saves: session -> its folder of saved states; of this key alone.
    """

    session: str
    request_id: str
    saves: Mapping[str, Path]

    def saved(self, name: str, session: str | None = None) -> Path:
        """The folder of a saved state."""
        folder = self.saves.get(session or self.session)
        if folder is None:
            raise ConfigError(f"session={session}: is no session of this key; name one of yours")
        if not _NAME.fullmatch(name) or not (folder / name / _CALL_FILE).exists():
            known = sorted(each.name for each in folder.glob("*")) if folder.exists() else []
            raise ConfigError(f"saved={name}: is not saved; {', '.join(known) or 'nothing'} is; save it first")
        return folder / name


@dataclass(frozen=True, kw_only=True)
class Call(Setting):
    """A primitive with its arguments.

    Class attributes:
        name: in addresses and clients.
        changes: whether it changes the session, so that it is in the command log.
    """

    name: ClassVar[str]
    changes: ClassVar[bool] = False

    def run(self, session: "Session", place: Place) -> Result:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _Reading(Call):
    saved: str | None = None  # reads with the weights of this saved state; None: with those of now

    @contextmanager
    def weights(self, session: "Session", place: Place) -> Iterator[None]:
        with session.weights_of(place.saved(self.saved)) if self.saved is not None else nullcontext():
            yield


@dataclass(frozen=True, kw_only=True)
class Forward(_Reading):
    """Log-probabilities of the target tokens and the loss; no gradient, and no dropout."""

    name: ClassVar = "forward"
    data: list[Row]
    loss: str = "cross_entropy"
    options: dict[str, float] = field(default_factory=dict)  # of the loss
    logits: bool = False  # return the logits of each token
    hidden_states: bool = False  # return the last hidden state of each token

    def run(self, session: "Session", place: Place) -> Result:
        with self.weights(session, place):
            return session.forward(
                self.data, self.loss, self.options, logits=self.logits, hidden_states=self.hidden_states
            )


@dataclass(frozen=True, kw_only=True)
class Backward(Call):
    """As forward, with dropout, and adds the gradients of the loss to those that are there."""

    name: ClassVar = "backward"
    changes: ClassVar = True
    data: list[Row]
    loss: str = "cross_entropy"
    options: dict[str, float] = field(default_factory=dict)  # of the loss
    accumulate: bool = True  # False: in place of those that are there

    def run(self, session: "Session", place: Place) -> Result:
        return session.backward(self.data, self.loss, self.options, accumulate=self.accumulate)


@dataclass(frozen=True, kw_only=True)
class Step(Call):
    """Updates the weights with the gradients, and clears them; settings count for this update alone."""

    name: ClassVar = "step"
    changes: ClassVar = True
    learning_rate: float | None = None
    betas: list[float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None  # 0: no clipping

    def run(self, session: "Session", place: Place) -> Result:
        return session.step(
            learning_rate=self.learning_rate, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ZeroGrad(Call):
    """Clears the gradients."""

    name: ClassVar = "zero_grad"
    changes: ClassVar = True

    def run(self, session: "Session", place: Place) -> Result:
        return session.zero_grad()


@dataclass(frozen=True, kw_only=True)
class Generate(_Reading):
    """Completions of prompts: tokens, text, and the log-probability of each token."""

    name: ClassVar = "generate"
    prompts: list[list[int]] | None = None  # tokens
    texts: list[str] | None = None  # in place of prompts; the session's tokenizer reads them
    max_tokens: int = 16
    num_samples: int = 1  # of each prompt
    seed: int | None = None  # None: by the number of the call
    temperature: float = 1.0  # 0: the most probable token
    top_p: float = 1.0
    top_k: int | None = None
    stop: list[str | int] | None = None  # texts and tokens; None: the model's stop tokens
    prompt_logprobs: bool = False  # return the log-probabilities of the prompts' tokens too

    def run(self, session: "Session", place: Place) -> Result:
        if (self.prompts is None) == (self.texts is None):
            raise ConfigError("generate: prompts or texts is accepted; send one of them")
        prompts = self.prompts or [session.tokenizer(text)["input_ids"] for text in self.texts or ()]
        with self.weights(session, place):
            found = session.generate(
                prompts, max_tokens=self.max_tokens, num_samples=self.num_samples, seed=self.seed,
                temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=self.stop,
            )  # fmt: skip
            more = {"prompt_logprobs": session.logprobs(prompts)["logprobs"]} if self.prompt_logprobs else {}
            return {**found, **more}


@dataclass(frozen=True, kw_only=True)
class Logprobs(_Reading):
    """The log-probability of each token of sequences after those before it; null for the first."""

    name: ClassVar = "logprobs"
    sequences: list[list[int]]

    def run(self, session: "Session", place: Place) -> Result:
        with self.weights(session, place):
            return session.logprobs(self.sequences)


@dataclass(frozen=True, kw_only=True)
class Save(Call):
    """Saves weights, gradients, optimizer, schedule, random state and counts under a name."""

    name: ClassVar = "save"
    changes: ClassVar = True
    to: str  # a name of letters, digits, ``.``, ``_`` and ``-``

    def run(self, session: "Session", place: Place) -> Result:
        if not _NAME.fullmatch(self.to):
            raise ConfigError(f"to={self.to!r}: 1 to 64 letters, digits, dots, dashes and underscores are accepted")
        folder = place.saves[place.session] / self.to
        mark = folder / _CALL_FILE
        if mark.exists() and mark.read_text() != place.request_id:
            raise ConfigError(f"to={self.to}: is saved already, and a saved state does not change; choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        result = session.save(folder)
        mark.write_text(place.request_id)
        return {"saved": self.to, **result}


@dataclass(frozen=True, kw_only=True)
class Load(Call):
    """Loads what save wrote: of this session, or of another one of the same key, model and adapter."""

    name: ClassVar = "load"
    changes: ClassVar = True
    saved: str
    session: str | None = None
    optimizer: bool = True  # False: only the weights; optimizer and schedule start again

    def run(self, session: "Session", place: Place) -> Result:
        return session.load(place.saved(self.saved, self.session), optimizer=self.optimizer)


CALLS: Mapping[str, type[Call]] = {
    each.name: each for each in (Forward, Backward, Step, ZeroGrad, Generate, Logprobs, Save, Load)
}

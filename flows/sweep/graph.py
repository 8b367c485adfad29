"""The stages of all trials under way, each once: which are ready, and what becomes of the trials that need them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from flows.plan import PlannedStage
from flows.sweep.planner import Key, PlannedTrial, key_of
from lineage.errors import PipelineError


@dataclass(eq=False, kw_only=True)
class Node:
    """One stage that one or more trials need.

    Args:
        of: the first trial that needs it.
        place: in the order of that trial's stages.
        waits: for these to be finished.
        trials: numbers of the trials under way that need it.
        is_ending: it was told to end, and no further trial can count on it.
    """

    of: PlannedTrial
    planned: PlannedStage
    title: str
    place: int
    waits: set[Key]
    trials: set[int]
    is_running: bool = False
    is_ending: bool = False


@dataclass(eq=False, kw_only=True)
class Open:
    """A trial under way.

    Args:
        left: what it still needs.
        began: when the first stage of its own did; None: not yet.
    """

    planned: PlannedTrial
    left: set[Key]
    began: float | None = None

    @property
    def number(self) -> int:
        return self.planned.trial.number

    def seconds(self) -> float:
        return 0.0 if self.began is None else time.monotonic() - self.began


@dataclass
class Graph:
    """The union of the trials under way, by stage and fingerprint."""

    open: dict[int, Open] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)  # by title
    _by_key: dict[Key, Node] = field(default_factory=dict)
    _finished: set[Key] = field(default_factory=set)
    _failed: dict[Key, PipelineError] = field(default_factory=dict)

    def add(self, planned: PlannedTrial) -> tuple[Open, PipelineError | None]:
        """Takes a trial up; the error is that of a stage which it needs and which has failed."""
        stale = {key_of(each): each for each in planned.plan.stale if key_of(each) not in self._finished}
        trial = Open(planned=planned, left=set(stale))
        error = next((self._failed[key] for key in stale if key in self._failed), None)
        if error is not None:
            return trial, error
        self.open[trial.number] = trial
        for place, each in enumerate(planned.plan.stages):
            if key_of(each) in stale:
                self._need(planned, each, place, stale)
        return trial, None

    def ready(self) -> list[Node]:
        """What may begin: the earliest trial comes first, so that it ends before all the others have begun."""
        ready = [node for node in self.nodes.values() if not (node.waits or node.is_running)]
        return sorted(ready, key=lambda node: (min(node.trials), node.place))

    def running(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_running]

    def begin(self, node: Node) -> list[Open]:
        """Marks it; returns the trials that begin with it."""
        node.is_running = True
        begun = [self.open[number] for number in node.trials if self.open[number].began is None]
        begun = [trial for trial in begun if node.planned.name in trial.planned.own]
        for trial in begun:
            trial.began = time.monotonic()
        return begun

    def finish(self, title: str) -> list[Open]:
        """A stage was committed; returns the trials that ended with it."""
        node = self._remove(title)
        key = key_of(node.planned)
        self._finished.add(key)
        for other in self.nodes.values():
            other.waits.discard(key)
        trials = [self.open[number] for number in sorted(node.trials)]
        for trial in trials:
            trial.left.discard(key)
        return [self.open.pop(trial.number) for trial in trials if not trial.left]

    def fail(self, title: str, error: PipelineError) -> list[Open]:
        """A stage failed; returns the trials that ended with it."""
        node = self._remove(title)
        if not node.is_ending:
            self._failed[key_of(node.planned)] = error
        ended = [self.open[number] for number in sorted(node.trials)]
        for trial in ended:
            self.drop(trial.number)
        return ended

    def drop(self, number: int) -> list[Node]:
        """A trial goes no further; returns the running stages that nobody else needs."""
        del self.open[number]
        running = []
        for node in [each for each in self.nodes.values() if number in each.trials]:
            node.trials.discard(number)
            if not node.trials and node.is_running:
                running.append(node)
            elif not node.trials:
                self._remove(node.title)
        return running

    def end(self, node: Node) -> None:
        """A running stage is being ended: a trial that will need it makes it anew."""
        node.is_ending = True
        self._by_key.pop(key_of(node.planned), None)

    def _need(self, planned: PlannedTrial, each: PlannedStage, place: int, stale: Mapping[Key, PlannedStage]) -> None:
        key = key_of(each)
        if key not in self._by_key:
            title = planned.titles.get(each.name, each.name)
            if title in self.nodes:  # of another trial, and not the same after all
                title = f"{each.name}#{planned.trial.number}"
            needs = set(each.upstream)
            if each.upstream:  # all data stages too, so that a bad row is found before anything trains
                needs |= {other.name for other in planned.plan.stages if not other.upstream}
            waits = {other for other in stale if other[0] in needs}
            node = Node(of=planned, planned=each, title=title, place=place, waits=waits, trials=set())
            self.nodes[title] = self._by_key[key] = node
        self._by_key[key].trials.add(planned.trial.number)

    def _remove(self, title: str) -> Node:
        node = self.nodes.pop(title)
        if self._by_key.get(key_of(node.planned)) is node:
            del self._by_key[key_of(node.planned)]
        return node

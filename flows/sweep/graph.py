"""The stages of all trials under way, each once: which are ready, and what becomes of the trials that need them."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from flows.planning.plan import PlannedStage
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
        has_begun: whether the first stage of its own has.
        error: of the first of its stages that failed; what needs none that failed is made nevertheless.
    """

    planned: PlannedTrial
    left: set[Key]
    has_begun: bool = False
    error: PipelineError | None = None

    @property
    def number(self) -> int:
        return self.planned.trial.number


@dataclass
class Graph:
    """The union of the trials under way, by stage and fingerprint."""

    open: dict[int, Open] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)  # by title
    _by_key: dict[Key, Node] = field(default_factory=dict)
    _finished: set[Key] = field(default_factory=set)
    _failed: dict[Key, PipelineError] = field(default_factory=dict)

    def add(self, planned: PlannedTrial) -> list[Open]:
        """Takes a trial up; returns it where it has ended with that: all is made, or what it needs has failed."""
        stale = {key_of(each): each for each in planned.plan.stale if key_of(each) not in self._finished}
        trial = self.open[planned.trial.number] = Open(planned=planned, left=set(stale))
        trial.error = next((self._failed[key] for key in stale if key in self._failed), None)
        if trial.error is None:
            for place, each in enumerate(planned.plan.stages):
                if key_of(each) in stale:
                    self._need(planned, each, place, stale)
        return self._take_ended([trial.number])

    def ready(self) -> list[Node]:
        """What may begin: the earliest trial comes first, so that it ends before all the others have begun."""
        ready = [node for node in self.nodes.values() if not (node.waits or node.is_running)]
        return sorted(ready, key=lambda node: (min(node.trials), node.place))

    def running(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_running]

    def begin(self, node: Node) -> list[Open]:
        """Marks it; returns the trials that begin with it."""
        node.is_running = True
        begun = [self.open[number] for number in sorted(node.trials) if not self.open[number].has_begun]
        begun = [trial for trial in begun if node.planned.name in trial.planned.own]
        for trial in begun:
            trial.has_begun = True
        return begun

    def finish(self, title: str) -> list[Open]:
        """A stage was committed; returns the trials that ended with it."""
        node = self._remove(title)
        key = key_of(node.planned)
        self._finished.add(key)
        for other in self.nodes.values():
            other.waits.discard(key)
        for number in node.trials:
            self.open[number].left.discard(key)
        return self._take_ended(node.trials)

    def fail(self, title: str, error: PipelineError) -> list[Open]:
        """A stage failed, and what needs it is not made; returns the trials that ended with it."""
        node = self._remove(title)
        if not node.is_ending:
            self._failed[key_of(node.planned)] = error
            self._leave_out(key_of(node.planned), node.trials)
        for number in node.trials:
            self.open[number].error = self.open[number].error or error
        return self._take_ended(node.trials)

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

    def _take_ended(self, numbers: Iterable[int]) -> list[Open]:
        """Of these trials, those for which nothing more will be made."""
        busy = {number for node in self.nodes.values() for number in node.trials}
        return [self.open.pop(number) for number in sorted(numbers) if number not in busy]

    def _leave_out(self, failed: Key, trials: Collection[int]) -> None:
        """Of these trials, all that waits for a stage that failed."""
        lost = {failed}
        for node in list(self.nodes.values()):  # each comes after what it waits for
            if node.waits & lost:
                node.waits -= lost  # a trial that needs the node, and not what is lost, has it made
                node.trials.difference_update(trials)
                if not node.trials:
                    self._remove(node.title)
                    lost.add(key_of(node.planned))

    def _need(self, planned: PlannedTrial, each: PlannedStage, place: int, stale: Collection[Key]) -> None:
        key = key_of(each)
        if key not in self._by_key:
            title = planned.titles.get(each.name, each.name)
            if title in self.nodes:  # of another trial, and not the same after all
                title = f"{each.name}#{planned.trial.number}"
            before = planned.plan.waits(each)
            waits = {other for other in stale if other[0] in before}
            node = Node(of=planned, planned=each, title=title, place=place, waits=waits, trials=set())
            self.nodes[title] = self._by_key[key] = node
        self._by_key[key].trials.add(planned.trial.number)

    def _remove(self, title: str) -> Node:
        node = self.nodes.pop(title)
        if self._by_key.get(key_of(node.planned)) is node:
            del self._by_key[key_of(node.planned)]
        return node

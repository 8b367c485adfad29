"""Trees of messages, as OpenAssistant's (Köpf et al. 2023, arXiv:2304.07327), as conversations or as pairs.

A row is a message with ``message_id`` (or ``id``), ``parent_id``, ``role``, ``text`` and ``rank``: 0 is the best of the
replies to one message. Or a row is a tree, whose ``prompt`` has ``replies``. Deleted and rejected messages are left
out, with all replies to them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from tasks.data.formats.turns import Fields, is_nothing
from tasks.data.reading.chunk import Row

Into = Literal["messages", "preference"]  # the format of the rows that are made
_IDS, _PARENT = ("message_id", "id"), "parent_id"
_ASSISTANT = "assistant"
_UNRANKED = 2**31


@dataclass(eq=False, kw_only=True)
class Node:
    """A message of a tree, where it stands, and the replies to it."""

    fields: Fields
    where: str
    parent: "Node | None" = None
    replies: "list[Node]" = field(default_factory=list)

    @property
    def is_left_out(self) -> bool:
        return self.fields.get("deleted") is True or self.fields.get("review_result") is False

    @property
    def is_answer(self) -> bool:
        return self.fields.get("role") == _ASSISTANT

    @property
    def rank(self) -> int | None:
        rank = self.fields.get("rank")
        if isinstance(rank, float):  # as tables have integers beside nulls
            return int(rank) if rank.is_integer() else None
        return rank if isinstance(rank, int) and not isinstance(rank, bool) else None

    def turn(self) -> dict[str, object]:
        return {"role": self.fields.get("role"), "content": self.fields.get("text")}

    def path(self) -> "list[Node]":
        """The messages from the first one to this one."""
        node: Node | None = self
        found = []
        while node:
            found.append(node)
            node = node.parent
        return found[::-1]


def is_tree(sample: Sequence[Fields]) -> bool:
    """Whether at least half of some rows are messages of trees, or whole trees."""
    return bool(sample) and sum(map(_is_message, sample)) + sum(map(_is_whole, sample)) >= len(sample) / 2


def _is_message(fields: Fields) -> bool:
    return {_PARENT, "role", "text"} <= fields.keys() and not fields.keys().isdisjoint(_IDS)


def _is_whole(fields: Fields) -> bool:
    first = fields.get("prompt")
    return isinstance(first, Mapping) and isinstance(first.get("replies"), list) and "text" in first


def rows_of_trees(rows: Sequence[Row], into: Into) -> tuple[list[Row], int, int]:
    """Conversations or pairs, in the order of their trees; and the numbers of messages, and of those in none of them.

    A conversation follows the best reply of the assistant and every reply of a user; a turn that several of them have
    is trained in the first. Every two ranked replies of the assistant to one message make a pair, unless they are of
    one rank (Ouyang et al. 2022, arXiv:2203.02155, section 3.5).
    """
    nodes, roots = _linked(rows)
    made, used = (_conversations if into == "messages" else _pairs)(roots)
    return made, len(nodes), len(nodes) - len(used)


def _linked(rows: Sequence[Row]) -> tuple[list[Node], list[Node]]:
    """All messages, linked, and the first ones of trees."""
    grown, single, roots = list[Node](), list[Node](), list[Node]()
    for row in rows:
        first = row.fields.get("prompt")
        if _is_whole(row.fields) and isinstance(first, Mapping):
            grown += _grown(first, row.where, roots)
        else:
            single.append(Node(fields=row.fields, where=row.where))
    known = {str(name): node for node in single if (name := _id(node)) is not None}
    for node in single:
        parent = node.fields.get(_PARENT)
        if is_nothing(parent):
            roots.append(node)
        elif found := known.get(str(parent)):
            node.parent = found
            found.replies.append(node)
    return [*grown, *single], roots


def _id(node: Node) -> object:
    return next((node.fields[name] for name in _IDS if node.fields.get(name) is not None), None)


def _grown(first: Fields, where: str, roots: list[Node]) -> list[Node]:
    """The messages of a whole tree, linked."""
    root = Node(fields=first, where=where)
    roots.append(root)
    found, waiting = [root], [root]
    while waiting:
        node = waiting.pop()
        replies = node.fields.get("replies")
        for reply in replies if isinstance(replies, list) else ():
            if isinstance(reply, Mapping):
                node.replies.append(Node(fields=reply, where=where, parent=node))
        found += node.replies
        waiting += node.replies
    return found


def _walked(roots: Sequence[Node], *, best: bool) -> Iterator[Node]:
    """The messages of trees, each before the replies to it.

    Args:
        best: of the assistant's replies to a message only the best one.
    """
    waiting = [root for root in roots[::-1] if not root.is_left_out]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += _following(node, best=best)[::-1]


def _following(node: Node, *, best: bool) -> list[Node]:
    kept = [each for each in node.replies if not each.is_left_out]
    answers = sorted((each for each in kept if each.is_answer), key=lambda each: _of_rank(each.rank))
    return [*(answers[:1] if best else answers), *(each for each in kept if not each.is_answer)]


def _of_rank(rank: int | None) -> int:
    return _UNRANKED if rank is None else rank


def _conversations(roots: Sequence[Node]) -> tuple[list[Row], set[Node]]:
    made, used = list[Row](), set[Node]()
    for node in _walked(roots, best=True):
        goes_on = any(each.is_answer for reply in _following(node, best=True) for each in _following(reply, best=True))
        if node.is_answer and not goes_on:
            path = node.path()
            turns = [{**each.turn(), **({"weight": 0} if each.is_answer and each in used else {})} for each in path]
            made.append(Row(fields={"messages": turns}, where=node.where))
            used.update(path)
    return made, used


def _pairs(roots: Sequence[Node]) -> tuple[list[Row], set[Node]]:
    made, used = list[Row](), set[Node]()
    for node in _walked(roots, best=False):
        answers = [each for each in _following(node, best=False) if each.is_answer and each.rank is not None]
        for chosen, rejected in combinations(answers, 2):
            if chosen.rank != rejected.rank:
                turns = {"chosen": [chosen.turn()], "rejected": [rejected.turn()]}
                made.append(Row(fields={"prompt": [each.turn() for each in node.path()], **turns}, where=chosen.where))
                used.update([*node.path(), chosen, rejected])
    return made, used

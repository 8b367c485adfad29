"""Trees of messages, as OpenAssistant's (Köpf et al. 2023, arXiv:2304.07327), as conversations or as pairs.

A row is a message with ``message_id`` (or ``id``), ``parent_id``, ``role``, ``text`` and ``rank``: 0 is the best of the
replies to one message. Or a row is a tree, whose ``prompt`` has ``replies``. Deleted and rejected messages are left
out, with all replies to them. A prompt with several rated answers, or with two and a verdict, is a tree too.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from lineage.artifact import Kind
from tasks.data.formats.turns import SYSTEM, THOUGHTS, Fields, is_nothing, is_transcript, prompt_of
from tasks.data.reading.chunk import Row

Into = Literal["messages", "preference"]  # the format of the rows that are made
_IDS, _PARENT = ("message_id", "id"), "parent_id"
_ASSISTANT = "assistant"
_UNRANKED = 2**31
# Rated answers, as UltraFeedback, Nectar and Stack Exchange's preferences have them.
_ASKED, _RATED = ("prompt", "instruction", "question", "history"), ("completions", "answers", "responses")
_ANSWERS = ("response", "answer", "text", "content", "completion")
_ANSWERED = ("completion", "response", "output", "chosen", "rejected", "messages", "conversations")
_SCORES = ("fine-grained_score", "overall_score", "score", "pm_score")  # the higher, the better; of a rank, the lower
# Two answers, the column of the verdict, and its values for each: SHP, PKU-SafeRLHF, Arena, HelpSteer.
_COMPARED: tuple[tuple[str, str, str, Collection[object], Collection[object]], ...] = (
    ("human_ref_A", "human_ref_B", "labels", (1,), (0,)),
    ("response_0", "response_1", "better_response_id", (0,), (1,)),
    ("response_a", "response_b", "winner", ("model_a", "response_a", "a", "A"), ("model_b", "response_b", "b", "B")),
    ("response_1", "response_2", "preference_strength", (-3, -2, -1), (1, 2, 3)),
    ("conversation_a", "conversation_b", "winner", ("model_a",), ("model_b",)),  # which differ in the last answer
)
# What changes what is trained and is beside role and text: of a row, of a message, and of either.
_OF_ROW = ("tools", "functions", "images", "image", "image_url", "image_path", "videos", "video", "audios", "audio")
_OF_MESSAGE = (*THOUGHTS, "tool_calls", "function_call", "tool_call_id")
_OF_EITHER = ("weight", "loss_weight", "loss", "train", "training")


@dataclass(eq=False, kw_only=True)
class Node:
    """A message of a tree, where it stands, and the replies to it.

    Args:
        of_row: of the first message: the columns of a row that are beside its messages and that are trained or refused.
    """

    fields: Fields
    where: str
    of_row: Fields = field(default_factory=dict)
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
        """As of a conversation, which refuses what it cannot read of a message."""
        own = _some(self.fields, (*_OF_MESSAGE, *_OF_EITHER, *(_OF_ROW if self.parent else ())))
        return {"role": self.fields.get("role"), "content": self.fields.get("text"), **own}

    def path(self) -> "list[Node]":
        """The messages from the first one to this one."""
        node: Node | None = self
        found = []
        while node:
            found.append(node)
            node = node.parent
        return found[::-1]


def _some(fields: Fields, names: Sequence[str]) -> Fields:
    return {name: fields[name] for name in names if not is_nothing(fields.get(name))}


def is_tree(sample: Sequence[Fields], columns: Mapping[str, str] | None = None, kind: Kind | None = None) -> bool:
    """Whether at least half of some rows are messages of trees, or whole trees.

    Args:
        columns: names of the user's, for whose rows an answer is the one that they name, rated or not.
        kind: of the stage. Rated answers of prompts are arguments of reward functions.
    """
    if is_rated(sample) and (columns or kind == Kind.PROMPTS):
        return False
    return bool(sample) and sum(_is_message(each) or _root(each) is not None for each in sample) >= len(sample) / 2


def _is_message(fields: Fields) -> bool:
    return {_PARENT, "role", "text"} <= fields.keys() and not fields.keys().isdisjoint(_IDS)


def _root(fields: Fields) -> Fields | None:
    """The first message of a row that is a tree; None: it is none."""
    first = fields.get("prompt")
    if isinstance(first, Mapping) and isinstance(first.get("replies"), list) and "text" in first:
        return first
    turns, ranked = _asked(fields), _rated(fields)
    if not turns or len(ranked) < 2:
        return None
    system = next((fields[name] for name in SYSTEM if not is_nothing(fields.get(name))), None)
    replies: list[object] = [{"role": _ASSISTANT, "text": text, "rank": rank} for text, rank in ranked]
    for turn in reversed([*([{"role": "system", "content": system}] if system else []), *turns]):
        replies = [{"role": turn["role"], "text": turn["content"], "replies": replies}]
    (root,) = replies
    assert isinstance(root, Mapping)
    return root


def _asked(fields: Fields) -> Sequence[Mapping[str, object]]:
    """The turns before the answers of a row; empty: there are none, or the answers have other ones before them."""
    left, right = (fields.get(f"conversation_{side}") for side in "ab")
    if isinstance(left, list) and isinstance(right, list):
        return left[:-1] if left[:-1] == right[:-1] and all(map(_is_turn, left)) else []
    asked = next((value for name in _ASKED if isinstance(value := fields.get(name), str)), "")
    return prompt_of(asked) if is_transcript(asked) else [{"role": "user", "content": asked}] if asked else []


def _is_turn(value: object) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def is_rated(sample: Sequence[Fields]) -> bool:
    """Whether at least half of some rows are prompts with answers of which some are better."""
    return bool(sample) and sum(len(_rated(fields)) > 1 for fields in sample) >= len(sample) / 2


def _rated(fields: Fields) -> list[tuple[object, int]]:
    """The answers of a row with their ranks, equal ones for answers that are as good; empty: it has none, or one."""
    if any(not is_nothing(fields.get(name)) for name in _ANSWERED):
        return []
    for first, second, verdict, left, right in _COMPARED:
        one, other = _last_text(fields.get(first)), _last_text(fields.get(second))
        if isinstance(one, str) and isinstance(other, str) and verdict in fields:
            return [(one, int(fields[verdict] in right)), (other, int(fields[verdict] in left))]
    answers = next((value for name in _RATED if isinstance(value := fields.get(name), list)), [])
    texts = [(each, _of(each, _ANSWERS)) for each in answers]
    found = [(text, score) for each, text in texts if isinstance(text, str) and (score := _score(each)) is not None]
    order = sorted({score for _, score in found}, reverse=True)
    return [(text, order.index(score)) for text, score in found]


def _last_text(answer: object) -> object:
    """A text, or that of the last turn of a conversation."""
    return _of(answer[-1], ("content",)) if isinstance(answer, list) and answer else answer


def _of(answer: object, names: Sequence[str]) -> object:
    return next((answer[name] for name in names if name in answer), None) if isinstance(answer, Mapping) else None


def _score(answer: object) -> float | None:
    """How good an answer is; None: nothing says it."""
    for names, sign in ((_SCORES, 1), (("rank",), -1)):
        number = _of(answer, names)
        if isinstance(number, int | float) and not isinstance(number, bool) and number == number:
            return sign * number
    return None


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
        if (first := _root(row.fields)) is not None:
            roots.append(Node(fields=first, where=row.where, of_row=_some(row.fields, (*_OF_ROW, *_OF_EITHER))))
            grown += _grown(roots[-1])
        else:
            single.append(Node(fields=row.fields, where=row.where, of_row=_some(row.fields, _OF_ROW)))
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


def _grown(root: Node) -> list[Node]:
    """The messages of a whole tree, linked."""
    found, waiting = [root], [root]
    while waiting:
        node = waiting.pop()
        replies = node.fields.get("replies")
        for reply in replies if isinstance(replies, list) else ():
            if isinstance(reply, Mapping):
                node.replies.append(Node(fields=reply, where=root.where, parent=node))
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
            made.append(Row(fields={"messages": turns, **path[0].of_row}, where=node.where))
            used.update(path)
    return made, used


def _pairs(roots: Sequence[Node]) -> tuple[list[Row], set[Node]]:
    made, used = list[Row](), set[Node]()
    for node in _walked(roots, best=False):
        answers = [each for each in _following(node, best=False) if each.is_answer and each.rank is not None]
        for chosen, rejected in combinations(answers, 2):
            if chosen.rank != rejected.rank:
                path, turns = node.path(), {"chosen": [chosen.turn()], "rejected": [rejected.turn()]}
                of_row = {"prompt": [each.turn() for each in path], **path[0].of_row}
                made.append(Row(fields={**of_row, **turns}, where=chosen.where))
                used.update([*path, chosen, rejected])
    return made, used

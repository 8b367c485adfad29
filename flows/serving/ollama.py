"""The Modelfile of a GGUF file for Ollama, and the chat template in Ollama's language.

A chat template is converted where its text before each message follows from the roles of that message and the one
before it, and where it writes contents as they are, but for what ``_LOSSES`` names. That is found by rendering
conversations.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lineage.errors import ConfigError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Turn = tuple[str, str]  # role and content
Texts = Mapping[
    tuple[str, str], str
]  # roles of a message and the one before it (empty: none; `end`: the answer to come) -> the text between
_START, _END, _ANSWER = "", "end", "assistant"
_ROUNDS = 3
_DATE = "26 Jul 2024"  # of Llama's templates where they know none
# What a template does to contents, and Ollama's language cannot -> the same, and what the Modelfile says of it.
_LOSSES: tuple[tuple[Callable[[Turn], str], str], ...] = (
    (lambda turn: turn[1].strip(), "blanks at the ends of a message stay; the model's own template strips them"),
    (
        lambda turn: re.sub(r"^.*</think>\n*", "", turn[1], flags=re.DOTALL) if turn[0] == _ANSWER else turn[1],
        "what earlier answers thought stays; the model's own template drops it: send answers without it",
    ),
)
_CHANGED = (" x", "x ", "x\n", "\nx", "<think>\nx\n</think>\n\ny")  # contents that templates may change


def modelfile(
    label: str, tokenizer: "PreTrainedTokenizerBase", generation: "GenerationConfig", stops: Sequence[str]
) -> str:
    """A Modelfile beside ``model.gguf``: template, stop tokens, and how the model's own config samples.

    Raises:
        ConfigError: the chat template cannot be converted exactly.
    """
    texts, lost = _texts(label, tokenizer)
    if "strftime_now" in str(tokenizer.chat_template):
        lost.append(f"the date is always {_DATE}; the model's own template writes that of the day")
    lines = [*(f"# {each}" for each in lost), "FROM ./model.gguf", f'TEMPLATE """{_go(label, texts)}"""']
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    sampled = generation.do_sample is True

    def value(name: str, otherwise: float) -> float:
        found = getattr(generation, name, None)
        return otherwise if found is None or not sampled else found

    own = {
        "temperature": value("temperature", 1.0) if sampled else 0.0, "top_p": value("top_p", 1.0),
        "top_k": value("top_k", 0), "min_p": value("min_p", 0.0),
        "repeat_penalty": generation.repetition_penalty or 1.0,
    }  # fmt: skip
    lines += [f"PARAMETER {name} {number}" for name, number in own.items()]
    return "\n".join(lines) + "\n"


def _texts(label: str, tokenizer: "PreTrainedTokenizerBase") -> tuple[Texts, list[str]]:
    """The texts between the messages of a template, and what is lost of what it does to contents.

    Raises:
        ConfigError: other texts depend on more than the roles, or contents are changed.
    """
    found: dict[tuple[str, str], str] = {}
    for turns in _conversations():
        rest, before = _render(label, tokenizer, turns), _START
        for role, message in turns:
            between, content, rest = rest.partition(message)
            if not content:
                raise _refused(label, f"it leaves out a message of {role}")
            if found.setdefault((before, role), between) != between:
                raise _refused(label, f"what it writes before {role} depends on more than the role before it")
            before = role
        if found.setdefault((before, _END), rest) != rest:
            raise _refused(label, "what it writes before an answer depends on earlier turns")
    lost: set[int] = set()
    for turns in _probes():
        wished = _render(label, tokenizer, turns)
        for losses in ((), (0,), (1,), (1, 0)):
            changed = list(turns)
            for loss in losses:
                changed = [(turn[0], _LOSSES[loss][0](turn)) for turn in changed]
            if wished == _rendered(found, changed):
                lost.update(losses)
                break
        else:
            raise _refused(label, "it changes contents in another way than to strip them or drop earlier thinking")
    return found, [_LOSSES[loss][1] for loss in sorted(lost)]


def _render(label: str, tokenizer: "PreTrainedTokenizerBase", turns: Sequence[Turn]) -> str:
    """A conversation up to where the answer begins, without the BOS that llama.cpp writes."""
    from jinja2.exceptions import TemplateError

    from tasks.model.tokenizers import adds_bos

    if not isinstance(tokenizer.chat_template, str):
        raise _refused(label, "there is none, or there are several")
    dated = {"date_string": _DATE} if "date_string" in tokenizer.chat_template else {}
    if "strftime_now" in tokenizer.chat_template and not dated:
        raise _refused(label, "it writes the date of the day")
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **dated)
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(role for role, _ in turns)
        raise _refused(label, f"it refuses turns of {roles} ({error})") from error
    if not adds_bos(tokenizer):
        return text
    if not text.startswith(tokenizer.bos_token):
        raise _refused(label, "the tokenizer puts its BOS before a text, and the template does not")
    return text[len(tokenizer.bos_token) :]


def _conversations() -> Iterator[list[Turn]]:
    for rounds, has_system in itertools.product(range(1, _ROUNDS + 1), (False, True)):
        roles = ["user", *[_ANSWER, "user"] * (rounds - 1)]
        yield [(role, f"zq{at}qz") for at, role in enumerate(["system", *roles] if has_system else roles)]


def _probes() -> Iterator[list[Turn]]:
    for content in _CHANGED:
        yield [("system", content), ("user", content), (_ANSWER, content), ("user", content)]
        yield [("user", content), (_ANSWER, content), ("user", "x")]


def _rendered(texts: Texts, turns: Sequence[Turn]) -> str:
    before = (_START, *(role for role, _ in turns))
    inside = "".join(texts[last, role] + content for last, (role, content) in zip(before, turns, strict=False))
    return inside + texts[before[-1], _END]


def _go(label: str, texts: Texts) -> str:
    """The template in Go's language, as Ollama renders it: roles and contents of ``.Messages``."""
    for text in texts.values():
        if "{{" in text or "}}" in text or '"""' in text:
            raise _refused(label, f"it writes {text!r}, which a Modelfile reads as its own")
    chosen = "".join(
        f'{{{{ {"else if" if at else "if"} and (eq $before "{before}") (eq .Role "{role}") }}}}{text}'
        for at, ((before, role), text) in enumerate(texts.items())
        if role != _END
    )
    return (
        f'{{{{ $before := "" }}}}{{{{ range .Messages }}}}{chosen}{{{{ end }}}}{{{{ .Content }}}}'
        f'{{{{ $before = .Role }}}}{{{{ end }}}}{{{{ if eq $before "user" }}}}{texts["user", _END]}{{{{ end }}}}'
    )


def _refused(label: str, cause: str) -> ConfigError:
    return ConfigError(
        f"{label}: its chat template cannot be written exactly in Ollama's language: {cause}; a template such as "
        "ChatML is accepted; export gguf, which carries the template as it is, or train with chat_template=chatml"
    )

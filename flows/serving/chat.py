"""``posttrain chat``: talk with a model, or with two side by side."""

import argparse
import copy
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TextIO

from flows.reports.wording import printable_text
from flows.serving.model import Found, find_model, refs_among
from lineage.errors import ConfigError
from tasks.data.images import MARK

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from tasks.data.images import StoredImages
    from tasks.data.tokens.rendering import Renderer
    from tasks.evaluate.answers import Answer
    from tasks.model.vision import Vision

Message = dict[str, object]
Write = Callable[[str], None]
_CLEAR, _END = "/clear", ("/exit", "/quit")
_IMAGE = "/image "
_HELP = (
    f"each answer follows from the whole conversation; {_CLEAR} starts afresh; {_IMAGE}FILE shows an image; {_END[0]} "
    "or Ctrl-D ends"
)
_COLUMN = 40  # least characters of one of two columns


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a model, such as sft; a second one answers beside it")
    parser.add_argument("--once", metavar="TEXT", help="answer this alone and end; -: all of standard input")
    parser.add_argument("--image", action="append", metavar="FILE", help="show it with the first message; repeat it")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of an answer; default 512")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: the likeliest token; default: the model's")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this share")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from this number of the likeliest tokens")
    parser.add_argument("--repetition-penalty", type=float, metavar="R", help="1: none; default: the model's")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; default 0")


def run_chat(options: argparse.Namespace) -> int:
    refs, options.overrides = refs_among(options.ref, options.overrides)
    if len(refs) > 2:
        raise ConfigError(f"chat: {len(refs)} REFs are given ({', '.join(refs)}); give one, or two to compare")
    sampling = _sampling(options)
    found = [find_model(ref, options.overrides, options.config_dir) for ref in refs]
    speakers = [Speaker.of(each, sampling, options.seed, options.system) for each in found]
    turns: list[dict[str, object]] = []
    pictures = Pictures()
    for file in options.image or ():
        pictures.show(file, speakers)
    for text in _texts(options.once, sys.stdin):
        if text == _CLEAR:
            for each in speakers:
                each.messages = []
            continue
        try:
            if text.startswith(_IMAGE):
                pictures.show(text.removeprefix(_IMAGE).strip(), speakers)
                continue
            turns.append(_turn(speakers, text, pictures.taken(), quiet=options.json))
        except ConfigError as error:
            if options.once is not None or not sys.stdin.isatty():
                raise
            print(f"posttrain: {error}", file=sys.stderr)
    if options.json:
        models = [{"ref": each.ref, "name": each.name, "path": str(each.path)} for each in found]
        print(json.dumps({"models": models, "turns": turns}, indent=2, ensure_ascii=False))
    return 0


def _sampling(options: argparse.Namespace) -> dict[str, object]:
    """Fields of a generation config that the options set (ConfigError: a number is out of range)."""
    accepted: dict[str, tuple[str, Callable[[float], bool]]] = {
        "max_new_tokens": ("1 or more", lambda value: value >= 1),
        "temperature": ("0 or more", lambda value: value >= 0),
        "top_p": ("above 0, at most 1", lambda value: 0 < value <= 1),
        "top_k": ("1 or more", lambda value: value >= 1),
        "repetition_penalty": ("above 0", lambda value: value > 0),
    }
    found = {name: getattr(options, name) for name in accepted if getattr(options, name) is not None}
    for name, value in found.items():
        bounds, fits = accepted[name]
        if not fits(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: {bounds} is accepted; correct it")
    samples = [name for name in ("temperature", "top_p", "top_k") if name in found]
    if found.get("temperature") == 0 and len(samples) > 1:
        raise ConfigError(
            f"--temperature 0 takes the likeliest token, and --{samples[1].replace('_', '-')} samples; give one of them"
        )
    if samples:
        found["do_sample"] = found.get("temperature") != 0
    return found


def _texts(once: str | None, stdin: TextIO) -> Iterator[str]:
    """What the user says: ``--once``, the lines of a script, or what is typed."""
    if once is not None:
        yield stdin.read().rstrip("\n") if once == "-" else once
    elif not stdin.isatty():
        print(f"{_HELP}; one question alone: --once TEXT", file=sys.stderr)
        yield from takewhile(lambda text: text not in _END, (line.rstrip("\n") for line in stdin if line.strip()))
    else:
        print(_HELP)
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                print()
                return
            if text in _END:
                return
            if text:
                yield text


class Pictures:
    """The images of a conversation, and those that the next message shows."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()
        self._known, self._next = list[str](), list[str]()

    def show(self, name: str, speakers: "Sequence[Speaker]") -> None:
        """Puts an image before the text of the next message (ConfigError: it is no image, or a model reads none)."""
        from tasks.data.formats.turns import BadRowError
        from tasks.data.images import ImageFiles, StoredImages, marked, write_images

        file, folder = Path(name).expanduser().resolve(), Path(self._folder.name)
        try:
            mark = ImageFiles(root=file.parent, store=folder / "images").mark(file.name, f"image {name}")
        except BadRowError as error:
            raise ConfigError(str(error)) from error
        self._known += marked([mark])
        stored = folder / f"{len(self._known)}.arrow"
        write_images(self._known, [folder / "images"], [], stored)
        for each in speakers:
            each.see(StoredImages(stored))
        self._next.append(mark)

    def taken(self) -> str:
        """The marks of the images of the next message, which are then no longer those of the one after it."""
        marks, self._next = "".join(self._next), []
        return marks


@dataclass(kw_only=True)
class Speaker:
    """A model with its conversation so far."""

    name: str
    path: Path
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    generation: "GenerationConfig"
    seed: int
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    renderer: "Renderer | None" = None  # None: it has no chat template
    vision: "Vision | None" = None  # None: there is no image yet

    @staticmethod
    def of(found: Found, sampling: Mapping[str, object], seed: int, system: str | None) -> "Speaker":
        """Loads a model (ConfigError: it has no chat template for a system prompt)."""
        from tasks.data.tokens.rendering import Renderer
        from tasks.evaluate.answers import stop_tokens

        model, tokenizer = found.load()
        generation = copy.deepcopy(model.generation_config)
        generation.update(**sampling, max_length=None)
        if not generation.do_sample:
            generation.update(temperature=None, top_p=None, top_k=None)  # without effect, and warned of
        generation.eos_token_id = sorted(stop_tokens(model, tokenizer)) or None
        generation.pad_token_id = tokenizer.pad_token_id
        renderer = Renderer.of(tokenizer) if tokenizer.chat_template else None
        if renderer is None:
            note = f"{found.ref} has no chat template: it continues each text, and does not read earlier ones"
            if system is not None:
                raise ConfigError(f"--system: {note}; a model with a chat template is accepted; leave --system out")
            print(f"posttrain: {note}", file=sys.stderr)
        return Speaker(
            name=found.ref, path=found.path, model=model, tokenizer=tokenizer, generation=generation, seed=seed,
            system=system, renderer=renderer,
        )  # fmt: skip

    def see(self, stored: "StoredImages") -> None:
        """Reads these images where messages have their marks.

        Raises:
            ConfigError: it is a model of text, or has no chat template.
        """
        from tasks.data.tokens.rendering import Renderer
        from tasks.model.vision import Vision, require_reads_images

        require_reads_images(self.path, self.name)
        if self.renderer is None:
            raise ConfigError(f"{self.name} has no chat template, which says where an image stands; leave images out")
        self.renderer = Renderer.of(self.tokenizer, images=True)
        self.vision = Vision(directory=self.path, stored=stored, size={})

    def answer(self, text: str, write: Write) -> "Answer":
        """Answers the next message, and keeps both.

        Args:
            write: called with each piece of the answer as it is generated.

        Raises:
            ConfigError: the conversation is longer than the model reads.
        """
        import torch
        from transformers import TextStreamer, set_seed

        from tasks.evaluate.answers import answers_of
        from tasks.model.positions import fix_length

        class Streamer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                write(text)

        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        ids, images = self._prompt(messages)
        generation = copy.copy(self.generation)
        generation.max_new_tokens = min(generation.max_new_tokens, self._left(len(ids)))
        fix_length(self.model, len(ids) + generation.max_new_tokens)
        set_seed(self.seed + len(self.messages))
        ids_1T = torch.tensor([ids], device=self.model.device)
        seen = self.vision.inputs([images], ids_1T) if self.vision else {}
        with torch.inference_mode():
            found_1T = self.model.generate(
                ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=generation, **seen,
                streamer=Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            )  # fmt: skip
        (answer,) = answers_of(self.model, self.tokenizer, [found_1T[0, len(ids) :].tolist()])
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def _prompt(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """The tokens of a conversation, and its images."""
        from tasks.data.tokens.encoding import encode_rendered, encoder_of

        if self.renderer is None:
            return list(self.tokenizer(str(messages[-1]["content"]))["input_ids"]), []
        begin: list[Message] = [{"role": "system", "content": self.system}] if self.system is not None else []
        rendered = self.renderer.prompt([*begin, *messages], None, "of the chat")
        if self.vision:
            rendered = self.vision.expanded(rendered, messages, "of the chat")
        (encoded,) = encode_rendered(encoder_of(self.tokenizer), [rendered])
        return list(encoded.ids), [place for _, _, place in rendered.images]

    def _left(self, length: int) -> int:
        """New tokens that the model's positions leave."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and length >= most:
            raise ConfigError(
                f"the conversation has {length} tokens, and {self.name} reads {most}; say less, or restart with "
                f"{_CLEAR}"
            )
        return sys.maxsize if most is None else int(most) - length


def _turn(speakers: Sequence[Speaker], message: str, images: str, *, quiet: bool) -> dict[str, object]:
    """Lets every model answer, and shows the answers while they are generated.

    Args:
        images: marks of those that stand before the text.

    Raises:
        ConfigError: the text spells such a mark, or is too long.
    """
    if found := MARK.search(message):
        raise ConfigError(f"the text spells {found[0]}, which is an image here; a text without it is accepted")
    text = f"{images}{message}"
    shown = printable_text if sys.stdout.isatty() else str

    def write(piece: str) -> None:
        print(shown(piece), end="", flush=True)

    answers: list[Answer] = []
    if quiet:
        answers += [each.answer(text, lambda piece: None) for each in speakers]
    elif len(speakers) == 2 and sys.stdout.isatty() and shutil.get_terminal_size().columns >= 2 * _COLUMN:
        answers += _in_columns(speakers, text)
    else:
        for each in speakers:
            print(f"{each.name}: " if len(speakers) > 1 else "", end="", flush=True)
            answers.append(each.answer(text, write))
            print(flush=True)
    kept = [{"model": each.name, **asdict(answer)} for each, answer in zip(speakers, answers, strict=True)]
    return {"user": message, **({"images": MARK.findall(images)} if images else {}), "answers": kept}


def _in_columns(speakers: Sequence[Speaker], text: str) -> "list[Answer]":
    """Two answers beside each other on a terminal; the left one is generated first."""
    from rich.live import Live
    from rich.markup import escape
    from rich.table import Table

    texts = [""] * len(speakers)

    def table() -> Table:
        found = Table(*(each.name for each in speakers), expand=True)
        for column in found.columns:
            column.ratio = 1
        found.add_row(*map(escape, map(printable_text, texts)))
        return found

    answers = []
    with Live(table(), auto_refresh=False, vertical_overflow="visible") as live:
        for place, each in enumerate(speakers):

            def write(piece: str, place: int = place) -> None:
                texts[place] += piece
                live.update(table(), refresh=True)

            answers.append(each.answer(text, write))
    return answers

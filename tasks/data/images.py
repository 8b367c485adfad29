"""Images of rows: found where rows name them, checked, and stored once by their content.

In a text of a prepared row an image is a mark with the SHA-256 of its bytes, ``<image:DIGEST>``, so that whatever
compares rows by their texts (ids, splits, duplicates, leaks) compares their images too. The bytes are in
``images.arrow`` beside the rows, sorted by digest; a row of tokens names an image by its place there.
"""

import base64
import binascii
import hashlib
import io
import os
import re
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal
from zipfile import BadZipFile, ZipFile

from annotated_types import Gt

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, DataError
from lineage.filesystem.remote_files import Credentials, is_url, open_remote, place_of, request
from lineage.fingerprint import Setting
from lineage.secrets import first_line
from lineage.source.sources import local_paths
from tasks.data.formats.turns import BadRowError, Fields, is_nothing, named

if TYPE_CHECKING:
    import pyarrow as pa
    from PIL.Image import Image

IMAGES = "images.arrow"  # beside the files of the splits
WITH_IMAGES = frozenset({Kind.CONVERSATIONS, Kind.PREFERENCES, Kind.UNPAIRED, Kind.PROMPTS})  # rows that may have some
MARK = re.compile(r"<image:([0-9a-f]{64})>")
MAX_BYTES = 2**25  # of the file of an image
_FETCH_SECONDS = 60.0  # without a byte from a server
_FILE = re.compile(r"\.[A-Za-z]\w*$")  # at the end of a name that is no folder's
MAX_PIXELS = 2**26  # which are 192 MiB as RGB
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # with 8 bits a channel or fewer
Part = Literal["projector", "vision"]  # of a model, beside its language model
# All parts; cross_attention: layers of a language model that attend to images.
ModelPart = Part | Literal["language", "cross_attention"]
COLUMNS = ("images", "image")
_WRITTEN = "<image>"  # where an image of the column belongs, in a user's text
_KINDS = ("image", "image_url", "image_path", "image_binary", "input_image")  # types of content items
# Bytes stand before the path that `datasets` writes beside them.
_PAYLOADS = ("image", "image_url", "bytes", "base64", "data", "binary", "url", "path", "source", "content", "value")
_SIDES = ("chosen", "rejected")  # columns that may both begin with the prompt, and then have its images in common
# Columns in which texts stand before those of other names, in the order of their images.
_FIRST = (
    "system",
    "system_prompt",
    "history",
    "instruction",
    "input",
    "context",
    "prompt",
    "messages",
    "conversations",
    *_SIDES,
)
_ASKS = ("user", "human", "prompter")
_ANSWERS = ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai", "bot", "function_call")
_REASON = "image that cannot be read"
_BATCH_BYTES = 2**25
_ORIENTATION = 0x0112  # EXIF; from 5 on, width and height change places


@dataclass(frozen=True, kw_only=True)
class Images(Setting):
    """Rows may have images. The vision tower and the projector are frozen, unless ``trains`` names them.

    ``freeze=[vision]`` of a method is short for ``images.trains=[projector]``: it names what is frozen.

    Args:
        trains: the parts that are trained beside the language model.
        language: ``frozen``: those of ``trains`` alone are trained.
        min_pixels, max_pixels: an image of fewer or more is resized, where the processor counts pixels (Qwen2-VL and
            its kin); written into the output. None: as the processor's files say.
    """

    trains: tuple[Part, ...] | None = None
    language: Literal["frozen"] | None = None
    min_pixels: Annotated[int, Gt(0)] | None = None
    max_pixels: Annotated[int, Gt(0)] | None = None

    def __post_init__(self) -> None:
        if self.language and not self.trains:
            raise ConfigError(
                "images.language=frozen without images.trains: nothing would be trained; parts that are trained are "
                "accepted; set images.trains=[projector], or images.language=null"
            )
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"images.min_pixels={self.min_pixels} is above images.max_pixels={self.max_pixels}; no more is "
                "accepted; lower it"
            )

    @property
    def size(self) -> dict[str, int]:
        """The pixels as the processor's files have them."""
        named = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        return {name: value for name, value in named.items() if value is not None}


def require_pixels(size: Mapping[str, int], files: Mapping[str, object], where: str = "") -> None:
    """Requires that limits of pixels agree with what a processor does with an image.

    Args:
        size: as ``Images.size`` gives it.
        files: of its processor of images.
        where: before the names of fields.
    """
    if "image_processor_type" in files and not files.keys() & {"merge_size", "temporal_patch_size", "max_pixels"}:
        raise ConfigError(
            f"{where}images.{'max' if 'longest_edge' in size else 'min'}_pixels: {files['image_processor_type']} does "
            "not count pixels; processors of Qwen2-VL and its kin do; set it to null"
        )
    own = files.get("size") or {}
    sides = [files.get(name) for name in ("min_pixels", "max_pixels")]
    least, most = (
        size.get(name, side or (own.get(name) if isinstance(own, Mapping) else None))
        for name, side in zip(("shortest_edge", "longest_edge"), sides, strict=True)
    )
    patch, merge = files.get("patch_size"), files.get("merge_size")
    token = (patch * merge) ** 2 if isinstance(patch, int) and isinstance(merge, int) else 1
    if isinstance(most, int) and most < token:
        raise ConfigError(
            f"{where}images.max_pixels={most}: a token of an image has {token} pixels; set {token} or more"
        )
    if isinstance(least, int) and isinstance(most, int) and least > most:
        set_, other = ("max", "min") if "longest_edge" in size else ("min", "max")
        values = {"max": most, "min": least}
        raise ConfigError(
            f"{where}images.{set_}_pixels={values[set_]}: the files of the model's processor have "
            f"{other}_pixels={values[other]}, so that no size would be right; set images.{other}_pixels too"
        )


def bad_image(found: str, accepted: str, remedy: str = "") -> BadRowError:
    """The error for a row with an image that cannot be used."""
    return BadRowError(found, _REASON, accepted, remedy)


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """Where the images of a source are, and where those that its rows have are put. Picklable.

    Args:
        root: the folder or ZIP archive below which rows name images by path; None: there is none.
        store: a folder for the bytes of each image, under its digest.
        url: of a folder in a bucket or on a server, in place of ``root``.
        credentials: of URLs in buckets.
    """

    root: Path | None
    store: Path
    url: str | None = None
    credentials: Credentials = field(default_factory=dict)

    @staticmethod
    def of(source: Source, store: Path) -> "ImageFiles":
        """Those of a source: in its option ``images``, or in the folder or archive that it is."""
        paths = local_paths(source.images or source.path)
        is_root = len(paths) == 1 and (paths[0].is_dir() or paths[0].suffix.lower() == ".zip")
        is_remote = not is_root and is_url(source.path) and not _FILE.search(place_of(source.path).name)
        return ImageFiles(
            root=paths[0] if is_root else None, store=store, url=source.path.rstrip("/") if is_remote else None,
            credentials=source.credentials,
        )  # fmt: skip

    def mark(self, value: object, what: str) -> str:
        """Checks and stores an image; returns its mark."""
        data = self._bytes(value, what)
        digest = hashlib.sha256(data).hexdigest()
        path = self.store / digest
        if not path.exists():
            check_image(data, what)
            self.store.mkdir(exist_ok=True)
            draft = path.with_name(f"{digest}.{os.getpid()}")  # another process may write the same image
            draft.write_bytes(data)
            draft.replace(path)
        return f"<image:{digest}>"

    def _bytes(self, value: object, what: str) -> bytes:
        """The bytes of an image in any public form: a path, a data URL, bytes, or an object that has one of these."""
        match value:
            case bytes():
                return value
            case str() if value.startswith("data:"):
                return _decoded(value.partition(",")[2], what)
            case str() if is_url(value) and not value.startswith("file://"):
                return self._fetched(value, what)
            case str() if value:
                return self._read(value.removeprefix("file://"), what)
            case Mapping():
                kind = value.get("type")
                for key in _PAYLOADS:
                    item = value.get(key)
                    if is_nothing(item):
                        continue
                    if isinstance(item, str) and (key in ("bytes", "base64", "data", "binary")):
                        return _decoded(item, what)
                    if key == "content" and kind == "image_binary" and isinstance(item, str):
                        return _decoded(item, what)
                    return self._bytes(item, what)
        accepted = 'a path, a data URL, bytes, {"bytes": ...}, {"path": "..."} or {"url": "data:..."}'
        raise bad_image(f"{what} is {named(value)}", accepted)

    def _fetched(self, url: str, what: str) -> bytes:
        is_own = url.startswith(f"{self.url}/") and ".." not in url
        if not is_own and not url.startswith(("http://", "https://")):  # a row names no file of this machine, or bucket
            raise bad_image(
                f"{what}: {url[:200]!r} is outside of the source",
                "http://, https://, and what is below the source",
                "set sources.NAME.images to the URL of the folder",
            )
        try:
            with ExitStack() as stack:
                if not is_own:
                    file = stack.enter_context(urllib.request.urlopen(request(url), timeout=_FETCH_SECONDS))
                else:
                    file = stack.enter_context(open_remote(url, self.credentials))
                data: bytes = file.read(MAX_BYTES + 1)
        except Exception as error:  # file systems have no common base for their errors
            found = f"{what}: {url[:200]!r} cannot be read ({first_line(error, self.credentials)})"
            raise bad_image(
                found, "an image that is there", "correct the URL, or save the image and name it"
            ) from error
        return data

    def _read(self, name: str, what: str) -> bytes:
        root = self.url or self.root
        if root is None:
            raise bad_image(
                f"{what} is the path {name!r}, and the source is a file of rows alone",
                "paths below a folder or a ZIP archive that is the source, or below its images",
                "set sources.NAME.images to the folder (of posttrain data: images=FOLDER), or sources.NAME.path to the "
                "folder of rows and images",
            )
        place = os.path.normpath(os.path.relpath(name, root) if os.path.isabs(name) and not self.url else name)
        inside = f"a path below {root}"
        if place.startswith("..") or os.path.isabs(place):
            raise bad_image(f"{what} is the path {name!r}, which is outside", inside, "put it there")
        if isinstance(root, str):
            return self._fetched(f"{root}/{place}", what)
        return _of_folder(root, place, what) if root.is_dir() else _of_archive(root, place, what)


def _of_folder(root: Path, place: str, what: str) -> bytes:
    inside, (first, *others) = f"a path below {root}", Path(place).parts
    path = root / place
    if others and not (root / first).exists():  # it may be the root by another name, as in mllm_demo_data/1.jpg
        path = root.joinpath(*others) if root.joinpath(*others).is_file() else path
    if not path.is_file() and len(folders := _folders(root)) == 1:  # which has the rows too
        path = root / folders[0] / place if (root / folders[0] / place).is_file() else path
    if not path.is_file():
        raise bad_image(f"{what}: there is no file {path}", inside, "put it there, or correct the path")
    if not path.resolve().is_relative_to(root.resolve()):
        raise bad_image(f"{what}: {path} is a link that leads outside", inside, "put a copy there")
    _require_small(path.stat().st_size, what)
    return path.read_bytes()


def _of_archive(root: Path, place: str, what: str) -> bytes:
    archive, name = _archive(root), PurePosixPath(place).as_posix()
    try:
        name = name if name in archive.NameToInfo else f"{_top(root)}{name}"
        info = archive.getinfo(name)
    except KeyError:
        raise bad_image(f"{what}: there is no file {place} in {root}", f"a path below {root}", "add it") from None
    _require_small(info.file_size, what)
    try:
        return archive.read(info)
    except (BadZipFile, RuntimeError, OSError, NotImplementedError, zlib.error, EOFError) as error:
        raise bad_image(f"{what}: {place} cannot be unpacked ({error})", "a plain ZIP archive") from error


def _require_small(size: int, what: str) -> None:
    if size > MAX_BYTES:
        raise bad_image(f"{what} has {size} bytes", f"at most {MAX_BYTES}", "save it smaller")


def _decoded(text: str, what: str) -> bytes:
    _require_small(len(text) * 3 // 4, what)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_image(f"{what} is not base64 ({error})", "a data URL in base64") from error


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"  # which macOS adds to an archive


@lru_cache(maxsize=4)
def _folders(root: Path) -> list[str]:
    """The folders in a folder that has nothing else but hidden ones."""
    found = [each for each in root.iterdir() if not _is_hidden(each.name)]
    return [each.name for each in found] if all(each.is_dir() for each in found) else []


@lru_cache(maxsize=4)
def _archive(path: Path) -> ZipFile:
    return ZipFile(path)


@lru_cache(maxsize=4)
def _top(archive: Path) -> str:
    """The folder that all files of an archive are in, but hidden ones; empty: there is none."""
    found = {top for each in _archive(archive).namelist() if not _is_hidden(top := each.partition("/")[0])}
    return f"{found.pop()}/" if len(found) == 1 else ""


def check_image(data: bytes, what: str) -> None:
    """Requires that an image decodes, and is neither too large nor of an unknown mode."""
    _require_small(len(data), what)
    with _opened(data, what) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            found = f"{what} has {width} x {height} pixels"
            raise bad_image(found, f"at most {MAX_PIXELS} of them", "save it smaller")
        if image.mode not in _MODES:
            remedy = "convert it: PIL.Image.open(FILE).convert('RGB').save(NEW)"
            raise bad_image(f"{what} is of the mode {image.mode}", f"the modes {', '.join(_MODES)}", remedy)
        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            raise bad_image(f"{what} has {frames} frames", "one", "save one of them")
        image.load()


@contextmanager
def _opened(data: bytes, what: str) -> "Iterator[Image]":
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own limit of pixels
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                yield image
    except BadRowError:
        raise
    except Exception as error:  # its decoders have no common base for their errors
        cause = "it has no known format" if type(error).__name__ == "UnidentifiedImageError" else str(error)
        raise bad_image(f"{what} does not decode: {cause}", ", ".join(_FORMATS), "save it again") from error


def with_images(fields: Fields, files: ImageFiles) -> Fields:
    """A row whose images are marks in its texts, and no column of images.

    Raises:
        BadRowError: an image is bad, or the row's ``<image>`` and its images do not match.
    """
    require_no_marks(fields)
    columns = [name for name in COLUMNS if not is_nothing(fields.get(name))]
    if len(columns) > 1:
        raise bad_image("images and image are both there", "one column of images", "remove one of them")
    listed = fields[columns[0]] if columns else []
    images = listed if isinstance(listed, list | tuple) else [listed]
    rest = {name: value for name, value in fields.items() if name not in COLUMNS}
    names = sorted(rest, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    marks = [files.mark(value, f"{columns[0]}[{index}]") for index, value in enumerate(images)]
    starts, count = dict[str, int](), 0  # where the images of a column are among those of the row
    for name in names:
        starts[name] = starts.get(_SIDES[0], count) if name == _SIDES[1] else count
        count = max(count, starts[name] + _places(rest[name]))
    if images and not count:  # as TRL does
        for name in names:
            rest[name], placed = _before_first(rest[name], "".join(marks))
            if placed and name != _SIDES[0]:
                return rest
        raise bad_image(f"the row has {len(images)} images, and no text for them", "a text of the user")
    if count != len(images) and any(name in fields for name in COLUMNS):
        raise bad_image(
            f"the row has {len(images)} images, and {count} places for them", f"one {_WRITTEN} for each image",
            "correct the row",
        )  # fmt: skip
    put = {name: _Put(files=files, marks=iter(marks[starts[name] :]) if images else None) for name in names}
    return {name: put[name](value, name) for name, value in rest.items()}


def require_no_marks(value: object) -> None:
    """Refuses a text that spells the mark of an image, which would be read as that image."""
    match value:
        case str():
            if "<image:" in value and (found := MARK.search(value)):
                raise bad_image(f"a text spells {found[0]}", "texts without the mark of a stored image", "change it")
        case Mapping():
            for each in value.values():
                require_no_marks(each)
        case list() | tuple():
            for each in value:
                require_no_marks(each)


def require_none_in_answers(row: Fields, answers: Iterable[str]) -> None:
    """Refuses an image in an answer of a converted row, which no model here writes."""
    for name in answers:
        turns = row[name]
        if isinstance(turns, list) and any(MARK.search(str(turn.get("content"))) for turn in turns):
            raise bad_image(f"{name} has an image", "images in prompts", "move it into the prompt, or remove the row")


def has_images(fields: Fields) -> bool:
    """Whether a row names an image, or has a place for one of its column, which may be empty."""
    named = [name for name in COLUMNS if name in fields]
    in_column = any(not is_nothing(fields[name]) for name in named) or (named and _places(list(fields.values())))
    return bool(in_column) or names_images(fields)


def names_images(fields: Fields) -> bool:
    """Whether a row names an image, in its column or in a content."""
    columns = [fields.get(name) for name in COLUMNS]
    if not all(is_nothing(each) for value in columns for each in (value if isinstance(value, list) else [value])):
        return True
    values = [each for value in fields.values() for each in (value.values() if isinstance(value, dict) else [value])]
    turns = (turn for value in values if isinstance(value, list) for turn in value)
    contents = (content for turn in turns if isinstance(turn, dict) for content in turn.values())
    return any(_is_image(part) for content in contents if isinstance(content, list) for part in content)


def _is_image(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("type") in _KINDS


def _is_empty(part: Mapping[str, object]) -> bool:
    """Whether an item is the place of an image of the column."""
    return all(is_nothing(part.get(key)) for key in _PAYLOADS)


def _places(value: object) -> int:
    """How many places for images of the column a value has."""
    match value:
        case str():
            return value.count(_WRITTEN)
        case Mapping() if _is_image(value):
            return int(_is_empty(value))
        case Mapping():
            return sum(map(_places, value.values()))
        case list() | tuple():
            return sum(map(_places, value))
    return 0


@dataclass(frozen=True, kw_only=True)
class _Put:
    """Puts marks into the values of a row; ``marks``: of its column, None: there is none."""

    files: ImageFiles
    marks: Iterator[str] | None

    def __call__(self, value: object, what: str) -> object:
        match value:
            case str() if self.marks and _WRITTEN in value:
                first, *others = value.split(_WRITTEN)
                return first + "".join(f"{next(self.marks)}{text}" for text in others)
            case Mapping() if _is_image(value):
                mark = next(self.marks) if self.marks and _is_empty(value) else self.files.mark(value, what)
                return {"type": "text", "text": mark}
            case Mapping():
                made = {key: self(item, f"{what} {key}") for key, item in value.items()}
                role = value.get("role", value.get("from"))
                if role in _ANSWERS and made != value:
                    raise bad_image(f"{what} of the {role} has an image", "images in prompts", "remove the row")
                return made
            case list() | tuple():
                return [self(item, f"{what}[{index}]") for index, item in enumerate(value)]
        return value


def _before_first(value: object, marks: str) -> tuple[object, bool]:
    """A prompt, or turns, with marks before the first text of the user; and whether there is one."""
    if isinstance(value, str):
        return marks + value, True
    if isinstance(value, Mapping) and "messages" in value:
        messages, placed = _before_first(value["messages"], marks)
        return {**value, "messages": messages}, placed
    turns = list(value) if isinstance(value, list) else []
    for place, turn in enumerate(turns):
        if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in _ASKS:
            key = "content" if "content" in turn else "value"
            content = turn.get(key)
            before = [{"type": "text", "text": marks}, *content] if isinstance(content, list) else f"{marks}{content}"
            turns[place] = {**turn, key: before}
            return turns, True
    return value, False


# The images of prepared rows.


def marked(texts: Iterable[str]) -> list[str]:
    """The digests of the images of texts, in their order."""
    return [digest for text in texts for digest in MARK.findall(text)]


def named_images(text: str) -> str:
    """A text for people, in which an image is ``[image]``."""
    return MARK.sub("[image]", text)


def write_images(digests: Iterable[str], folders: Sequence[Path], old: "Sequence[StoredImages]", file: Path) -> int:
    """Writes images into one file, sorted by digest; the same images give the same bytes.

    Args:
        folders: that have them under their digests.
        old: files that have the others.

    Returns:
        How many there are.
    """
    import pyarrow as pa

    schema = pa.schema([("digest", pa.string()), ("bytes", pa.large_binary())])
    wanted = sorted(set(digests))
    pending, size = list[tuple[str, bytes]](), 0
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for digest in [*wanted, None]:
            if digest is not None:
                paths = (folder / digest for folder in folders)
                path = next((path for path in paths if path.exists()), None)
                data = path.read_bytes() if path else next(each.read(digest) for each in old if digest in each.places)
                pending.append((digest, data))
                size += len(data)
            if pending and (digest is None or size > _BATCH_BYTES):
                writer.write_batch(pa.record_batch(list(map(list, zip(*pending, strict=True))), schema))
                pending, size = [], 0
    return len(wanted)


@dataclass(frozen=True)
class StoredImages:
    """The images of prepared rows, mapped into memory. Can be pickled."""

    file: Path

    @staticmethod
    def beside(rows: Path) -> "StoredImages | None":
        """Those of the rows in a directory; None: they have none."""
        file = rows / IMAGES
        return StoredImages(file) if file.exists() else None

    def __reduce__(self) -> "tuple[Callable[[Path], StoredImages], tuple[Path]]":
        return StoredImages, (self.file,)

    @cached_property
    def _table(self) -> "pa.Table":
        import pyarrow as pa

        return pa.ipc.open_file(pa.memory_map(str(self.file))).read_all()

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Digest -> place."""
        return {digest: place for place, digest in enumerate(self._table["digest"].to_pylist())}

    def read(self, image: str | int) -> bytes:
        """The bytes of an image, by its digest or place."""
        place = image if isinstance(image, int) else self.places[image]
        data: bytes = self._table["bytes"][place].as_py()
        return data

    def size(self, place: int) -> tuple[int, int]:
        """Width and height of ``image``, from the file's header alone."""
        from PIL import Image

        with Image.open(io.BytesIO(self.read(place))) as image:
            (width, height), turned = image.size, image.getexif().get(_ORIENTATION, 1) > 4
        return (height, width) if turned else (width, height)

    def image(self, place: int) -> "Image":
        """An image as transformers' ``load_image`` gives it: turned as its EXIF data say, in RGB."""
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(self.read(place))) as image:
            return ImageOps.exif_transpose(image).convert("RGB")


def require_no_images(rows: Path, name: str, what: str, remedy: str = "") -> None:
    """Refuses rows with images."""
    if (rows / IMAGES).exists():
        raise DataError(
            f"{what}: the rows of {name!r} have images, which it does not read; give it rows of text{remedy}"
        )

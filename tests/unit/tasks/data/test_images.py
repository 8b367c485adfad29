"""Images of rows: every public form is read, bad ones are named with a remedy, and each is stored once."""

import base64
import io
import json
import zipfile
from collections.abc import Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lineage.artifact import Kind, Source
from lineage.errors import DataError
from tasks.context import TrainContext
from tasks.data.formats.detect import detect
from tasks.data.formats.turns import BadRowError
from tasks.data.images import (
    IMAGES,
    MARK,
    ImageFiles,
    StoredImages,
    check_image,
    has_images,
    names_images,
    require_none_in_answers,
    with_images,
)
from tasks.data.kinds import messages_of
from tasks.method import Input
from tasks.prepare_data import PrepareConversations, PreparePreferences
from tasks.unpair import Unpair
from tests import prepared

ANSWER = {"role": "assistant", "content": "a"}


def png(color: str, size: tuple[int, int] = (4, 3), mode: str = "RGB", format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).convert(mode).save(file, format)
    return file.getvalue()


RED, BLUE = png("red"), png("blue")
URL = "data:image/png;base64," + base64.b64encode(RED).decode()


@pytest.fixture
def files(tmp_path: Path) -> ImageFiles:
    (tmp_path / "in" / "pictures").mkdir(parents=True)
    (tmp_path / "in" / "red.png").write_bytes(RED)
    (tmp_path / "in" / "pictures" / "blue.png").write_bytes(BLUE)
    (tmp_path / "secret.png").write_bytes(BLUE)
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "secret.png")
    return ImageFiles(root=tmp_path / "in", store=tmp_path / "store")


def user(*parts: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


WHAT = {"type": "text", "text": "What?"}
MARKED = {"messages": [{"role": "user", "content": "<image>What?"}, ANSWER]}
ITEMS: Mapping[str, object] = {
    "path": {"type": "image", "path": "red.png"},
    "image as path": {"type": "image", "image": "red.png"},
    "file URL": {"type": "image", "url": "file://red.png"},
    "image as data URL": {"type": "image", "image": URL},
    "image as base64": {"type": "image", "base64": base64.b64encode(RED).decode()},
    "image as bytes": {"type": "image", "image": {"bytes": RED, "path": None}},
    "OpenAI's": {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    "OpenAI's short": {"type": "image_url", "image_url": "red.png"},
    "OpenAI's responses": {"type": "input_image", "image_url": URL},
    "Anthropic's": {"type": "image", "source": {"type": "base64", "data": base64.b64encode(RED).decode()}},
    "Oumi's path": {"type": "image_path", "content": "red.png"},
    "Oumi's URL": {"type": "image_url", "content": URL},
    "Oumi's bytes": {"type": "image_binary", "binary": base64.b64encode(RED).decode()},
    "LLaMA-Factory's": {"type": "image_url", "value": "red.png"},
}
ROWS: Mapping[str, Mapping[str, object]] = {
    **{name: user(item, WHAT) for name, item in ITEMS.items()},
    "LLaMA-Factory": {**MARKED, "images": ["red.png"]},
    "a data set of TRL": {**user({"type": "image"}, WHAT), "images": [{"bytes": RED, "path": "elsewhere.png"}]},
    "LLaVA": {"conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "a"}],
              "image": "red.png"},
    "Alpaca": {"instruction": "<image>What?", "input": "", "output": "a", "images": ["red.png"]},
    "prompt and completion": {"prompt": "<image>What?", "completion": "a", "images": [URL]},
    "no mark": {"messages": [{"role": "user", "content": "What?"}, ANSWER], "images": ["red.png"]},
    "no mark, prompt": {"completion": "a", "prompt": "What?", "image": "red.png"},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_form_of_an_image_is_the_mark_of_its_bytes(files: ImageFiles, name: str) -> None:
    row = with_images(ROWS[name], files)
    made = detect([row], "rows").convert(row)
    (mark,) = [path.name for path in files.store.iterdir()]
    assert messages_of(made["messages"]) == [{"role": "user", "content": f"<image:{mark}>What?"}, ANSWER]
    assert (files.store / mark).read_bytes() == RED


def test_an_image_of_a_url_is_fetched(files: ImageFiles, tmp_path: Path) -> None:
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "in"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for item in ({"type": "image", "url": f"{address}/red.png"},
                     {"type": "image_url", "image_url": {"url": f"{address}/red.png"}}):  # fmt: skip
            with_images(user(item, WHAT), files)
        with pytest.raises(BadRowError, match=r"no.png' cannot be read \(HTTPError: HTTP Error 404"):
            with_images(user({"type": "image", "url": f"{address}/no.png"}, WHAT), files)
        server.shutdown()
    assert [path.read_bytes() for path in files.store.iterdir()] == [RED]


def test_a_path_may_name_the_folder_of_images_by_another_name(files: ImageFiles) -> None:
    with_images({**MARKED, "images": ["mllm_demo_data/red.png"]}, files)
    assert [path.read_bytes() for path in files.store.iterdir()] == [RED]
    with pytest.raises(BadRowError, match=r"there is no file .*pictures/red.png"):  # a folder that is there
        with_images({**MARKED, "images": ["pictures/red.png"]}, files)


def test_several_images_stand_at_their_places_in_several_turns(files: ImageFiles) -> None:
    turns = [
        {"role": "user", "content": "<image>Or<image>?"}, ANSWER, {"role": "user", "content": "This:<image>"}, ANSWER,
    ]  # fmt: skip
    row = with_images({"messages": turns, "images": ["red.png", "pictures/blue.png", "red.png"]}, files)
    contents = [str(turn["content"]) for turn in row["messages"]]  # type: ignore[attr-defined]
    found = [[(files.store / digest).read_bytes() for digest in MARK.findall(content)] for content in contents]
    assert found == [[RED, BLUE], [], [RED], []]
    assert MARK.sub("_", contents[0]) == "_Or_?"
    assert len(list(files.store.iterdir())) == 2


@pytest.mark.parametrize(
    ("row", "found", "remedy"),
    [
        ({**MARKED, "images": ["red.png", "red.png"]}, "the row has 2 images, and 1 places", "one <image> for each"),
        ({**MARKED, "images": []}, "the row has 0 images, and 1 places", "one <image> for each"),
        (user({"type": "image"}, WHAT), r"messages\[0\] content\[0\] is an object", "a path, a data URL, bytes"),
        (user({"type": "image", "url": "http://127.0.0.1:1/a.png"}), r"'http://127.0.0.1:1/a.png' cannot be read \(",
         "correct the URL, or save the image"),
        *(
            ({**MARKED, "images": [f"{scheme}/red.png"]}, "is outside of the source", "NAME.images to the URL")
            for scheme in ("s3://other", "local:///tmp")
        ),
        ({**MARKED, "images": ["no.png"]}, r"images\[0\]: there is no file .*no.png", "put it there"),
        ({**MARKED, "images": ["../secret.png"]}, "is the path '../secret.png', which is outside", "put it there"),
        ({**MARKED, "images": ["/etc/passwd"]}, "which is outside", "put it there"),
        ({**MARKED, "images": ["link.png"]}, "is a link that leads outside", "put a copy there"),
        ({**MARKED, "images": ["data:image/png;base64,%%"]}, "is not base64", "a data URL in base64"),
        ({**MARKED, "images": [{"bytes": b"GIF"}]}, "does not decode: it has no known format", "save it again"),
        ({**MARKED, "images": [{"bytes": RED[:45]}]}, "does not decode: ", "save it again"),
        ({**MARKED, "images": [{"bytes": png("red", mode="I", format="TIFF")}]}, "is of the mode I", "convert it"),
        ({**MARKED, "images": [7]}, "is the number 7", "a path, a data URL"),
        ({**MARKED, "images": ["red.png"], "image": "red.png"}, "images and image are both there", "remove one"),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<image>"}],
          "images": ["red.png"]}, "of the assistant has an image", "images in prompts"),
    ],
)  # fmt: skip
def test_a_bad_image_is_named_with_a_remedy(
    files: ImageFiles, row: Mapping[str, object], found: str, remedy: str
) -> None:
    with pytest.raises(BadRowError, match=found) as error:
        with_images(row, files)
    assert remedy in str(error.value)
    assert has_images(row)


@pytest.mark.parametrize("column", [[], [None], None, [""]])
def test_an_empty_column_names_no_image_and_its_place_is_refused(files: ImageFiles, column: object) -> None:
    row = {**MARKED, "images": column}
    assert has_images(row) and not names_images(row)
    with pytest.raises(BadRowError, match=r"the row has 0 images, and 1 places|images\[0\] is"):
        with_images(row, files)


def test_a_text_about_a_mark_is_a_text() -> None:
    assert not has_images(MARKED)
    assert not has_images({"messages": [{"role": "user", "content": "?"}, ANSWER], "images": []})


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_cut_image_is_refused_unless_all_its_pixels_are_there(format: str) -> None:
    file = io.BytesIO()
    Image.effect_noise((24, 20), 80).save(file, format)
    data, refused = file.getvalue(), 0
    whole = Image.open(file).convert("RGB").tobytes()
    for length in range(len(data) - 40, len(data)):
        try:
            check_image(data[:length], "it")
        except BadRowError:
            refused += 1
        else:
            assert Image.open(io.BytesIO(data[:length])).convert("RGB").tobytes() == whole, length
    assert refused >= 19  # after the pixels a PNG has 21 bytes


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(files: ImageFiles) -> None:
    bomb = png("white", (9000, 9000), mode="1")
    assert len(bomb) < 30_000
    with pytest.raises(BadRowError, match="has 9000 x 9000 pixels; accepted: at most 67108864"):
        with_images({**MARKED, "images": [{"bytes": bomb}]}, files)


def run(folder: Path, source: Source, method: PrepareConversations | None = None) -> dict[str, float]:
    given = Input(name="rows", kind=Kind.ROWS, fingerprint="", path=Path(source.path), source=source)
    stage = method or PrepareConversations(held_out=0.4)
    context = TrainContext(output_dir=folder / "out", work_dir=folder)
    return prepared.named(stage, {"rows": given}, stage.run({"rows": given}, context))


def question(color: str, text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"<image>{text}"}, ANSWER], "images": [f"{color}.png"]}


LONG = "Which of all the colours that there are is the one of the square in the picture that you see here"
COLOURS = ("red", "blue", "green", "yellow", "white", "black")
QUESTIONS = [question(color, LONG) for color in COLOURS]


@pytest.fixture(params=["folder", "zip", "zip of a folder", "images", "parquet"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    folder = tmp_path / "data"
    folder.mkdir()
    for color in COLOURS:
        (folder / f"{color}.png").write_bytes(png(color))
    lines = "".join(json.dumps(row) + "\n" for row in [*QUESTIONS, QUESTIONS[0]])
    match request.param:
        case "folder":
            (folder / "train.jsonl").write_text(lines)
            return Source(path=str(folder))
        case "zip" | "zip of a folder" as kind:
            top = "set/" if kind != "zip" else ""
            with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
                archive.writestr(f"{top}train.jsonl", lines)
                archive.writestr(f"__MACOSX/{top}._train.jsonl", "as macOS adds them")
                for path in folder.iterdir():
                    archive.write(path, f"{top}{path.name}")
            return Source(path=str(tmp_path / "data.zip"))
        case "images":
            (tmp_path / "rows.jsonl").write_text(lines)
            return Source(path=str(tmp_path / "rows.jsonl"), images=str(folder))
    rows = [{**row, "images": [{"bytes": png(str(row["images"][0])[:-4]), "path": None}]} for row in  # type: ignore
            [*QUESTIONS, QUESTIONS[0]]]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return Source(path=str(tmp_path / "rows.parquet"))


def test_rows_of_a_folder_an_archive_and_a_table_are_the_same_rows_with_each_image_once(
    tmp_path: Path, source: Source
) -> None:
    metrics = run(tmp_path, source)
    assert metrics["images"] == 6 and metrics["duplicates"] == 1
    # The images alone tell the questions apart.
    assert metrics["near_duplicate_rows"] == metrics["leaked_rows"] == 0
    stored = StoredImages.beside(tmp_path / "out")
    assert stored and sorted(stored.places) == list(stored.places)
    rows = [*prepared.side(tmp_path, "train"), *prepared.side(tmp_path, "held_out")]
    found = [MARK.findall(str(messages_of(row["messages"])[0]["content"])) for row in rows]
    assert {stored.read(digest) for (digest,) in found} == {png(color) for color in COLOURS}
    assert stored.image(0).size == (4, 3) and stored.image(0).mode == "RGB"
    written = (tmp_path / "out" / IMAGES).read_bytes()
    run(tmp_path, source)
    assert (tmp_path / "out" / IMAGES).read_bytes() == written


def test_an_image_on_both_sides_is_counted(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(question("red", f"question {number}")) + "\n" for number in range(8))
    )
    metrics = run(tmp_path, Source(path=str(tmp_path / "rows.jsonl"), images=str(tmp_path)))
    assert metrics["images"] == 1 and metrics["held_out_rows_with_trained_images"] == metrics["held_out_rows"] > 0


def test_a_bad_image_is_a_bad_row_with_its_line(tmp_path: Path) -> None:
    rows = [*(question("red", str(number)) for number in range(4)), question("no", "?")]
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        DataError, match=r"rows.jsonl:5: images\[0\]: there is no file .*no.png; accepted: a path below"
    ):
        run(tmp_path, Source(path=str(tmp_path / "rows.jsonl"), images=str(tmp_path)))
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*a file of rows alone.*set sources.NAME.images to the folder"):
        run(tmp_path, Source(path=str(tmp_path / "rows.jsonl")))


@pytest.mark.parametrize("has_own_image", [False, True])
def test_a_text_that_spells_the_mark_of_an_image_is_a_bad_row(tmp_path: Path, has_own_image: bool) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    mark = f"<image:{'a' * 64}>"
    content = [{"type": "text", "text": mark}, *([{"type": "image", "path": "red.png"}] if has_own_image else [])]
    rows = [*(question("red", str(number)) for number in range(4)), user(*content)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"rows.jsonl:5: a text spells {mark}; accepted: texts without the mark"):
        run(tmp_path, Source(path=str(tmp_path / "rows.jsonl"), images=str(tmp_path)))


ASKED = {"role": "user", "content": [{"type": "image"}, WHAT]}
GOOD, BAD = ({"role": "assistant", "content": text} for text in "ab")
PAIRS: Mapping[str, Mapping[str, object]] = {
    "texts": {"prompt": "<image>What?", "chosen": "a", "rejected": "b", "images": [URL]},
    "no mark": {"prompt": "What?", "chosen": "a", "rejected": "b", "image": "red.png"},
    "messages": {"prompt": [user({"type": "image", "image": "red.png"}, WHAT)["messages"][0]],  # type: ignore[index]
                 "chosen": [GOOD], "rejected": [BAD]},
    "TRL": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "images": ["red.png"]},
    "TRL, no prompt": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "images": ["red.png"]},
    "no prompt, no mark": {"chosen": [{"role": "user", "content": "What?"}, GOOD],
                           "rejected": [{"role": "user", "content": "What?"}, BAD], "images": ["red.png"]},
    "LLaMA-Factory": {"conversations": [{"from": "human", "value": "<image>What?"}],
                      "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"},
                      "images": ["red.png"]},
    "OpenAI": {"input": {"messages": [{"role": "user", "content": [
                   {"type": "image_url", "image_url": {"url": URL}}, WHAT]}]},
               "preferred_output": [GOOD], "non_preferred_output": [BAD]},
    "Oumi": {"messages": [{"role": "user", "content": [{"type": "image_path", "content": "red.png"}, WHAT]}],
             "chosen": {"messages": [GOOD]}, "rejected": {"messages": [BAD]}},
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_have_images_in_their_prompts(files: ImageFiles, name: str) -> None:
    row = with_images(PAIRS[name], files)
    made = detect([row], "rows").convert(row)
    require_none_in_answers(made, ("chosen", "rejected"))
    (mark,) = [path.name for path in files.store.iterdir()]
    assert messages_of(made["prompt"]) == [{"role": "user", "content": f"<image:{mark}>What?"}]
    assert [messages_of(made[side])[0]["content"] for side in ("chosen", "rejected")] == ["a", "b"]


def test_an_image_in_an_answer_of_a_pair_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "What?", "chosen": "<image>a", "rejected": "b", "images": [URL]}) + "\n"
    )
    with pytest.raises(DataError, match=r"rows.jsonl:1: chosen has an image; accepted: images in prompts"):
        run(tmp_path, Source(path=str(tmp_path / "rows.jsonl")), PreparePreferences(held_out=0.5))  # type: ignore[arg-type]


def test_single_answers_of_pairs_keep_their_images(tmp_path: Path) -> None:
    rows = [{**PAIRS["texts"], "prompt": f"<image>{number}?"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path, Source(path=str(tmp_path / "rows.jsonl")), PreparePreferences(held_out=0.5))  # type: ignore[arg-type]
    pairs = Input(name="pairs", kind=Kind.PREFERENCES, fingerprint="", path=tmp_path / "out")
    Unpair().run({"pairs": pairs}, TrainContext(output_dir=tmp_path / "single", work_dir=tmp_path))
    stored = StoredImages.beside(tmp_path / "single")
    assert stored and [stored.read(0)] == [RED]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [("../train.jsonl", b"{}", "which is outside of it"), ("train.jsonl", b"0" * 2**25, "unpacks from")],
)
def test_a_hostile_archive_is_refused(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    with pytest.raises(DataError, match=problem):
        run(tmp_path, Source(path=str(tmp_path / "data.zip")))


@pytest.mark.parametrize("damaged", ["train.jsonl", "red.png"])
def test_a_damaged_archive_is_named(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "data.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.jsonl", "".join(json.dumps(question("red", str(number))) + "\n" for number in range(9)))
        archive.writestr("red.png", RED)
        start = archive.getinfo(damaged).header_offset + 30 + len(damaged)
    content = bytearray(path.read_bytes())
    content[start : start + 4] = b"\xff\xff\xff\xff"  # no block of a deflated stream begins so
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be unpacked"):
        run(tmp_path, Source(path=str(path)))

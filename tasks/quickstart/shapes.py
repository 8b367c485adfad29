"""Pictures that are drawn here, with questions about them, for a small model that reads images from scratch."""

import base64
import io
import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SIZE = 32  # pixels of a side
_CELL = SIZE // 2
COLOURS = {
    "red": (220, 20, 20), "green": (20, 150, 40), "blue": (30, 60, 220), "yellow": (240, 210, 20),
    "black": (10, 10, 10), "purple": (150, 40, 180),
}  # fmt: skip
SHAPES = ("square", "circle", "triangle", "cross")
NUMBERS = ("one", "two", "three", "four")
ANSWERS = {  # question -> its possible answers
    "What colour is it?": (*COLOURS,), "Which shape is it?": SHAPES, "How many are there?": NUMBERS,
    "Which bar is highest?": (*COLOURS,),
}  # fmt: skip
QUESTIONS = (*ANSWERS,)
_NUM_ROWS, _NUM_PAIRS = 6000, 1500
_BARS, _STEP = 3, 4  # of a chart: bars, and pixels from one height to the next


def rows() -> Iterator[dict[str, object]]:
    """Rows {messages, images}: a picture, and one question about it."""
    for question, answer, image in itertools.islice(_drawn(random.Random(0)), _NUM_ROWS):
        asked = {"role": "user", "content": f"<image>{question}"}
        yield {"messages": [asked, {"role": "assistant", "content": answer}], "images": [image]}


def pairs() -> Iterator[dict[str, object]]:
    """Rows {prompt, chosen, rejected, images}: the right answer to a question about a picture, and a wrong one.

    No picture is one of ``rows``: held-out pairs ask about pictures on which nothing was trained.
    """
    draw = random.Random(1)
    trained = {image for _, _, image in itertools.islice(_drawn(random.Random(0)), _NUM_ROWS)}
    others = (each for each in _drawn(draw) if each[2] not in trained)
    for question, answer, image in itertools.islice(others, _NUM_PAIRS):
        wrong = draw.choice([each for each in ANSWERS[question] if each != answer])
        yield {"prompt": f"<image>{question}", "chosen": answer, "rejected": wrong, "images": [image]}


def questions() -> Iterator[dict[str, object]]:
    """Rows {text}, for a tokenizer with a token per word."""
    for text in ("user", "assistant", *QUESTIONS, *COLOURS, *SHAPES, *NUMBERS):
        for _ in range(4):
            yield {"text": text}


def _drawn(draw: random.Random) -> Iterator[tuple[str, str, str]]:
    """Without end: a question, its answer, and its picture as a data URL."""
    while True:
        question = draw.choice(QUESTIONS)
        if question == QUESTIONS[3]:
            answer, data = chart(draw)
        else:
            colour, shape, count = draw.choice(list(COLOURS)), draw.choice(SHAPES), draw.randrange(len(NUMBERS))
            answer = (colour, shape, NUMBERS[count])[QUESTIONS.index(question)]
            data = picture(colour, shape, count + 1, draw)
        yield question, answer, "data:image/bmp;base64," + base64.b64encode(data).decode()


def picture(colour: str, shape: str, count: int, draw: random.Random) -> bytes:
    """Shapes of one size in some of the quarters."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE, SIZE), "white")
    pen, side = ImageDraw.Draw(image), draw.randrange(8, 13)
    for place in draw.sample(range(4), count):
        left = place % 2 * _CELL + draw.randrange(1, _CELL - side)
        top = place // 2 * _CELL + draw.randrange(1, _CELL - side)
        _draw(pen, shape, (left, top, left + side, top + side), COLOURS[colour])
    return _bmp(image)


def chart(draw: random.Random) -> tuple[str, bytes]:
    """Bars of other colours and heights; and the colour of the highest."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE, SIZE), "white")
    pen, width = ImageDraw.Draw(image), SIZE // _BARS
    colours, heights = draw.sample(list(COLOURS), _BARS), draw.sample(range(_STEP, SIZE, _STEP), _BARS)
    for place, (colour, height) in enumerate(zip(colours, heights, strict=True)):
        left = place * width + 1
        pen.rectangle((left, SIZE - height, left + width - 3, SIZE - 1), COLOURS[colour])
    return colours[heights.index(max(heights))], _bmp(image)


def _bmp(image: "Image") -> bytes:
    """As BMP, which every version of Pillow writes alike."""
    file = io.BytesIO()
    image.save(file, "BMP")
    return file.getvalue()


def _draw(pen: "ImageDraw", shape: str, box: tuple[int, int, int, int], fill: tuple[int, int, int]) -> None:
    left, top, right, bottom = box
    middle = (left + right) // 2
    match shape:
        case "square":
            pen.rectangle(box, fill)
        case "circle":
            pen.ellipse(box, fill)
        case "triangle":
            pen.polygon([(middle, top), (left, bottom), (right, bottom)], fill)
        case _:
            pen.line([(middle, top), (middle, bottom)], fill, 3)
            pen.line([(left, (top + bottom) // 2), (right, (top + bottom) // 2)], fill, 3)

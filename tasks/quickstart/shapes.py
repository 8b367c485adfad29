"""Pictures that are drawn here, with questions about them, for a small model that reads images from scratch."""

import base64
import io
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

SIZE = 32  # pixels of a side
_CELL = SIZE // 2
COLOURS = {
    "red": (220, 20, 20), "green": (20, 150, 40), "blue": (30, 60, 220), "yellow": (240, 210, 20),
    "black": (10, 10, 10), "purple": (150, 40, 180),
}  # fmt: skip
SHAPES = ("square", "circle", "triangle", "cross")
NUMBERS = ("one", "two", "three", "four")
QUESTIONS = ("What colour is it?", "Which shape is it?", "How many are there?")
_NUM_ROWS = 6000


def rows() -> Iterator[dict[str, object]]:
    """Rows {messages, images}: a picture of one to four equal shapes, and one question about it."""
    draw = random.Random(0)
    for _ in range(_NUM_ROWS):
        colour, shape, count = draw.choice(list(COLOURS)), draw.choice(SHAPES), draw.randrange(len(NUMBERS))
        question, answer = draw.choice(list(zip(QUESTIONS, (colour, shape, NUMBERS[count]), strict=True)))
        data = picture(colour, shape, count + 1, draw)
        yield {
            "messages": [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": answer}],
            "images": ["data:image/bmp;base64," + base64.b64encode(data).decode()],
        }


def questions() -> Iterator[dict[str, object]]:
    """Rows {text}, for a tokenizer with a token per word."""
    for text in ("user", "assistant", *QUESTIONS, *COLOURS, *SHAPES, *NUMBERS):
        for _ in range(4):
            yield {"text": text}


def picture(colour: str, shape: str, count: int, draw: random.Random) -> bytes:
    """Shapes of one size in some of the quarters, as BMP, which every version of Pillow writes alike."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE, SIZE), "white")
    pen, side = ImageDraw.Draw(image), draw.randrange(8, 13)
    for place in draw.sample(range(4), count):
        left = place % 2 * _CELL + draw.randrange(1, _CELL - side)
        top = place // 2 * _CELL + draw.randrange(1, _CELL - side)
        _draw(pen, shape, (left, top, left + side, top + side), COLOURS[colour])
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

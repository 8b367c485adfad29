"""How a model reads images, by its own files: its processor, the tokens of an image, and what the tower gets.

A chat template writes a placeholder for each image, which the processor replaces by the tokens of the image: as many as
its size asks for, with what the family puts around them. ``Vision.expanded`` does that in the rendered text, so that
tokens, spans and cuts are those of text. ``Vision.inputs`` makes the pixels of a batch.

In Llama 3.2 Vision an image is one token, and some layers attend to it beside the text (``see_by_row``).
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from lineage.errors import ConfigError, DataError
from lineage.filesystem.digest import DigestCache, digest_file
from lineage.source.model_files import PROCESSOR_FILES, read_json
from tasks.data.images import Images, StoredImages, marked, require_pixels
from tasks.data.kinds import MISMATCHED, PLACES, Message
from tasks.data.tokens.encoding import ImageSpan, Rendered
from tasks.data.tokens.tokenization import images_of_pack

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

_TEXT_INPUTS = ("input_ids", "attention_mask", "text_replacement_offsets")
_TYPES = "token_type_ids"  # ends the name of the input that says which tokens are those of an image
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_BLANK = (56, 56)  # pixels; those of processors that count pixels become as few as these allow
_R = TypeVar("_R", bound=Rendered)


def reads_images(directory: Path) -> bool:
    """Whether a model has a processor of images."""
    config = read_json(directory, "config.json")
    is_vision = isinstance(config, Mapping) and config.get("vision_config") is not None
    return is_vision and any((directory / name).exists() for name in PROCESSOR_FILES[:2])


def require_reads_images(directory: Path, name: str) -> None:
    """Requires that a model reads images (ConfigError: it is a model of text, or its processor's files are missing)."""
    if not reads_images(directory):
        raise ConfigError(
            f"{name}: a model of text, or one without the files of its processor ({', '.join(PROCESSOR_FILES[:2])}), "
            "reads no images; a model with a vision_config and these files is accepted; start from one, or "
            "set images=null"
        )


def processor_of(directory: Path, tokenizer: "PreTrainedTokenizerBase", size: Mapping[str, int]) -> "ProcessorMixin":
    """The processor of a model, as its files name it, with our tokenizer. Images are resized by Pillow everywhere.

    Its video processor, which needs torchvision, is left out.

    Raises:
        ConfigError: it cannot be loaded, or has another idea of size.
    """
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    configs = [each if isinstance(each := read_json(directory, name), Mapping) else {} for name in _FILES]
    config = read_json(directory, "config.json")
    assert isinstance(config, Mapping)
    named = next((each["processor_class"] for each in configs if each.get("processor_class")), None)
    named = named or PROCESSOR_MAPPING_NAMES.get(str(config.get("model_type")))
    try:
        cls = processor_class_from_name(str(named))
        if cls is None:
            raise ValueError(f"transformers has no {named}")
        image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
        if size:
            if not hasattr(image_processor, "temporal_patch_size"):
                raise ConfigError(
                    f"images.{'max' if 'longest_edge' in size else 'min'}_pixels: {type(image_processor).__name__} of "
                    f"{directory} does not count pixels; processors of Qwen2-VL and its kin do; set it to null"
                )
            require_pixels(size, image_processor.to_dict())
            image_processor.size = type(image_processor.size)(**{**dict(image_processor.size), **size})
        # The check of types looks for classes of video processors, which are not there without torchvision.
        unchecked = {"check_argument_for_proper_class": lambda self, name, argument: type(argument)}
        own: type[ProcessorMixin] = type(cls.__name__, (cls,), unchecked)
        parts = {"image_processor": image_processor, "tokenizer": tokenizer}
        arguments = [parts.get(name) for name in own.get_attributes()]
        found: ProcessorMixin = own.from_args_and_dict(arguments, dict(configs[0]))
    except ConfigError:
        raise
    except Exception as error:  # of whatever a class of transformers raises
        remedy = "files as save_pretrained writes them are accepted"
        if isinstance(error, ImportError) and "num2words" in str(error):
            remedy = "with that package it is accepted; pip install 'posttrain[vlm]', and run again"
        raise ConfigError(
            f"{directory}: its processor {named} cannot be loaded ({type(error).__name__}: {error}); {remedy}"
        ) from error
    return found


@dataclass(frozen=True, kw_only=True)
class Vision:
    """A model's processor, and the images of prepared rows. Can be pickled.

    Args:
        directory: of the model.
        size: of its processor, in place of what its files say.
    """

    directory: Path
    stored: StoredImages
    size: Mapping[str, int]

    @staticmethod
    def of(directory: Path, rows: Path, images: Images | None = None) -> "Vision | None":
        """None: the rows have no images."""
        stored = StoredImages.beside(rows)
        return Vision(directory=directory, stored=stored, size=images.size if images else {}) if stored else None

    def __reduce__(self) -> "tuple[Callable[..., Vision], tuple[Path, StoredImages, Mapping[str, int]]]":
        return _vision, (self.directory, self.stored, self.size)

    def key(self, cache: DigestCache) -> dict[str, object]:
        """What determines the tokens of images, beside the tokenizer."""
        files = [each for name in PROCESSOR_FILES if (each := self.directory / name).is_file()]
        images = cache.digest(self.stored.file)
        return {"processor": {each.name: digest_file(each) for each in files}, "images": images, "size": {**self.size}}

    @cached_property
    def processor(self) -> "ProcessorMixin":
        from tasks.model.tokenizers import tokenizer_of

        return processor_of(self.directory, tokenizer_of(self.directory), self.size)

    @property
    def placeholder(self) -> str:
        """What a chat template writes for an image."""
        return str(self.processor.image_token)

    @cached_property
    def _is_crossed(self) -> bool:
        """Whether layers attend to images beside the text."""
        from transformers import MllamaProcessor

        return isinstance(self.processor, MllamaProcessor)

    @cached_property
    def _replacements(self) -> dict[tuple[int, int], str]:
        return {}

    def replacement(self, place: int) -> str:
        """The text of an image's tokens, which its size determines."""
        size = self.stored.size(place)
        if self._is_crossed:
            return self.placeholder
        if size not in self._replacements:
            found = self.processor(
                text=[self.placeholder], images=[[self.stored.image(place)]], return_text_replacement_offsets=True
            )
            self._replacements[size] = str(found["text_replacement_offsets"][0][0]["replacement"])
        return self._replacements[size]

    def expanded(self, rendered: _R, messages: Sequence[Message], row_id: str) -> _R:
        """A rendered conversation with the tokens of its images.

        Raises:
            DataError: the template writes fewer or more images than the messages have before its end.
        """
        digests = marked(str(each["content"]) for each in messages)
        literal = [start for start, _ in rendered.literal]

        def is_written(start: int) -> bool:
            at = bisect_right(literal, start) - 1
            return at < 0 or rendered.literal[at][1] <= start

        found = [each.span() for each in re.finditer(re.escape(self.placeholder), rendered.text)]
        places = [span for span in found if is_written(span[0])]
        if len(places) > len(digests) or (digests and not places):
            raise DataError(
                f"row {row_id}: the chat template writes {len(places)} images, and the messages have {len(digests)}; a "
                "template that writes each image once is accepted; start from a model whose template does"
            )
        pieces, images, starts, moves = list[str](), list[ImageSpan](), [0], [0]
        before, length = 0, 0
        for (start, end), digest in zip(places, digests, strict=False):
            place = self.stored.places[digest]
            try:
                text = self.replacement(place)
            except ValueError as error:  # of Qwen-VL's processor, of an image far wider than high
                width, height = self.stored.size(place)
                raise DataError(
                    f"row {row_id}: its image of {width} x {height} pixels is refused by the model's processor "
                    f"({error}); one that it takes is accepted; crop it, or remove the row"
                ) from error
            pieces += [rendered.text[before:start], text]
            length += start - before
            images.append((length, length + len(text), place))
            length, before = length + len(text), end
            starts.append(end)
            moves.append(length - end)

        def moved(at: int) -> int:
            return at + moves[bisect_right(starts, at) - 1]

        return rendered.moved("".join([*pieces, rendered.text[before:]]), moved, images)

    def inputs(self, images: Sequence[Sequence[int]], ids_BT: "Tensor") -> "dict[str, Tensor]":
        """What the model reads beside the tokens of a batch.

        Args:
            images: the places of each row's images; of pairs, whose rejected answers follow the chosen ones, of each
                pair's.
        """
        import torch

        times = len(ids_BT) // len(images)
        if self._is_crossed:
            return self._crossed([*images] * times, ids_BT) if any(images) else {}
        rows = [list(map(self.stored.image, row)) for row in images if row]
        if not rows:
            return {}
        found = {name: torch.cat([each] * times) for name, each in self._seen(rows).items()}
        for name in [name for name in found if name.endswith(_TYPES)]:
            known = torch.tensor([each for each in self.processor.image_token_ids if each is not None])
            found[name] = torch.isin(ids_BT.cpu(), known).long()
        return {name: value.to(ids_BT.device) for name, value in found.items()}

    def _crossed(self, images: Sequence[Sequence[int]], ids_BT: "Tensor") -> "dict[str, Tensor]":
        """The same for layers that attend to images: with the images that each token sees, as of the processor."""
        import torch
        from transformers.models.mllama.processing_mllama import (
            convert_sparse_cross_attention_mask_to_dense,
            get_cross_attention_token_mask,
        )

        processor = self.processor
        found = dict(processor.image_processor([list(map(self.stored.image, row)) for row in images]))
        mask = convert_sparse_cross_attention_mask_to_dense(
            [get_cross_attention_token_mask(ids, processor.image_token_id) for ids in ids_BT.tolist()],
            num_tiles=found.pop("num_tiles"), max_num_tiles=processor.image_processor.max_image_tiles,
            length=ids_BT.shape[1],
        )  # fmt: skip
        found["cross_attention_mask"] = mask
        return {name: torch.as_tensor(each, device=ids_BT.device) for name, each in found.items()}

    def blank(self) -> "dict[str, Tensor]":
        """What the tower reads of an image without content."""
        from PIL.Image import new

        seen = self._seen([[new("RGB", _BLANK)]])
        return {name: value for name, value in seen.items() if not name.endswith(_TYPES)}

    def _seen(self, rows: "Sequence[Sequence[Image]]") -> "dict[str, Tensor]":
        text = [self.placeholder * len(row) for row in rows]
        found = self.processor(text=text, images=rows, padding=True, return_tensors="pt")
        return {name: each for name, each in dict(found).items() if name not in _TEXT_INPUTS}

    def collator(
        self, collate: "Callable[[list[dict[str, object]]], object]", *, packs: bool = False
    ) -> "VisionCollator":
        """A collator that adds these inputs to a batch; ``packs``: its examples are packs, laid end to end."""
        return VisionCollator(vision=self, collate=collate, packs=packs)


def _vision(directory: Path, stored: StoredImages, size: Mapping[str, int]) -> Vision:
    return Vision(directory=directory, stored=stored, size=size)


@dataclass(frozen=True, kw_only=True)
class VisionCollator:
    """Collates rows with their images."""

    vision: Vision
    collate: "Callable[[list[dict[str, object]]], object]"
    packs: bool

    def __call__(self, examples: "list[dict[str, object]]") -> "dict[str, object]":
        batch = self.collate(examples)
        assert isinstance(batch, Mapping)
        images = [cast("list[int]", each[PLACES]) for each in examples]
        if self.packs:
            images = [[place for each in examples for place in images_of_pack(cast("dict[str, list[int]]", each))]]
        found = dict(batch)
        for prefix in ("", MISMATCHED):
            if (ids_BT := batch.get(f"{prefix}input_ids")) is not None:
                inputs = self.vision.inputs(images, ids_BT)
                found |= {f"{prefix}{name}": each for name, each in inputs.items()}
        return found


def see_by_row(model: "PreTrainedModel") -> None:
    """Has layers that attend to images read of each row of a batch what they read of the row alone.

    transformers gives each row of a batch as many images as the row with the most has. Tokens before the first image of
    a row attend to all of these, and so do rows without images, which alone skip these layers.
    """
    if model.config.model_type == "mllama":
        tower = model.model.vision_model
        model.get_decoder().register_forward_pre_hook(
            partial(_without_padded_images, tower.max_num_tiles * tower.num_patches), with_kwargs=True
        )


def _without_padded_images(
    size: int, _decoder: "Module", args: tuple[object, ...], kwargs: "dict[str, Tensor | None]"
) -> "tuple[tuple[object, ...], dict[str, Tensor | None]]":
    """A hook; shapes: B rows, T tokens, N images of ``size`` places each, K places.

    A state of zeros adds nothing to a row.
    """
    import torch

    states, mask_B1TK = kwargs.get("cross_attention_states"), kwargs.get("cross_attention_mask")
    sees_B1T1 = kwargs.get("full_text_row_masked_out_mask")
    if mask_B1TK is None or sees_B1T1 is None:
        return args, kwargs
    least = torch.finfo(mask_B1TK.dtype).min
    seen_BK = ((mask_B1TK != least) & (sees_B1T1 != 0)).any(2).squeeze(1)
    seen_BN = seen_BK.view(len(seen_BK), -1, size).any(2)
    others_BK = ~seen_BN.repeat_interleave(size, 1) & seen_BN.any(1, keepdim=True)
    kwargs["cross_attention_mask"] = mask_B1TK.masked_fill((sees_B1T1 == 0) & others_BK[:, None, None], least)
    if states is not None:
        of_image = states.view(*seen_BN.shape, -1, states.shape[-1])
        kwargs["cross_attention_states"] = (of_image * seen_BN[..., None, None].to(states)).view_as(states)
    return args, kwargs


def write_size(output: Path, size: Mapping[str, int]) -> None:
    """Writes the pixels of images into the processor's files of an output, where they name a size."""
    for name in PROCESSOR_FILES[:2]:
        config = read_json(output, name)
        if isinstance(config, dict):
            part = config.get("image_processor", config)
            for key, old in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
                if key in size:
                    part["size"] = {**(part.get("size") or {}), key: size[key]}
                    part.pop(old, None)
            (output / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

"""A directory: all data below it, in order of name, or the files of the split that is asked for."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lineage.errors import DataError
from lineage.text_split import SplitBy
from tasks.data.reading.chunk import Chunk
from tasks.data.reading.data_sets import is_saved, read_saved
from tasks.data.reading.files import read_file
from tasks.data.reading.splits import choose, is_hidden


def read_directory(directory: Path, split: str, split_by: SplitBy | None) -> Iterator[Chunk]:
    """The rows of a directory, or of a data set saved in it; never of a part of it without a word.

    Raises:
        ConfigError: it has no such split.
        DataError: it holds no data, or some that nothing reads.
    """
    if is_saved(directory):
        yield from read_saved(directory, split)
        return
    for name in choose(_files_below(directory), split, str(directory)):
        yield from read_file(directory / name, str(directory / name), split_by)


def _files_below(directory: Path) -> list[PurePosixPath]:
    """Those that ``lineage.digest`` takes the content of a source from, which follows no directory that is a link."""
    names = []
    for path in sorted(directory.rglob("*")):
        name = PurePosixPath(path.relative_to(directory).as_posix())
        if path.is_file():
            names.append(name)
        elif path.is_symlink() and not is_hidden(name):
            raise DataError(
                f"{directory}: holds {name}, a link to {'a directory' if path.is_dir() else 'nothing'}, which is not "
                "followed; directories, files and links to files are accepted; put the files there, or remove the link"
            )
    return names

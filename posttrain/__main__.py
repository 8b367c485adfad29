"""The command ``posttrain``, also ``python -m posttrain``."""

import sys

from posttrain import first


def main() -> int:
    """Runs one command."""
    first()
    from flows.__main__ import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())

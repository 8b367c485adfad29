"""What is asked of every row, whatever its format."""

from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.format import Fields
from tasks.data.formats.values import named


def check_group(fields: Fields) -> str | None:
    """What a row is held out together with, where it says so."""
    group = fields.get("group")
    if not (group is None or isinstance(group, str)):
        raise BadRowError(
            f"group is {named(group)}", "a string or null", "rows of one group are held out together", reason="not text"
        )
    return group or None  # the cell of a table may be empty

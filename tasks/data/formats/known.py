"""All formats, in the order in which they are listed to users."""

from tasks.data.formats.format import Format
from tasks.data.formats.messages import MESSAGES
from tasks.data.formats.raw_text import RAW_TEXT
from tasks.data.formats.trl_preference import TRL_PREFERENCE

FORMATS: tuple[Format, ...] = (RAW_TEXT, MESSAGES, TRL_PREFERENCE)

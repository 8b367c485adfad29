"""All formats, in the order in which they are listed to users."""

from tasks.data.formats.alpaca import ALPACA
from tasks.data.formats.format import Format
from tasks.data.formats.function_calling import FUNCTION_CALLING
from tasks.data.formats.implicit_preference import IMPLICIT_PREFERENCE
from tasks.data.formats.messages import MESSAGES
from tasks.data.formats.messages_label import MESSAGES_LABEL
from tasks.data.formats.openai_preference import OPENAI_PREFERENCE
from tasks.data.formats.oumi_preference import OUMI_PREFERENCE
from tasks.data.formats.prompt_completion import PROMPT_COMPLETION
from tasks.data.formats.prompts import PROMPTS
from tasks.data.formats.raw_text import RAW_TEXT
from tasks.data.formats.reasoning import REASONING
from tasks.data.formats.sharegpt import SHAREGPT
from tasks.data.formats.sharegpt_ranking import SHAREGPT_RANKING
from tasks.data.formats.transcript_preference import TRANSCRIPT_PREFERENCE
from tasks.data.formats.trl_preference import TRL_PREFERENCE
from tasks.data.formats.unpaired import UNPAIRED

FORMATS: tuple[Format, ...] = (
    RAW_TEXT,
    MESSAGES, PROMPT_COMPLETION, ALPACA, SHAREGPT, REASONING, FUNCTION_CALLING,
    TRL_PREFERENCE, IMPLICIT_PREFERENCE, TRANSCRIPT_PREFERENCE, SHAREGPT_RANKING,
    OPENAI_PREFERENCE, OUMI_PREFERENCE,
    UNPAIRED, MESSAGES_LABEL,
    PROMPTS,
)  # fmt: skip

BY_NAME = {each.name: each for each in FORMATS}

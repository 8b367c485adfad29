"""The built-in reward functions. Each gives 1 to a right answer, and 0 to a wrong one unless it gives partial credit.

An answer may be anything: empty, very long, or made to break its judge. No function raises on an answer, or takes
more than a fixed time for it.
"""

from collections.abc import Mapping

from tasks.reward_functions.answer import BuiltIn
from tasks.reward_functions.code import CODE
from tasks.reward_functions.structured import STRUCTURED
from tasks.reward_functions.texts import TEXTS

BUILT_IN: Mapping[str, BuiltIn] = {**TEXTS, **STRUCTURED, **CODE}

"""The chat template that we install where a model has none."""

# ChatML, except that the newline after a turn belongs to the next turn: so a turn ends exactly with its
# <|im_end|>, which is what a model generates last and what a completion mask must end with. A prefix of
# the messages renders to a prefix of the text.
CHATML = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)

CHAT_TEMPLATES = {"chatml": CHATML}

"""Our chat templates, for models without one."""

from typing import TYPE_CHECKING

from lineage.errors import ConfigError
from lineage.source.model_source import SPECIAL_TOKEN, template_families

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = ("<|im_start|>", "<|im_end|>")  # start and end of a turn in both of them

# ChatML, except that the newline after a turn belongs to the next turn, so that a turn ends exactly with its
# <|im_end|>, the last token that a model generates and the last one of a completion mask. A prefix of the
# messages renders to a prefix of the text.
CHATML = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)

# ChatML as above, with images: contents may be lists of texts and images.
CHATML_IMAGES = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}",
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>' }}",
)

# ChatML as above, with tools in the form of Hermes 2 Pro and Qwen 2.5: JSON schemas at the end of the system turn,
# each call as JSON in <tool_call>, all results of a round in one user turn, each in <tool_response>.
HERMES = (
    "{% set begins_with_system = messages[0]['role'] == 'system' %}"
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{% if begins_with_system %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}'
    "\\n</tool_call><|im_end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and begins_with_system) %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or loop.previtem['role'] != 'tool' %}"
    "{% if tools or not loop.first %}{{ '\\n' }}{% endif %}{{ '<|im_start|>user' }}"
    "{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>' }}{% endif %}"
    "{% else %}"
    "{% if tools or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": ' }}{{ call['function']['name'] | tojson }}"
    "{{ ', \"arguments\": ' }}{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' }}"
    "{% endif %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)

CHAT_TEMPLATES = {"chatml": CHATML, "hermes": HERMES}
CHAT_TEMPLATE_FILE = "chat_template.jinja"  # of a model directory


def check_name(name: str | None) -> None:
    """Checks the name of a template."""
    if name is None or name in CHAT_TEMPLATES:
        return
    names = [*CHAT_TEMPLATES, *template_families()]
    if name not in names:
        raise ConfigError(
            f"chat_template={name}: no such template; accepted: {', '.join(names)}; name one of these; a template in a "
            "file belongs to the model: set sources.base.chat_template=FILE.jinja"
        )


def template_text(name: str) -> str:
    """The text of one of our templates, or of TRL's for a model family."""
    return CHAT_TEMPLATES.get(name) or template_families()[name].read_text(encoding="utf-8")


def install_chat_template(tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
    """Sets the template of a tokenizer.

    Raises:
        ConfigError: the vocabulary lacks the template's tokens; adding them would change the tokenizer.
    """
    text, vocabulary = template_text(name), tokenizer.get_vocab()
    needed = TOKENS if name in CHAT_TEMPLATES else tuple(dict.fromkeys(SPECIAL_TOKEN.findall(text)))
    missing = [token for token in needed if token not in vocabulary]
    # Templates of families also name tokens for images and tools, which a text model lacks.
    if missing and (name in CHAT_TEMPLATES or len(missing) == len(needed)):
        raise ConfigError(
            f"chat_template={name} needs the tokens {', '.join(needed)} and the model's vocabulary lacks "
            f"{', '.join(missing)}; start from a model whose tokenizer has them or that brings a chat template"
        )
    tokenizer.chat_template = text

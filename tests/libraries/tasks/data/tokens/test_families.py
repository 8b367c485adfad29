"""Every family's chat template: turns follow the prompt of inference, end in a stop token, and keep what they say."""

import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
import trl
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.kinds import Message
from tasks.data.tokens.rendering import Renderer, Turns, in_field, turn_ends
from tasks.data.tokens.template import Thinking, Tools
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import IGNORED, RowTokenizer
from tests import tiny
from tests.libraries.tasks.data.tokens.test_rendering import stored

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
_SPECIAL = re.compile(
    r"<\|[^|<>{}\s']+\|?>|<[^|<>{}\s']+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|\[/?INST\]"
)
# Tokens that no template means to be the end of anything.
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# What the tokenizers of the families begin a text with, and end it with.
_BOS_AND_EOS = {
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "diffusion": ("<bos>", "<eos>"),
    "gemma": ("<bos>", "<eos>"),
    "glm": (None, "<|endoftext|>"),
    "gptoss": ("<|startoftext|>", "<|return|>"),
    "idefics3": ("<|begin_of_text|>", "<end_of_utterance>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "llava": ("<s>", "</s>"),
    "muse": ("<|begin_of_text|>", "<|eot|>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>"),
}


def template_of(family: str, *, training: bool = False) -> str | None:
    """A family's template for inference, or TRL's for training, where there is one."""
    path = TEMPLATES / f"{family}{'_training' if training else ''}.jinja"
    return path.read_text(encoding="utf-8") if path.exists() else None


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Bytes and special tokens, with the family's template."""
    template = template_of(family)
    assert template
    bos, eos = next((pair for name, pair in _BOS_AND_EOS.items() if family.startswith(name)), (None, "<|im_end|>"))
    special = sorted({*_SPECIAL.findall(template), *filter(None, (bos, eos))})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in _MARKS if mark not in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = template
    return tokenizer


SYSTEM = {"role": "system", "content": "be short"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "today's",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}


def asked(*answers: str) -> list[Message]:
    roles = ("user", "assistant")
    return [
        {"role": role, "content": output}
        for index, answer in enumerate(answers)
        for role, output in zip(roles, (f"question {index}", answer), strict=True)
    ]


def thought(text: str, answer: str) -> str:
    return f"<think>\n{text}\n</think>\n\n{answer}"


SINGLE, MULTI = asked("Paris"), asked("Paris", "Rome, of course", "Oslo")
THINKING = asked(thought("of France", "Paris"), thought("of Italy", "Rome"))
TOOLS: list[Message] = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "name": "get_weather"},
    {"role": "assistant", "content": "it rains"},
]
NO_SYSTEM = {"gemma"}
# They refuse the roles, or leave out calls: what they leave out is refused by name, and never lost.
NO_TOOLS = {
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "lfm2", "llama3",
    "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm",
}  # fmt: skip
DROPS_THINKING = {"deepseek_r1_distill", "deepseekv3"}
# Between prompt and answer they name the channel of the answer.
CHANNELS = {"gptoss": "<|channel|>final<|message|>", "muse_glimmer": " to=user<|message|>"}
TRAINED_BY_TRL = sorted(family for family in FAMILIES if template_of(family, training=True))
# TRL's template for training marks a part of the prompt too.
MARKS_PROMPT = ("gptoss", "muse_glimmer", "qwen2_5", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")
# At inference the prompt opens a thought, which we close, and TRL's text does not: its answers follow another prompt.
OPENS_THOUGHT = (
    "deepseek_r1_distill", "deepseekv3", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super",
    "nemotron_3_ultra",
)  # fmt: skip
# TRL trains the token that ends a whole conversation, or that of a turn which another follows.
OTHER_ENDS = {"phi3": "\n<|endoftext|>", "phi3_5": "\n<|endoftext|>", "gptoss": "<|end|>"}


class FixedDay(datetime):
    @classmethod
    def now(cls, tz: object = None) -> "FixedDay":
        return cls(2024, 7, 26)


@pytest.fixture(autouse=True)
def one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", FixedDay)


def turns(
    family: str, messages: Sequence[Message], tools: Tools | None = None, to: Thinking | None = None
) -> list[Turns]:
    return Renderer.of(tokenizer_of(family), to).turns(messages, tools, "a")


def spans(found: Sequence[Turns]) -> list[str]:
    return [part.text[start:end] for part in found for start, end in part.spans]


def inference_prompt(family: str, messages: Sequence[Message], tools: Tools | None = None, **options: object) -> str:
    """What transformers itself would generate an answer from."""
    tokenizer = tokenizer_of(family)
    shown = list(messages)
    if Renderer.of(tokenizer).template.in_blocks:
        shown = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    return str(tokenizer.apply_chat_template(shown, tools=tools, tokenize=False, add_generation_prompt=True, **options))


def require_sound(family: str, messages: Sequence[Message], found: Sequence[Turns], tools: Tools | None = None) -> None:
    """Each turn follows the prompt of inference, token by token, and ends in a token of its own."""
    tokenizer = tokenizer_of(family)
    rows = RowTokenizer.of(Tokenization(kind=Kind.CONVERSATIONS, max_length=10**6), tokenizer)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    marks = [(part, span) for part in found for span in part.spans]
    assert len(marks) == len(places)
    for place, (part, (start, end)) in zip(places, marks, strict=True):
        assert part.text[:start] == inference_prompt(family, messages[:place], tools)
        last = tokenizer(part.text[:end], add_special_tokens=False)["input_ids"][-1]
        assert tokenizer.added_tokens_decoder[last].special
        assert last in rows.renderer.stops.ids  # type: ignore[union-attr]


def answer_of(family: str, span: str) -> str:
    """A trained turn without the token that ends it, the channel that it names, and a thought of nothing."""
    span = span.removeprefix(CHANNELS.get(family, ""))
    text = re.sub(r"\A\s*(?:<think>\s*)?</think>|\A\s*<think>\s*</think>", "", span)
    special = sorted(tokenizer_of(family).all_special_tokens + list(tokenizer_of(family).get_added_vocab()), key=len)
    for token in reversed(special):
        text = text.removesuffix(token)
    for token in reversed(special):  # Cohere 2 ends the answer, and then the turn
        text = text.removesuffix(token)
    return text.strip()


def require_whole(family: str, messages: list[Message]) -> None:
    found = turns(family, messages)
    require_sound(family, messages, found)
    assert [answer_of(family, span) for span in spans(found)] == [
        message["content"] for message in messages if message["role"] == "assistant"
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_trained_whole_after_the_prompt_of_inference(family: str) -> None:
    require_whole(family, MULTI)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_system_message_is_in_the_prompt_or_the_row_is_refused(family: str) -> None:
    messages = [SYSTEM, *MULTI]
    if family in NO_SYSTEM:
        with pytest.raises(DataError, match="row a: the model's chat template refuses its messages"):
            turns(family, messages)
        return
    found = turns(family, messages)
    require_sound(family, messages, found)
    assert all("be short" in part.text for part in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_trained_with_an_end_of_their_own_or_refused(family: str) -> None:
    if family in NO_TOOLS:
        with pytest.raises(PipelineError, match=r"leaves out|refuses its messages"):
            turns(family, TOOLS, [WEATHER])
        return
    found = turns(family, TOOLS, [WEATHER])
    require_sound(family, TOOLS, found, [WEATHER])
    call, answer = spans(found)
    assert "get_weather" in call and "Rome" in call and "rain" not in call
    assert "it rains" in answer and "Rome" not in answer


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - DROPS_THINKING))
def test_thinking_is_trained_where_the_template_has_it(family: str) -> None:
    for found in (turns(family, THINKING), turns(family, THINKING, to="keep")):
        assert [("of France" in span, "of Italy" in span) for span in spans(found)] == [(True, False), (False, True)]
        assert [span.count(answer) for span, answer in zip(spans(found), ("Paris", "Rome"), strict=True)] == [1, 1]


@pytest.mark.parametrize("family", sorted(DROPS_THINKING))
def test_thinking_that_the_template_leaves_out_is_a_choice(family: str) -> None:
    with pytest.raises(ConfigError, match=r"leaves out what the assistant thinks .* on row a; .*thinking=keep .*=drop"):
        turns(family, THINKING)
    found = turns(family, THINKING, to="keep")
    require_sound(family, THINKING, found)
    end = tokenizer_of(family).eos_token
    assert spans(found) == [f"of France\n</think>\n\nParis{end}", f"of Italy\n</think>\n\nRome{end}"]
    assert "of France" not in found[1].text  # as at inference


@pytest.mark.parametrize("family", FAMILIES)
def test_thinking_may_be_left_out(family: str) -> None:
    assert turns(family, THINKING, to="drop") == turns(family, asked("Paris", "Rome"))


FORMS: dict[str, tuple[list[Message], Tools | None]] = {
    "single": (SINGLE, None),
    "multi": (MULTI, None),
    "system": ([SYSTEM, *MULTI], None),
    "thinking": (asked(thought("of France", "Paris")), None),
    "thinking in each turn": (THINKING, None),
    "tools": (TOOLS, [WEATHER]),
}


def marked_by_trl(family: str, messages: Sequence[Message], tools: Tools | None) -> tuple[str, list[str]] | None:
    """The text of TRL's training template, and the spans that it trains; None: it refuses the messages."""
    tokenizer, renderer = tokenizer_of(family), Renderer.of(tokenizer_of(family))
    shown = in_field(messages) if renderer.thinks_in_field else messages
    if renderer.template.in_blocks:
        shown = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in shown]
    try:
        found = tokenizer.apply_chat_template(
            shown, tools=tools, chat_template=template_of(family, training=True), return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
    except TemplateError:
        return None
    marks = list(zip(found["input_ids"], found["assistant_masks"], strict=True))
    parts = [[token for token, _ in part] for is_marked, part in groupby(marks, key=itemgetter(1)) if is_marked]
    return tokenizer.decode(found["input_ids"]), [tokenizer.decode(part) for part in parts]


def output(family: str, span: str) -> str:
    """An answer or a call, without thinking and special tokens."""
    special = map(re.escape, sorted(tokenizer_of(family).get_added_vocab(), key=len, reverse=True))
    return re.sub("|".join(special), "", re.split(r"</think>|<channel\|>|<\|message\|>", span)[-1]).strip()


def require_at_least_trls(family: str, form: str, prompt: str, ours: str, theirs: str) -> None:
    """That we train what TRL trains of a turn, or what the model itself would say after the prompt of inference."""
    if ours == theirs.rstrip():
        return
    if (prompt + ours).endswith(theirs.rstrip()) and family in (*MARKS_PROMPT, *OPENS_THOUGHT, "diffusion_gemma"):
        return
    assert output(family, ours).endswith(output(family, theirs)), (form, ours, theirs)
    thoughts = [each for each in ("of France", "of Italy") if each in ours and each not in theirs]
    opened = family in OPENS_THOUGHT and prompt.rstrip().endswith("<think>") and ours.lstrip().startswith("</think>")
    other_end = OTHER_ENDS.get(family, "no other") in theirs
    # Gemma: what generation stops at after a call, and what begins the answer to its result, are not in the prompt.
    if not (thoughts or opened or other_end or (family, form) == ("diffusion_gemma", "tools")):
        pytest.fail(f"{form}: {ours!r} is not {theirs!r}, and nothing explains it")


@pytest.mark.parametrize("family", TRAINED_BY_TRL)
def test_we_train_at_least_what_trls_training_template_marks(family: str) -> None:
    for form, (messages, tools) in FORMS.items():
        marked = marked_by_trl(family, messages, tools)
        try:
            found = turns(family, messages, tools, to="keep")
        except PipelineError:
            # What we refuse is refused by TRL too, or its text lacks the call or the list of tools.
            lost = marked is None or "Rome" not in marked[0] or "today's" not in marked[0]
            assert lost and family in (NO_TOOLS if form == "tools" else NO_SYSTEM), form
            continue
        assert marked, form
        if "thinking" not in form:  # whose prompts may tell the template that the assistant will think
            require_sound(family, messages, found, tools)
        prompts = [part.text[:start] for part in found for start, _ in part.spans]
        for prompt, ours, theirs in zip(prompts, spans(found), marked[1], strict=True):
            require_at_least_trls(family, form, prompt, ours, theirs)


def test_what_answers_end_in_is_what_generation_must_stop_at() -> None:
    tokenizer = tokenizer_of("glm4moe")
    rows = RowTokenizer.of(Tokenization(kind=Kind.CONVERSATIONS, max_length=10**6), tokenizer)
    (row,) = rows([{"row_id": "a", "messages": stored(TOOLS), "tools": None}])
    names = {"<|user|>", "<|observation|>"}  # what GLM's own generation config stops at
    assert row.outcome.stops == set(tokenizer.convert_tokens_to_ids(sorted(names)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_a_turn_is_known_without_rows(family: str) -> None:
    tokenizer = tokenizer_of(family)
    rows = RowTokenizer.of(Tokenization(kind=Kind.CONVERSATIONS, max_length=10**6), tokenizer)
    (row,) = rows([{"row_id": "a", "messages": asked("Paris")}])
    answer, *of_calls = turn_ends(tokenizer)
    assert row.outcome.stops == {answer}
    trained = [
        token for token, label in zip(row.columns["input_ids"], row.columns["labels"], strict=True) if label >= 0
    ]
    assert not set(of_calls) & set(trained), "generation of an answer would stop within it"


def test_a_tokenizer_without_a_template_ends_no_turns(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.write_tokenizer(tmp_path, chat_template=None))
    assert turn_ends(tokenizer) == []


def test_a_row_of_several_texts_is_one_row_and_several_examples() -> None:
    rows = RowTokenizer.of(Tokenization(kind=Kind.CONVERSATIONS, max_length=10**6), tokenizer_of("qwen3"))
    (row,) = rows([{"row_id": "a", "messages": MULTI}])
    examples = [row.columns, *row.more]
    assert len(examples) == row.outcome.num_examples == 3
    assert [sum(label != IGNORED for label in each["labels"]) for each in examples] == [
        len(tokenizer_of("qwen3")(span)["input_ids"]) for span in spans(turns("qwen3", MULTI))
    ]
    assert row.outcome.tokens == sum(len(each["input_ids"]) for each in examples)


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_share_the_prompt_of_inference_though_earlier_turns_are_rewritten(family: str) -> None:
    tokenizer = tokenizer_of(family)
    rows = RowTokenizer.of(Tokenization(kind=Kind.PREFERENCES, max_length=10**6), tokenizer)
    prompt = [*asked("Paris"), {"role": "user", "content": "and Italy?"}]
    sides = {
        side: [{"role": "assistant", "content": output}] for side, output in (("chosen", "Rome"), ("rejected", "Oslo"))
    }
    (row,) = rows([{"row_id": "a", "prompt": prompt, **sides}])
    assert tokenizer.decode(row.columns["prompt_ids"]).startswith(inference_prompt(family, prompt))
    for side, output in (("chosen", "Rome"), ("rejected", "Oslo")):
        ids = row.columns[f"{side}_ids"]
        assert output in tokenizer.decode([*row.columns["prompt_ids"], *ids])
        assert ids[-1] in row.outcome.stops


@pytest.mark.parametrize("marked", [True, False])
def test_a_stop_token_that_takes_the_blanks_behind_it_is_trained(marked: bool) -> None:
    """Phi 3's tokenizer: its special tokens stand for the newline behind them too."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(tokenizer_of("phi3").backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=marked, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<s>")
    tokenizer.chat_template = template_of("phi3")
    rows = RowTokenizer.of(Tokenization(kind=Kind.CONVERSATIONS, max_length=10**6), tokenizer)
    (row,) = rows([{"row_id": "a", "messages": MULTI}])
    trained = [label for label in row.columns["labels"] if label != IGNORED]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert trained.count(end) == 3 and trained[-1] == end
    assert row.outcome.stops == {end}


WITHOUT_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def test_a_template_that_ends_turns_in_no_token_is_refused_with_the_remedy() -> None:
    from copy import deepcopy

    tokenizer = deepcopy(tokenizer_of("qwen3"))
    tokenizer.chat_template = WITHOUT_END + "{% if add_generation_prompt %}assistant: {% endif %}"
    rows = RowTokenizer.of(Tokenization(kind=Kind.CONVERSATIONS, max_length=10**6), tokenizer)
    with pytest.raises(ConfigError, match=r"row a in no token of its own .* eos_token, after each answer is accepted"):
        list(rows([{"row_id": "a", "messages": SINGLE}]))
    tokenizer.chat_template = template_of("glm4moe")  # whose tokens this tokenizer takes apart
    rows = RowTokenizer.of(Tokenization(kind=Kind.CONVERSATIONS, max_length=10**6), tokenizer)
    with pytest.raises(ConfigError, match=r"row a in no token of its own"):
        list(rows([{"row_id": "a", "messages": SINGLE}]))


@pytest.mark.parametrize("family", ["deepseekv3", "qwen3", "glm4moe", "gptoss"])
def test_calls_without_a_list_of_tools(family: str) -> None:
    """DeepSeek's template takes the arguments of calls as JSON text alone."""
    found = turns(family, TOOLS)
    require_deepseek_json = family != "deepseekv3" or '{"city": "Rome"}' in found[0].text
    assert require_deepseek_json
    assert "Rome" in spans(found)[0]

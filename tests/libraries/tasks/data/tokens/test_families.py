"""Every family's chat template: turns follow the prompt of inference, end in a stop token, and keep what they say."""

import re
from collections.abc import Sequence
from datetime import datetime

import pytest
from transformers.utils import chat_template_utils

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.schema import Message
from tasks.data.tokens.rendering import Renderer, Turns
from tasks.data.tokens.template import Tools
from tasks.data.tokens.thinking import Thinking
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import IGNORED, RowTokenizer
from tests.libraries.tasks.data.tokens.families import FAMILIES, template_of, tokenizer_of
from tests.libraries.tasks.data.tokens.test_rendering import stored

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
        {"role": role, "content": said}
        for index, answer in enumerate(answers)
        for role, said in zip(roles, (f"question {index}", answer), strict=True)
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
# Where TRL's template for training marks the very text that we train. Of the others it marks a part of the prompt too
# (DeepSeek, gpt-oss, Muse, Nemotron, Qwen 2.5, Qwen 3.5 and later), or the end of all behind that of the turn (Phi 3).
AS_TRL = (
    "cohere", "cohere2", "diffusion_gemma", "gemma", "gemma3", "glm4moe", "idefics3", "lfm2", "lfm2_v2", "llama3",
    "llava_next", "qwen2_5_vl", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "smolvlm",
)  # fmt: skip
BEGINS_EARLIER = (
    "deepseek_r1_distill", "gptoss", "muse_glimmer", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super",
    "nemotron_3_ultra", "phi3", "phi3_5", "qwen2_5", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
)  # fmt: skip


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


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*AS_TRL, *BEGINS_EARLIER}))  # those are compared with TRL's
def test_a_single_answer_is_trained_whole(family: str) -> None:
    require_whole(family, SINGLE)


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


@pytest.mark.parametrize("family", [*AS_TRL, *BEGINS_EARLIER])
def test_what_is_trained_is_what_trls_training_template_marks(family: str) -> None:
    tokenizer, renderer = tokenizer_of(family), Renderer.of(tokenizer_of(family))
    messages = asked(thought("of France", "Paris")) if family == "deepseek_r1_distill" else SINGLE
    shown = messages
    if renderer.template.in_blocks:
        shown = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    marked = tokenizer.apply_chat_template(
        shown, chat_template=template_of(family, training=True), return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [token for token, mask in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mask]
    (ours,) = spans(turns(family, messages, to="keep"))
    theirs = tokenizer.decode(trained).rstrip()
    if family in AS_TRL:
        assert ours == theirs
    else:
        assert ours in theirs or ours.split("</think>")[-1] in theirs
        assert theirs.removesuffix("\n<|endoftext|>").endswith(ours[-20:].split("\n")[-1])


@pytest.mark.parametrize("family", ["deepseekv3", "qwen3", "glm4moe", "gptoss"])
def test_calls_without_a_list_of_tools(family: str) -> None:
    """DeepSeek's template takes the arguments of calls as JSON text alone."""
    found = turns(family, TOOLS)
    require_deepseek_json = family != "deepseekv3" or '{"city": "Rome"}' in found[0].text
    assert require_deepseek_json
    assert "Rome" in spans(found)[0]


def test_what_answers_end_in_is_what_generation_must_stop_at() -> None:
    tokenizer = tokenizer_of("glm4moe")
    rows = RowTokenizer.of(Tokenization(kind=Kind.CONVERSATIONS, max_length=10**6), tokenizer)
    (row,) = rows([{"row_id": "a", "messages": stored(TOOLS), "tools": None}])
    names = {"<|user|>", "<|observation|>"}  # what GLM's own generation config stops at
    assert row.outcome.stops == set(tokenizer.convert_tokens_to_ids(sorted(names)))


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
        side: [{"role": "assistant", "content": said}] for side, said in (("chosen", "Rome"), ("rejected", "Oslo"))
    }
    (row,) = rows([{"row_id": "a", "prompt": prompt, **sides}])
    assert tokenizer.decode(row.columns["prompt_ids"]).startswith(inference_prompt(family, prompt))
    for side, said in (("chosen", "Rome"), ("rejected", "Oslo")):
        ids = row.columns[f"{side}_ids"]
        assert said in tokenizer.decode([*row.columns["prompt_ids"], *ids])
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

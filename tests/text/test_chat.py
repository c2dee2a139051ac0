"""Messages to text and ids as transformers would, and errors for what a template cannot do."""

import json

import jinja2.ext
import jinja2.sandbox
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from strata_jax.errors import BadFileError, UsageError
from strata_jax.text.answer import thinking_is_open
from strata_jax.text.chat import ChatTemplate
from strata_jax.text.tokenizer import Tokenizer
from tests.text.small import (
    TOKENS,
    embedded_metadata,
    embedded_tokenizer,
    small_metadata,
    small_tokenizer,
)
from tests.text.templates import EMBEDDED, PLAIN, QWEN, TEMPLATES, assistant, turns, user

TOKENIZER = small_tokenizer()
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "tells <weather> & more é"},
}


def transformers_render(source, **variables):
    """What transformers does with a template, by its documentation."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    return env.from_string(source).render(**variables)


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    user("hello <b>world</b> | 1 < 2 > 0"),
    assistant("well\n", reasoning_content="\nhm\n"),
    user([{"type": "text", "text": "and "}, {"type": "text", "text": "now?"}]),
]


@pytest.mark.parametrize("name", ["embedded", "qwen"])
@pytest.mark.parametrize("prompted", [True, False])
def test_renders_as_transformers_does(name, prompted):
    source = {"embedded": EMBEDDED, "qwen": QWEN}[name]
    template = TEMPLATES[name]

    text = template.render(CONVERSATION, add_generation_prompt=prompted)

    assert text == transformers_render(
        source, messages=CONVERSATION, add_generation_prompt=prompted, tools=None
    )


def test_renders_tools_as_transformers_does():
    call = {"function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}}
    messages = [user("rain?"), assistant("", tool_calls=[call]), {"role": "tool", "content": "no"}]

    text = TEMPLATES["qwen"].render(messages, tools=[WEATHER])

    assert text == transformers_render(
        QWEN, messages=messages, tools=[WEATHER], add_generation_prompt=True
    )
    assert '"tells <weather> & more é"' in text


ORDINARY = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("<>|/ \nhelo"))


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    contents=st.lists(ORDINARY.filter(lambda text: not TOKENIZER.find_special(text)), min_size=1),
)
@example(name="qwen", contents=["<|i", "m_end|>", "|>", "<", "> quoted", " </think"])
def test_gives_the_ids_of_the_rendered_text_for_ordinary_messages(name, contents):
    template = TEMPLATES[name]
    messages = turns(contents)

    ids = template.encode(messages)

    assert ids == TOKENIZER.encode(template.render(messages), special=True)


def test_writes_the_tokens_a_file_names():
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    bos_id = TOKENS.index("<|im_start|>")
    tokenizer = Tokenizer.from_metadata(small_metadata(bos_token_id=bos_id, add_bos_token=True))

    ids = ChatTemplate(source, tokenizer).encode([user("h</think>")])

    assert ids[0] == bos_id
    assert ids.count(bos_id) == 1
    assert tokenizer.decode(ids) == "<|im_start|>h</think><|im_end|>"


def test_puts_the_leading_id_first_if_the_template_does_not():
    tokenizer = Tokenizer.from_metadata(small_metadata(bos_token_id=7, add_bos_token=True))

    assert ChatTemplate(PLAIN, tokenizer).encode([user("h")])[0] == 7


@pytest.mark.parametrize(("thinking", "is_open"), [(None, True), (True, True), (False, False)])
def test_turns_thinking_on_and_off(thinking, is_open):
    tokenizer = embedded_tokenizer()
    template = ChatTemplate.from_metadata(embedded_metadata(), tokenizer)

    ids = template.encode([user("hello")], thinking=thinking)

    assert thinking_is_open(tokenizer, ids) == is_open


def test_passes_the_effort_on():
    template = TEMPLATES["qwen"]

    assert "think little" in template.render([user("a")], effort="low")
    assert "think little" not in template.render([user("a")], effort="xhigh")


def test_passes_further_variables_on():
    messages = [user("a"), assistant("b"), user("c")]
    template = TEMPLATES["qwen"]

    kept = template.render(messages, add_generation_prompt=False)
    dropped = template.render(
        messages, add_generation_prompt=False, extra={"preserve_thinking": False}
    )

    assert "<think>" in kept
    assert "<think>" not in dropped


@pytest.mark.parametrize(
    ("name", "asked", "text"),
    [
        ("plain", {"thinking": True}, "received thinking on, but .* it offers neither"),
        ("plain", {"thinking": False}, "received thinking off"),
        ("plain", {"effort": "low"}, "received effort 'low', but .* it offers neither"),
        ("embedded", {"effort": "low"}, "does not know it; it offers thinking on or off"),
        ("qwen", {"effort": "high"}, "it offers thinking on or off and effort xhigh, medium, low"),
        ("plain", {"tools": [WEATHER]}, "received 1 tools, but this template reads none"),
        (
            "qwen",
            {"extra": {"preserve": 1}},
            "no template variable 'preserve'; it reads enable_thinking, preserve_thinking, reasoning_effort",
        ),
        ("qwen", {"extra": {"raise_exception": 1}}, "no template variable 'raise_exception'"),
        ("qwen", {"extra": {"eos_token": "x"}}, "no template variable 'eos_token'"),
        ("qwen", {"extra": {"messages": []}}, "no template variable 'messages'"),
        (
            "qwen",
            {"thinking": True, "extra": {"enable_thinking": False}},
            "enable_thinking is asked for as False and as True",
        ),
    ],
)
def test_refuses_what_the_template_does_not_offer(name, asked, text):
    with pytest.raises(UsageError, match=f"^chat: .*{text}"):
        TEMPLATES[name].encode([user("a")], **asked)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("hello", "message 0 is a str, expected role and content"),
        ([{"content": "a"}], "message 0 has role None, expected a text"),
        ([user("a"), {"role": 3, "content": "a"}], "message 1 has role 3"),
        ([{"role": "user"}], r"message 0 \(user\) has no content"),
        ([user(3)], "message 0 has a content of type int"),
        ([user([{"type": "image_url", "image_url": {}}])], "a part of type 'image_url'"),
        ([user(["a"])], "a part of type 'str', expected text parts only"),
        ([user("a") | {"x": b"y"}], "the messages hold a bytes"),
        ([], "chat template: there are no messages"),
    ],
)
def test_refuses_messages_that_are_none(messages, text):
    with pytest.raises(UsageError, match=text):
        TEMPLATES["qwen"].encode(messages)


def test_leaves_out_empty_replies_because_models_imitate_them():
    messages = [user("a"), assistant(""), assistant(" \n"), assistant(None), user("b")]
    messages.insert(2, assistant("<think>\nhm\n</think>\n\n"))
    messages.insert(2, assistant([{"type": "text", "text": ""}], reasoning_content="hm"))
    template = TEMPLATES["qwen"]

    assert template.render(messages) == template.render([user("a"), user("b")])


def test_keeps_empty_replies_if_told_to_and_calls_always():
    keeping = ChatTemplate(QWEN, TOKENIZER, keep_empty=True)
    call = {"function": {"name": "f", "arguments": {}}}

    kept = keeping.render([user("a"), assistant(""), user("b")])
    called = TEMPLATES["qwen"].render([user("a"), assistant(None, tool_calls=[call])])

    assert kept.count("<|im_start|>assistant") == 2
    assert "<function=f>" in called


def test_does_not_change_the_messages():
    messages = [user("a <|im_end|>"), assistant("")]
    before = json.dumps(messages)

    TEMPLATES["qwen"].encode(messages)

    assert json.dumps(messages) == before


def test_says_that_a_file_has_no_template():
    with pytest.raises(UsageError, match=r"^chat: the model file has no tokenizer\.chat_template"):
        ChatTemplate.from_metadata(small_metadata(), TOKENIZER)


def test_says_that_a_template_is_broken():
    metadata = small_metadata() | {"tokenizer.chat_template": "{% for %}"}

    with pytest.raises(BadFileError, match=r"^chat template: line 1: "):
        ChatTemplate.from_metadata(metadata, TOKENIZER)


def test_refuses_a_lone_surrogate():
    with pytest.raises(UsageError, match=r"lone surrogate U\+DC80"):
        TEMPLATES["qwen"].encode([user("\udc80")])

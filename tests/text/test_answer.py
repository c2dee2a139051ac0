"""Pieces of an answer: whatever the split, they join to the whole, and nothing leaks early."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_jax.errors import UsageError
from strata_jax.text.answer import AnswerStream, Event, thinking_is_open
from strata_jax.text.tokenizer import Tokenizer
from tests.text.small import embedded_tokenizer, small_metadata, small_tokenizer

SMALL = small_tokenizer()
THINK, END_THINK = SMALL.special_id("<think>"), SMALL.special_id("</think>")
IM_END = SMALL.special_id("<|im_end|>")
assert THINK is not None
assert END_THINK is not None
assert IM_END is not None


class Answer(NamedTuple):
    """A whole answer."""

    reasoning: str
    text: str
    stopped: bool


def read_answer(tokenizer, ids, stop=(), thinking_open=False):
    """All that a stream gives for some ids, joined."""
    stream = AnswerStream(tokenizer, stop, thinking_open)
    events = [event for token_id in ids for event in stream.push(token_id)] + stream.finish()
    reasoning, text = (
        "".join(event.text for event in events if event.kind == kind)
        for kind in ("reasoning", "text")
    )
    return Answer(reasoning, text, stream.stopped)


def ids_of(text):
    return SMALL.encode(text, special=True)


def whole(ids, stop, thinking_open):
    """The answer worked out from the whole list of ids, without any state."""
    sections = [["reasoning" if thinking_open else "text", [], thinking_open]]
    for token_id in ids:
        wanted = {THINK: "reasoning", END_THINK: "text"}.get(token_id)
        if wanted is None:
            sections[-1][1].append(token_id)
        elif wanted != sections[-1][0]:
            sections.append([wanted, [], True])
    reasoning, text, stopped = "", "", False
    for kind, members, trim in sections:
        # An end-of-think token outside the reasoning still ends a run of bytes; those are dropped
        # above, so ids with one are left to other tests.
        piece = SMALL.decode(members, special=False)
        if trim:
            piece = piece.lstrip("\n")
        if kind == "reasoning":
            reasoning += piece.rstrip("\n")
            continue
        ends = [piece.find(s) + len(s) for s in stop if s in piece]
        if ends:
            end = min(ends)
            length = max(len(s) for s in stop if piece[:end].endswith(s))
            text += piece[: end - length]
            stopped = True
            break
        text += piece
    return Answer(reasoning, text, stopped)


def allowed(ids, thinking_open):
    """Whether every marker switches the section (others are tested by name)."""
    thinking = thinking_open
    for token_id in ids:
        if token_id in (THINK, END_THINK):
            if (token_id == THINK) == thinking:
                return False
            thinking = not thinking
    return True


IDS = st.lists(
    st.integers(0, SMALL.vocab_size - 1)
    | st.sampled_from([THINK, END_THINK, IM_END, 10, 32, 0xE2, 0x82, 0xAC, 0xF0])
    | st.sampled_from(ids_of("hello world\n\nab"))
)
STOPS = st.lists(st.text("ab\n hello€", min_size=1, max_size=4), max_size=3)


@settings(max_examples=500, deadline=None)
@given(IDS, STOPS, st.booleans())
def test_joins_to_the_whole_answer(ids, stop, thinking_open):
    if not allowed(ids, thinking_open):
        ids = [i for i in ids if i not in (THINK, END_THINK)]

    assert read_answer(SMALL, ids, stop, thinking_open) == whole(ids, stop, thinking_open)


@settings(max_examples=300, deadline=None)
@given(st.text("ab\n€😀 ", max_size=30), st.text("ab\n€ ", min_size=1, max_size=4), st.data())
def test_does_not_depend_on_how_the_text_is_cut_into_tokens(text, stop, data):
    pieces, rest = [], text.encode()
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    stream = AnswerStream(CutTokenizer(pieces), [stop], thinking_open=False)

    events = [event for index in range(len(pieces)) for event in stream.push(index)]
    events += stream.finish()

    assert "".join(event.text for event in events) == text.split(stop)[0]
    assert stream.stopped == (stop in text)


class CutTokenizer(Tokenizer):
    """A tokenizer whose token i is the i-th of some byte strings."""

    def __init__(self, pieces):
        self.pieces = pieces

    def special_id(self, text):
        return None

    def breaks_bytes(self, token_id):
        return False

    def token_bytes(self, token_id):
        return self.pieces[token_id]


@settings(max_examples=200, deadline=None)
@given(IDS, STOPS, st.booleans())
def test_never_shows_a_stop_string_or_an_empty_piece(ids, stop, thinking_open):
    stream = AnswerStream(SMALL, stop, thinking_open)

    events = [event for token_id in ids for event in stream.push(token_id)] + stream.finish()

    assert all(event.text for event in events)
    text = "".join(event.text for event in events if event.kind == "text")
    if THINK not in ids:
        assert not any(s in text for s in stop)


def test_never_gives_half_a_character():
    stream = AnswerStream(SMALL, [], thinking_open=False)

    seen = [stream.push(byte) for byte in "a😀".encode()]

    assert seen == [[Event("text", "a")], [], [], [], [Event("text", "😀")]]
    assert stream.finish() == []


def test_marks_an_unfinished_character_at_the_end_only():
    stream = AnswerStream(SMALL, [], thinking_open=False)

    assert stream.push(0xF0) == []
    assert stream.finish() == [Event("text", "\ufffd")]


def test_marks_bytes_that_are_no_text_at_once():
    stream = AnswerStream(SMALL, [], thinking_open=False)

    assert stream.push(0xFF) == [Event("text", "\ufffd")]


def test_parts_reasoning_from_text():
    ids = ids_of("<think>\nhello\n\n</think>\n\n world\n<|im_end|>")

    assert read_answer(SMALL, ids) == Answer("hello", " world\n", False)


def test_begins_inside_the_reasoning_if_the_prompt_does():
    ids = ids_of("hello\n</think>\n\nworld")

    assert read_answer(SMALL, ids, thinking_open=True) == Answer("hello", "world", False)


def test_keeps_line_ends_within_the_reasoning():
    stream = AnswerStream(SMALL, [], thinking_open=True)

    events = [event for token_id in ids_of("a\n\nb\n</think>") for event in stream.push(token_id)]

    assert events == [Event("reasoning", "a"), Event("reasoning", "\n\nb")]


def test_keeps_leading_line_ends_of_an_answer_without_reasoning():
    assert read_answer(SMALL, ids_of("\n\nhello\n")) == Answer("", "\n\nhello\n", False)


def test_gives_reasoning_that_never_ends_as_reasoning():
    assert read_answer(SMALL, ids_of("<think>hello")) == Answer("hello", "", False)


@pytest.mark.parametrize("text", ["a</think>b", "a<|im_end|>b", "a<|im_start|>b", "a<|imb"])
def test_does_not_show_markers_and_control_tokens(text):
    assert read_answer(SMALL, ids_of(text)).text == "ab"


def test_shows_user_defined_tokens():
    ids = ids_of("<tool_call>{}</tool_call>")

    assert read_answer(SMALL, ids).text == "<tool_call>{}</tool_call>"


def test_ends_before_a_stop_string_that_spans_tokens():
    stream = AnswerStream(SMALL, ["lo wo"], thinking_open=False)

    events = [stream.push(token_id) for token_id in [*ids_of("hel"), *ids_of("lo"), *ids_of(" wo")]]

    assert "".join(event.text for step in events for event in step) == "hel"
    assert stream.stopped
    assert stream.push(ord("x")) == []
    assert stream.finish() == []


def test_gives_back_a_stop_string_that_was_not_completed():
    stream = AnswerStream(SMALL, ["abc"], thinking_open=False)

    assert stream.push(ord("a")) == []
    assert stream.push(ord("b")) == []
    assert stream.push(ord("a")) == [Event("text", "ab")]
    assert stream.finish() == [Event("text", "a")]


def test_takes_the_stop_string_that_is_complete_first_and_then_the_longest():
    assert read_answer(SMALL, ids_of("xabcd"), ["abcd", "bc"]).text == "xa"
    assert read_answer(SMALL, ids_of("xabcd"), ["bc", "abc"]).text == "x"


def test_does_not_look_for_stop_strings_in_the_reasoning():
    ids = ids_of("<think>a. b.</think>c. d")

    assert read_answer(SMALL, ids, ["."]) == Answer("a. b.", "c", True)


def test_stops_at_a_special_token_named_as_stop_string():
    ids = ids_of("a<|endoftext|>b")

    assert read_answer(SMALL, ids, ["<|endoftext|>"]) == Answer("", "a", True)
    assert read_answer(SMALL, ids, ["</think>"]) == Answer("", "ab", False)


@pytest.mark.parametrize("stop", [[""], ["a", ""], "abc", [3]])
def test_refuses_stop_strings_that_are_none(stop):
    with pytest.raises(UsageError, match="stop: received"):
        AnswerStream(SMALL, stop, thinking_open=False)


def test_refuses_unknown_ids():
    with pytest.raises(UsageError, match="outside the vocabulary"):
        AnswerStream(SMALL, [], thinking_open=False).push(10**6)


def test_hides_an_end_that_is_an_ordinary_token():
    tokenizer = Tokenizer.from_metadata(small_metadata(eos_token_id=ord("z")))

    assert read_answer(tokenizer, [ord("y"), ord("z")]).text == "y"


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nLet me", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>system\nuse <think> tags<|im_end|>\n<|im_start|>assistant\n", False),
        ("hello", False),
        ("", False),
    ],
)
def test_knows_whether_a_prompt_leaves_the_reasoning_open(prompt, is_open):
    tokenizer = embedded_tokenizer()

    assert thinking_is_open(tokenizer, tokenizer.encode(prompt, special=True)) == is_open

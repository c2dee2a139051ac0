"""Token ids to what a reader sees: reasoning and text, piece by piece.

The pieces joined do not depend on how the ids arrive: `AnswerStream` holds back what a later id
could still change (half a character, the beginning of a stop string, line ends that may close the
reasoning).
"""

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Literal

from strata_jax.errors import UsageError
from strata_jax.text.tokenizer import Tokenizer

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
"""Texts of the special tokens around the reasoning (Qwen's convention)."""

Kind = Literal["reasoning", "text"]


@dataclasses.dataclass(frozen=True)
class Event:
    """A piece of the answer, never empty and never a part of a character."""

    kind: Kind
    text: str


def thinking_is_open(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the answer to a prompt begins inside the reasoning.

    It does if the last turn of the prompt holds a `<think>` token that nothing closes.
    """
    opening, closing = tokenizer.special_id(THINK_OPEN), tokenizer.special_id(THINK_CLOSE)
    for token_id in reversed(prompt_ids):
        if token_id == opening:
            return True
        if token_id == closing or token_id in tokenizer.eos_ids:
            return False
    return False


class AnswerStream:
    """Takes ids one at a time and gives the pieces of the answer that are certain.

    - Bytes that are no UTF-8 become U+FFFD, an unfinished character only in `finish`.
    - Control tokens are not shown. `<think>` and `</think>` switch between reasoning and text;
      line ends around the reasoning belong to neither.
    - A stop string ends the text before it, whichever tokens it spans; reasoning is not searched.
      Of several the one that is complete first wins, then the longest. One that is a special
      token's text ends the answer when that token comes.
    - User-defined tokens other than the two (such as those around tool calls) are text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], thinking_open: bool) -> None:
        """Begins an answer.

        Args:
            tokenizer: of the model that writes the answer.
            stop: stop strings, none of them empty.
            thinking_open: whether the prompt left the reasoning open (`thinking_is_open`).

        Raises:
            UsageError: if a stop string is empty.
        """
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise UsageError(
                f"stop: received {stop!r}, expected a list of texts that are not empty"
            )
        self.stopped = False
        """Whether a stop string has ended the answer. Later ids change nothing."""
        self._tokenizer = tokenizer
        self._opening = tokenizer.special_id(THINK_OPEN)
        self._closing = tokenizer.special_id(THINK_CLOSE)
        found = (tokenizer.special_id(text) for text in stop)
        self._stop_ids = frozenset(token_id for token_id in found if token_id is not None)
        self._thinking = thinking_open
        self._trim = thinking_open
        """Whether line ends are dropped until the section has begun."""
        self._line_ends = ""
        """Line ends of the reasoning that belong to it only if more follows."""
        self._search = _StopSearch(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> list[Event]:
        """Takes the next id; returns what has become certain.

        Raises:
            UsageError: if the id is outside the vocabulary.
        """
        if self.stopped:
            return []
        if not self._tokenizer.breaks_bytes(token_id):
            return self._section(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        events = self._section(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        if self.stopped:
            return events
        if token_id in self._stop_ids:
            events += self._flush()
            self.stopped = True
        elif token_id in (self._opening, self._closing):
            events += self._switch(thinking=token_id == self._opening)
        elif token_id not in self._tokenizer.hidden_ids:
            events += self._section(self._tokenizer.token_text(token_id))
        return events

    def finish(self) -> list[Event]:
        """Ends the answer; returns what was held back."""
        if self.stopped:
            return []
        events = self._section(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return events if self.stopped else events + self._flush()

    def _switch(self, thinking: bool) -> list[Event]:
        """Goes to the other section. A closing token outside the reasoning means nothing."""
        if thinking == self._thinking:
            return []
        events = self._flush()
        self._thinking = thinking
        self._trim = True
        return events

    def _flush(self) -> list[Event]:
        """What the section still holds back, now that nothing of it can follow."""
        self._line_ends = ""
        held = self._search.release()
        return [Event("text", held)] if held else []

    def _section(self, piece: str) -> list[Event]:
        if self._trim:
            piece = piece.lstrip("\n")
            self._trim = not piece
        if not piece:
            return []
        if self._thinking:
            piece = self._line_ends + piece
            certain = piece.rstrip("\n")
            self._line_ends = piece[len(certain) :]
            return [Event("reasoning", certain)] if certain else []
        certain, self.stopped = self._search.feed(piece)
        return [Event("text", certain)] if certain else []


class _StopSearch:
    """Finds the first complete stop string in a text that comes in pieces.

    One Knuth-Morris-Pratt automaton for each stop string: its state is the length of the longest
    beginning of that string with which the text so far ends, so the longest state is what has to
    be held back. Source: Knuth, Morris, Pratt 1977, section 2.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(dict.fromkeys(stop))
        self._borders = [_borders(text) for text in self._stop]
        self._states = [0] * len(self._stop)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Returns the text that is certain now, and whether a stop string has been completed."""
        if not self._stop:
            return piece, False
        text = self._held + piece
        for index in range(len(self._held), len(text)):
            longest = self._advance(text[index])
            if longest:
                self.release()
                return text[: index + 1 - longest], True
        cut = len(text) - max(self._states)
        self._held = text[cut:]
        return text[:cut], False

    def release(self) -> str:
        """Gives up what is held back and begins anew."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stop)
        return held

    def _advance(self, char: str) -> int:
        """Moves every automaton by one character; the length of the longest string completed."""
        longest = 0
        for number, (text, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            state = self._states[number]
            while state and text[state] != char:
                state = borders[state - 1]
            state += text[state] == char
            self._states[number] = state
            if state == len(text):
                longest = max(longest, state)
        return longest


def _borders(text: str) -> list[int]:
    """For each beginning of the text, the length of its longest border (KMP failure table)."""
    borders = [0] * len(text)
    for index in range(1, len(text)):
        length = borders[index - 1]
        while length and text[length] != text[index]:
            length = borders[length - 1]
        borders[index] = length + (text[length] == text[index])
    return borders

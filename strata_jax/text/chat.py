"""Messages to a prompt, by the chat template of the model file."""

import datetime
from collections.abc import Mapping, Sequence
from types import CodeType

from strata_jax.errors import UsageError
from strata_jax.text import provenance, template
from strata_jax.text.answer import THINK_CLOSE
from strata_jax.text.offers import Offers
from strata_jax.text.provenance import Json
from strata_jax.text.sandbox import Now
from strata_jax.text.tokenizer import SpecialSpan, Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"

_TOKEN_NAMES = {"bos": "bos_token", "eos": "eos_token"}
"""Names under which templates read the texts of the file's tokens."""

_SET_HERE = frozenset({"messages", "tools", "add_generation_prompt", *_TOKEN_NAMES.values()})

Messages = Sequence[Mapping[str, object]]


class ChatTemplate:
    """A chat template and the tokenizer that goes with it. Immutable, safe to share."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        keep_empty: bool = False,
        now: Now = datetime.datetime.now,
    ) -> None:
        """Compiles a template.

        Args:
            source: jinja2, as transformers understands it.
            tokenizer: of the same file.
            keep_empty: keeps assistant messages without text and calls. Otherwise they are left
                out, because models imitate them.
            now: clock for templates that write the date.

        Raises:
            BadFileError: if it is no template, or uses what the sandbox does not offer.
        """
        self._source = source
        self._tokenizer = tokenizer
        self._keep_empty = keep_empty
        self._now = now
        self._code = template.compile_template(template.parse_template(source))
        self.offers = Offers.of(template.parse_template(source))
        """What can be chosen."""
        self._marked: dict[tuple[str, str], CodeType] = {}

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, object], tokenizer: Tokenizer, keep_empty: bool = False
    ) -> "ChatTemplate":
        """The chat template of a model file; arguments as for the constructor.

        Raises:
            UsageError: if it has none.
            BadFileError: if it cannot be used.
        """
        source = metadata.get(TEMPLATE_KEY)
        if not isinstance(source, str):
            raise UsageError(
                f"chat: the model file has no {TEMPLATE_KEY}; give a prompt instead of messages"
            )
        return cls(source, tokenizer, keep_empty)

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        effort: str | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt as text, special tokens and typed texts alike.

        Args:
            messages: each with a `role` and a text `content` (or a list of text parts).
            tools: JSON descriptions of functions.
            add_generation_prompt: whether the beginning of the answer is added.
            thinking: on, off, or as the template has it.
            effort: how much to think, in the template's words, or as the template has it.
            extra: further variables of the template.

        Raises:
            UsageError: if the messages are malformed, something is asked for that the template
                does not read, or the template refuses.
            BadFileError: if the template goes beyond the sandbox's bounds.
        """
        inputs = self._inputs(messages, tools, thinking, effort, extra)
        return self._run(self._code, inputs, add_generation_prompt)

    def encode(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        effort: str | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The prompt as ids: special tokens are those the template writes, and no others.

        Arguments and errors are those of `render`; also raises UsageError if messages hold texts
        of special tokens and the template does not allow to tell them from its own.
        """
        inputs = self._inputs(messages, tools, thinking, effort, extra)
        plain = self._run(self._code, inputs, add_generation_prompt)
        spans = self._own_spans(plain, inputs, add_generation_prompt)
        leading = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
        ids = self._tokenizer.encode_spans(plain, spans)
        return ids if ids[:1] == leading else leading + ids

    def _inputs(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, object]] | None,
        thinking: bool | None,
        effort: str | None,
        extra: Mapping[str, object] | None,
    ) -> dict[str, Json]:
        """Everything that comes from outside, checked and copied."""
        raw: dict[str, object] = self._choices(thinking, effort, extra)
        raw |= {"tools": None, "documents": raw.get("documents")}  # as transformers does
        raw["messages"] = check_messages(messages, self._keep_empty)
        if tools:
            if "tools" not in self.offers.variables:
                raise UsageError(f"chat: received {len(tools)} tools, but this template reads none")
            raw["tools"] = list(tools)
        return provenance.map_inputs(raw, lambda text: text)

    def _choices(
        self, thinking: bool | None, effort: str | None, extra: Mapping[str, object] | None
    ) -> dict[str, object]:
        """The variables that are asked for; each has to be one the template reads."""
        offers = self.offers
        chosen: dict[str, object] = dict(extra or {})
        unknown = sorted((chosen.keys() - offers.variables) | (chosen.keys() & _SET_HERE))
        if unknown:
            readable = ", ".join(sorted(offers.variables - _SET_HERE)) or "none"
            raise UsageError(f"chat: no template variable {unknown[0]!r}; it reads {readable}")
        if thinking is not None:
            if offers.thinking is None:
                asked = f"thinking {'on' if thinking else 'off'}"
                raise UsageError(
                    f"chat: received {asked}, but this template has no switch; {offers.describe()}"
                )
            _choose(chosen, offers.thinking, thinking)
        if effort is not None:
            if offers.effort is None or (offers.efforts and effort not in offers.efforts):
                raise UsageError(
                    f"chat: received effort {effort!r}, but this template does not know it; "
                    f"{offers.describe()}"
                )
            _choose(chosen, offers.effort, effort)
        return chosen

    def _run(
        self,
        code: CodeType,
        inputs: Mapping[str, Json],
        add_generation_prompt: bool,
        marks: tuple[str, str] | None = None,
    ) -> str:
        """Renders with the tokens' texts, which are the template's side of the matter."""
        variables: dict[str, object] = {"add_generation_prompt": add_generation_prompt}
        for key, name in _TOKEN_NAMES.items():
            if key in self._tokenizer.named_ids:
                text = self._tokenizer.token_text(self._tokenizer.named_ids[key])
                variables[name] = self._mark(text, marks) if marks else text
        return template.run_template(code, variables | dict(inputs), self._now)

    def _own_spans(
        self, plain: str, inputs: dict[str, Json], add_generation_prompt: bool
    ) -> list[SpecialSpan]:
        """The special tokens that the template wrote (see `provenance`)."""
        found = self._tokenizer.find_special(plain)
        texts = [self._source, plain, *provenance.strings_in(inputs)]
        veil = provenance.Veil(self._tokenizer.special_texts, texts)
        veiled = veil.cover(inputs)
        if not found or veiled == inputs:
            return found
        shadow = self._attempt(self._code, veiled, add_generation_prompt)
        if shadow is not None and veil.lift(shadow) == plain:
            return self._tokenizer.find_special(shadow)
        code = self._marked_code(veil.marks)
        marked = self._attempt(code, inputs, add_generation_prompt, veil.marks)
        proof = self._attempt(code, veiled, add_generation_prompt, veil.marks)
        spans = provenance.marked_spans(plain, marked, proof, veil.marks, self._tokenizer)
        if spans is None:
            raise UsageError(
                "chat: messages hold texts of special tokens such as "
                f"{self._tokenizer.token_text(found[0].token_id)!r}, and this template does not "
                "let them be told from its own; take them out of the messages"
            )
        return spans

    def _attempt(
        self,
        code: CodeType,
        inputs: Mapping[str, Json],
        add_generation_prompt: bool,
        marks: tuple[str, str] | None = None,
    ) -> str | None:
        """Renders a variant that tells who wrote what; None if the template refuses it."""
        try:
            return self._run(code, inputs, add_generation_prompt, marks)
        except UsageError:
            return None

    def _marked_code(self, marks: tuple[str, str]) -> CodeType:
        if marks not in self._marked:
            tree = template.parse_template(self._source)
            marking = provenance.MarkWriting(lambda text: self._mark(text, marks))
            self._marked = {marks: template.compile_template(marking.visit(tree))}
        return self._marked[marks]

    def _mark(self, text: str, marks: tuple[str, str]) -> str:
        return provenance.mark_tokens(text, self._tokenizer, *marks)


def _choose(chosen: dict[str, object], name: str, value: object) -> None:
    if chosen.setdefault(name, value) != value:
        raise UsageError(f"chat: {name} is asked for as {chosen[name]!r} and as {value!r}")


def check_messages(messages: Messages, keep_empty: bool) -> list[Mapping[str, object]]:
    """Checks the shape of messages; leaves out empty assistant messages unless they are kept.

    Thoughts alone are an empty message too.

    Raises:
        UsageError: that names the message.
    """
    kept: list[Mapping[str, object]] = []
    for index, message in enumerate(messages):
        where = f"chat: message {index}"
        if not isinstance(message, Mapping):
            raise UsageError(f"{where} is a {type(message).__name__}, expected role and content")
        if not isinstance(message.get("role"), str):
            raise UsageError(f"{where} has role {message.get('role')!r}, expected a text")
        if message.get("content") is None and message["role"] != "assistant":
            raise UsageError(f"{where} ({message['role']}) has no content")
        reply = _text_of(message.get("content"), where).split(THINK_CLOSE)[-1].strip()
        empty = not reply and not message.get("tool_calls")
        if keep_empty or not empty or message["role"] != "assistant":
            kept.append(message)
    return kept


def _text_of(content: object, where: str) -> str:
    """The text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise UsageError(
            f"{where} has a content of type {type(content).__name__}, expected text or text parts"
        )
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UsageError(f"{where} has a part of type {kind!r}, expected text parts only")
    return "".join(part["text"] for part in content)

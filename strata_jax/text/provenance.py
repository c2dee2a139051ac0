"""Tells special tokens that a chat template wrote from texts that people typed.

A message that says `<|im_end|>` must not end a turn. Templates trim, split, quote and join what
they are given, so a rendered prompt alone does not show who wrote what. Two views of the same
rendering do:

- *Veiled inputs*: every character special tokens are made of is replaced in the inputs by a
  character nobody uses, one for one. If the rendering, unveiled, is the plain one, each character
  of it is the template's own or an input's, and a token without a veiled character is the
  template's.
- *Marked template*: where a template inspects such characters (`'</think>' in content`), veils
  would change what it does. Then the special tokens in its own texts are marked instead, where it
  writes them but not where it compares with them. If the rendering without marks is the plain one,
  marked tokens are the template's, and no others, provided that on veiled inputs it writes none
  without a mark.

If neither holds the prompt is refused; it is never guessed.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping

from jinja2 import nodes, visitor

from strata_jax.errors import UsageError
from strata_jax.text.tokenizer import SpecialSpan, Tokenizer

_PRIVATE_USE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
"""Unicode's supplementary private use areas: assigned to nobody."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class Veil:
    """Characters nobody uses, to stand for those of special tokens and for marks."""

    def __init__(self, special_texts: Iterable[str], texts: Iterable[str]) -> None:
        """Picks the characters.

        Args:
            special_texts: of the tokens to be told apart.
            texts: everything that may appear in the renderings.

        Raises:
            UsageError: if the texts use up the private use areas.
        """
        chars = _token_chars(special_texts)
        used = set().union(*texts)
        free = (char for char in map(chr, _PRIVATE_USE) if char not in used)
        picked = list(itertools.islice(free, len(chars) + 2))
        if len(picked) < len(chars) + 2:
            raise UsageError("chat: the messages use every private-use character of Unicode")
        self.marks = (picked[0], picked[1])
        """Opening and closing mark."""
        self._cover = str.maketrans(chars, "".join(picked[2:]))
        self._lift = str.maketrans("".join(picked[2:]), chars)

    def cover(self, inputs: Mapping[str, "Json"]) -> dict[str, "Json"]:
        """The inputs, unable to spell a special token."""
        return map_inputs(inputs, lambda text: text.translate(self._cover))

    def lift(self, text: str) -> str:
        """A rendering as it would be without the veil."""
        return text.translate(self._lift)


def _token_chars(special_texts: Iterable[str]) -> str:
    """The characters without which no special token can be written: its punctuation."""
    chars: set[str] = set()
    for text in special_texts:
        chars |= {c for c in text if not (c.isalnum() or c.isspace() or c == "_")} or {text[0]}
    return "".join(sorted(chars))


def map_inputs(inputs: Mapping[str, object], change: Callable[[str], str]) -> dict[str, Json]:
    """A copy of template variables in which every string has been changed, except their names.

    Raises:
        UsageError: if they hold anything JSON does not, or are nested too deep.
    """
    try:
        return {name: _map_strings(value, change) for name, value in inputs.items()}
    except RecursionError as error:
        raise UsageError("chat: the messages are nested too deep") from error


def _map_strings(value: object, change: Callable[[str], str]) -> Json:
    if isinstance(value, str):
        return change(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {change(str(key)): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    raise UsageError(f"chat: the messages hold a {type(value).__name__}, expected JSON-like data")


def strings_in(value: Json) -> Iterable[str]:
    """All strings of JSON-like data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def unmark(text: str, opening: str, closing: str) -> tuple[str, list[tuple[int, int]]] | None:
    """Takes the marks out: the text and the spans they enclosed; None if they do not pair up."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for number, part in enumerate(text.split(opening)):
        marked, mark, rest = part.partition(closing)
        if bool(mark) != (number > 0) or closing in rest:
            return None
        if mark:
            spans.append((length, length + len(marked)))
        parts += [marked, rest]
        length += len(marked) + len(rest)
    return "".join(parts), spans


def mark_tokens(text: str, tokenizer: Tokenizer, opening: str, closing: str) -> str:
    """Puts marks around the special tokens of a text."""
    parts: list[str] = []
    at = 0
    for start, end, _ in tokenizer.find_special(text):
        parts += [text[at:start], opening, text[start:end], closing]
        at = end
    return "".join(parts) + text[at:]


def marked_spans(
    plain: str,
    marked: str | None,
    proof: str | None,
    marks: tuple[str, str],
    tokenizer: Tokenizer,
) -> list[SpecialSpan] | None:
    """The template's special tokens in a rendering, by its marks; None if marks cannot tell.

    Args:
        plain: the rendering.
        marked: the same with a marked template; None if it failed.
        proof: that of veiled inputs with the marked template; None if it failed.
        marks: opening and closing mark.
        tokenizer: whose special tokens they are.
    """
    unmarked = None if marked is None else unmark(marked, *marks)
    proven = None if proof is None else unmark(proof, *marks)
    if unmarked is None or proven is None or unmarked[0] != plain:
        return None
    if _is_outside(*proven, tokenizer):
        return None
    spans: list[SpecialSpan] = []
    for start, end in unmarked[1]:
        token_id = tokenizer.special_id(plain[start:end])
        if token_id is None:
            return None
        spans.append(SpecialSpan(start, end, token_id))
    return spans


def _is_outside(text: str, spans: Iterable[tuple[int, int]], tokenizer: Tokenizer) -> bool:
    """Whether a special token stands in the text outside the spans (given in order)."""
    at = 0
    for start, end in [*spans, (len(text), len(text))]:
        if tokenizer.find_special(text[at:start]):
            return True
        at = end
    return False


class MarkWriting(visitor.NodeTransformer):
    """Marks special tokens in the texts a template writes or keeps, not in those it compares.

    Written: template data, and in printed or assigned expressions what ends up in the result: both
    sides of `+` and `~`, branches, filtered texts, items, arguments of macros.
    """

    def __init__(self, mark: Callable[[str], str]) -> None:
        self._mark = mark

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        """What is printed."""
        for child in node.nodes:
            self._written(child)
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        """What is kept for later."""
        self._written(node.node)
        return node

    def _written(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.TemplateData):
            node.data = self._mark(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            node.value = self._mark(node.value)
        else:
            for child in _written_parts(node):
                self._written(child)


def _written_parts(node: nodes.Node) -> list[nodes.Node]:
    """The parts of an expression that can end up in its value."""
    if isinstance(node, nodes.Add | nodes.And | nodes.Or):
        return [node.left, node.right]
    if isinstance(node, nodes.Concat):
        return list(node.nodes)
    if isinstance(node, nodes.CondExpr):
        return [node.expr1, *([node.expr2] if node.expr2 else [])]
    if isinstance(node, nodes.Filter):
        kept = node.args if node.name in ("d", "default", "join") else []
        return [*([node.node] if node.node else []), *kept]
    if isinstance(node, nodes.List | nodes.Tuple):
        return list(node.items)
    if isinstance(node, nodes.Dict):
        return [pair.value for pair in node.items]
    return _written_parts_of_access(node)


def _written_parts_of_access(node: nodes.Node) -> list[nodes.Node]:
    if isinstance(node, nodes.Getitem):
        return [node.node]
    if isinstance(node, nodes.Call):
        if isinstance(node.node, nodes.Getattr):
            return [node.node.node]
        return [*node.args, *(pair.value for pair in node.kwargs)]
    return []

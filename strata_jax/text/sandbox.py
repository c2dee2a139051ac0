"""Where chat templates run: jinja2's sandbox with bounds on time and memory.

A template is a program by whoever made the file. jinja2 keeps it from the rest of the process;
what it may still do is loop and allocate. Here every loop round and every call looks at the clock,
and everything that can make a text or list longer pays from a budget before or as it does so. What
grows without need in a template (padding, tables, `sum` of lists) is not offered. A single call
into C is not interrupted, but none of those offered takes long within the budget.
"""

import datetime
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sized
from typing import Any, NoReturn, cast

import jinja2
import markupsafe
from jinja2 import filters, runtime, sandbox

from strata_jax.text.budget import Budget, TemplateLimitError

Now = Callable[[], datetime.datetime]

_MAX_INTEGER_BITS = 4096
_MAX_DIGITS = 4
_MAX_WIDTH = 256
_SORTING_BYTES = 256
"""What sorting one item costs of the budget: it takes no memory, but its time."""

_FILTERS = (
    "abs",
    "attr",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "groupby",
    "int",
    "items",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "safe",
    "select",
    "selectattr",
    "sort",
    "title",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
)
_SORTING_FILTERS = frozenset({"dictsort", "groupby", "sort", "unique"})
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "translate"})
_WIDE_PERCENT = re.compile(rf"%[^a-zA-Z%]*(\d{{{_MAX_DIGITS},}}|\*)")
_WIDE_BRACES = re.compile(rf"\{{[^{{}}]*:[^{{}}]*(\d{{{_MAX_DIGITS},}}|\{{)")


class TemplateRefusalError(Exception):
    """The template called `raise_exception`; the text is its own."""


class Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """The environment of one run; compiled templates need one as well, for the names it offers."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, budget: Budget, now: Now) -> None:
        # Without the optimiser nothing of the template is evaluated before it runs.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols"],
            finalize=self._print,
        )
        self.budget = budget
        self.concat = self._join_output  # pyright: ignore[reportAttributeAccessIssue]  (declared as "".join)
        kept = {name: self._paid(name, cast(Any, self.filters[name])) for name in _FILTERS}
        self.filters = kept | {
            "format": self._filter_format,
            "indent": self._filter_indent,
            "join": self._filter_join,
            "replace": self._filter_replace,
            "round": self._filter_round,
            "string": self._filter_string,
            "tojson": self._filter_tojson,
        }
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda text: now().strftime(str(text)[:_MAX_WIDTH])

    # What compiled templates call.

    def tick(self) -> None:
        """Called at the head of every loop round (see `template`)."""
        self.budget.tick()

    @jinja2.pass_context  # so that constants are not printed while compiling
    def _print(self, _context: runtime.Context, value: object) -> object:
        self.budget.pay_to_print(value)
        return value

    def _join_output(self, pieces: Iterable[str]) -> str:
        kept: list[str] = []
        for piece in pieces:
            self.budget.pay(sys.getsizeof(piece))
            kept.append(piece)
        return "".join(kept)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Operators that make things longer."""
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            _check_bits(_bits(left) * abs(right) if isinstance(right, int) else 0)
        elif operator == "%" and isinstance(left, str):
            self.budget.pay_to_print(right)
            _check_format(left, _WIDE_PERCENT)
        value = super().call_binop(context, operator, left, right)
        self.budget.pay_for(value)
        return value

    def _check_product(self, left: Any, right: Any) -> None:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                unit = 4 if isinstance(one, str) else 8
                self.budget.pay(unit * len(one) * max(0, other))
        _check_bits(_bits(left) + _bits(right))

    def call(  # pyright: ignore[reportIncompatibleMethodOverride]  (ours are positional-only)
        self, context: runtime.Context, callee: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls of methods, macros and functions."""
        owner, name = getattr(callee, "__self__", None), getattr(callee, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            self._pay_to_replace(owner, args)
        elif isinstance(owner, str) and name == "join" and args:
            args = (self._pay_to_join(args[0], owner), *args[1:])
        value = super().call(context, callee, *args, **kwargs)
        self.budget.pay_for(value)
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also hides methods that pad texts, and all of numbers."""
        if isinstance(obj, int | float | bytes):
            return False
        if isinstance(obj, str) and attr in _PADDING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`: jinja2 guards the fields, this the widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__, _WIDE_BRACES)
        return wrapped

    # Filters.

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with jinja2's marks: which argument it passes first
        def paid(*args: Any, **kwargs: Any) -> Any:
            if name in _SORTING_FILTERS:
                self.budget.pay(_SORTING_BYTES * sum(len(a) for a in args if isinstance(a, Sized)))
            self.budget.tick()
            value = function(*args, **kwargs)
            self.budget.pay_for(value)
            return value

        return paid

    def _pay_to_replace(self, text: str, args: tuple[Any, ...]) -> None:
        if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self.budget.pay(4 * (len(text) + text.count(args[0]) * len(args[1])))

    def _pay_to_join(self, values: Iterable[Any], separator: str) -> list[Any]:
        kept: list[Any] = []
        for value in values:
            self.budget.pay_to_print(value)
            length = len(value) if isinstance(value, str) else 0
            self.budget.pay(4 * (length + len(separator)))
            kept.append(value)
        return kept

    def _filter_format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        _check_format(str(value), _WIDE_PERCENT)
        self.budget.pay_to_print([args, kwargs])
        return filters.do_format(value, *args, **kwargs)

    def _filter_indent(
        self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        size = width if isinstance(width, int) else len(width)
        if size > _MAX_WIDTH:
            raise TemplateLimitError(f"it indents by {size} characters")
        self.budget.pay(4 * (len(s) + (s.count("\n") + 1) * size))
        return filters.do_indent(s, width, first, blank)

    def _filter_join(self, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            value = map(filters.make_attrgetter(self, attribute), value)
        return str(d).join(map(str, self._pay_to_join(value, str(d))))

    def _filter_replace(self, s: Any, old: Any, new: Any, count: int = -1) -> str:
        text, old, new = str(s), str(old), str(new)
        self._pay_to_replace(text, (old, new))
        return text.replace(old, new, count)

    def _filter_round(self, value: Any, precision: int = 0, method: Any = "common") -> float:
        if abs(precision) > _MAX_WIDTH:
            raise TemplateLimitError(f"it rounds to {precision} digits")
        return filters.do_round(value, precision, method)

    def _filter_string(self, value: Any) -> str:
        self.budget.pay_to_print(value)
        return markupsafe.soft_str(value)

    def _filter_tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as chat templates expect it: nothing escaped for HTML, other scripts as they are."""
        if isinstance(indent, int) and indent > _MAX_WIDTH:
            raise TemplateLimitError(f"it indents by {indent} characters")
        self.budget.pay_to_print(value)
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        self.budget.pay_for(text)
        return text


def _refuse(message: object) -> NoReturn:
    raise TemplateRefusalError(message)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it computes a number of {bits} bits")


def _check_format(text: str, wide: re.Pattern[str]) -> None:
    if wide.search(text):
        raise TemplateLimitError("it formats with a width that is too large or computed")

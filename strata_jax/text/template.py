"""A chat template's way from source to text, in `sandbox`, with every failure made a clear error."""

import datetime
from collections.abc import Mapping
from types import CodeType

import jinja2
from jinja2 import nodes, visitor

from strata_jax.errors import BadFileError, UsageError
from strata_jax.text.budget import Budget, TemplateLimitError
from strata_jax.text.sandbox import Now, Sandbox, TemplateRefusalError

MAX_SOURCE_CHARS = 1 << 20
"""Longest template; released ones have 2,000 to 40,000 characters."""

_MAX_MESSAGE = 500
_MAX_DEPTH = 100
"""Deepest syntax tree, so that walking it by recursion is safe; released ones stay under 30."""


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template.

    Raises:
        BadFileError: if it is none, or far too long.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise BadFileError(
            f"chat template: it has {len(source)} characters, expected at most {MAX_SOURCE_CHARS}"
        )
    env = _empty_sandbox()
    try:
        tree = env.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise BadFileError(
            f"chat template: line {error.lineno}: {_one_line(error.message)}"
        ) from error
    except Exception as error:  # whatever a hostile template does to the parser
        raise BadFileError(f"chat template: it cannot be read ({_named(error)})") from error
    if _is_deep(tree):
        raise BadFileError(f"chat template: it is nested more than {_MAX_DEPTH} deep")
    return tree


def compile_template(tree: nodes.Template) -> CodeType:
    """Code for `run_template`; the tree is used up.

    Raises:
        BadFileError: if it uses names that are not offered, or is too deep for Python.
    """
    env = _empty_sandbox()
    try:
        bounded = _Bounds().visit(tree)
        bounded.set_environment(env)
        return env.compile(bounded, filename="<chat template>")
    except jinja2.TemplateSyntaxError as error:
        raise BadFileError(
            f"chat template: line {error.lineno}: {_one_line(error.message)}"
        ) from error
    except Exception as error:  # too deep, too many blocks: the compiler has many words for it
        raise BadFileError(f"chat template: it cannot be compiled ({_named(error)})") from error


def run_template(
    code: CodeType, variables: Mapping[str, object], now: Now, budget: Budget | None = None
) -> str:
    """The text a template makes.

    Args:
        code: from `compile_template`.
        variables: what the template may read.
        now: clock for `strftime_now`.
        budget: bounds, the usual ones if left out.

    Raises:
        UsageError: if the template refuses the messages or cannot work with them.
        BadFileError: if it needs too much time or memory, or what the sandbox forbids.
    """
    env = Sandbox(budget or Budget(), now)
    template = jinja2.Template.from_code(env, code, env.make_globals(None))
    try:
        return template.render(variables)
    except TemplateRefusalError as refusal:
        raise UsageError(f"chat template: {_one_line(refusal)}") from refusal
    except (TemplateLimitError, OverflowError, MemoryError, RecursionError) as error:
        raise BadFileError(f"chat template: stopped, {error or type(error).__name__}") from error
    except jinja2.exceptions.SecurityError as error:
        raise BadFileError(f"chat template: {_one_line(error)}") from error
    except Exception as error:  # a template can raise anything
        raise UsageError(
            f"chat template: it cannot use these messages ({_named(error)})"
        ) from error


def _is_deep(tree: nodes.Node) -> bool:
    level: list[nodes.Node] = [tree]
    for _ in range(_MAX_DEPTH):
        level = [child for node in level for child in node.iter_child_nodes()]
    return bool(level)


def _empty_sandbox() -> Sandbox:
    return Sandbox(Budget(), datetime.datetime.now)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: object) -> str:
    """The text of an error, which a template may have chosen: short and safe for a terminal."""
    line = "".join(char if char.isprintable() else " " for char in str(error)[:_MAX_MESSAGE])
    return " ".join(line.split())


class _Bounds(visitor.NodeTransformer):
    """Rewrites what the sandbox cannot intercept: a look at the clock in loops, `~` as `join`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.EnvironmentAttribute("tick", lineno=node.lineno)
        call = nodes.Call(tick, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)

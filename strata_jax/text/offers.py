"""What a chat template lets its user choose, read off its syntax tree."""

import dataclasses
from collections.abc import Iterator

from jinja2 import meta, nodes

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names under which templates read whether to think (Qwen; DeepSeek and Granite)."""

EFFORT_VARIABLES = ("reasoning_effort",)
"""Names under which templates read how much to think."""

_PASSING_FILTERS = frozenset({"d", "default", "lower", "string", "trim"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offers:
    """The variables of a template and what they stand for."""

    variables: frozenset[str]
    """Everything it reads and does not set itself first; not the functions of the sandbox."""
    thinking: str | None
    """The variable that turns thinking on and off."""
    effort: str | None
    """The variable that takes the effort."""
    efforts: tuple[str, ...]
    """The efforts it knows, in its order; empty if it takes any text."""

    @classmethod
    def of(cls, tree: nodes.Template) -> "Offers":
        """Reads a template that has not been rewritten yet; the tree is used up."""
        known = {name: _known_values(tree, name) for name in EFFORT_VARIABLES}
        # Last, because jinja2 rewrites comparisons of the tree while it looks for variables.
        offered = tree.environment.globals if tree.environment else {}
        variables = frozenset(meta.find_undeclared_variables(tree) - offered.keys())
        effort = next((name for name in EFFORT_VARIABLES if name in variables), None)
        return cls(
            variables=variables,
            thinking=next((name for name in THINKING_VARIABLES if name in variables), None),
            effort=effort,
            efforts=known[effort] if effort else (),
        )

    def describe(self) -> str:
        """What can be chosen, for error messages."""
        choices = []
        if self.thinking:
            choices.append("thinking on or off")
        if self.effort:
            choices.append(f"effort {', '.join(self.efforts) or '(any text)'}")
        return f"it offers {' and '.join(choices)}" if choices else "it offers neither"


def _known_values(tree: nodes.Template, variable: str) -> tuple[str, ...]:
    """The texts a template compares a variable with.

    A membership test lists all of them. Without one, single comparisons do, unless the template
    also prints the variable: then it takes any text.
    """
    names = _aliases(tree, variable)
    compared = [node for node in tree.find_all(nodes.Compare) if _passes(node.expr, names)]
    operands = [operand for node in compared for operand in node.ops]
    listed = [text for o in operands if o.op in ("in", "notin") for text in _texts(o.expr)]
    if listed:
        return tuple(dict.fromkeys(listed))
    if any(_prints(node, names) for node in tree.find_all(nodes.Output)):
        return ()
    return tuple(dict.fromkeys(t for o in operands if o.op in ("eq", "ne") for t in _texts(o.expr)))


def _aliases(tree: nodes.Template, variable: str) -> frozenset[str]:
    """The variable and the names it is assigned to, directly or with a default."""
    names = {variable}
    before = 0
    while len(names) > before:
        before = len(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _passes(assign.node, names):
                names.add(assign.target.name)
    return frozenset(names)


def _passes(node: nodes.Node | None, names: set[str] | frozenset[str]) -> bool:
    """Whether an expression's value may be that of one of the names."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Filter):
        return node.name in _PASSING_FILTERS and _passes(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _passes(node.expr1, names) or _passes(node.expr2, names)
    if isinstance(node, nodes.Or):
        return _passes(node.left, names) or _passes(node.right, names)
    return False


def _prints(node: nodes.Node, names: frozenset[str]) -> bool:
    """Whether a name is part of what is printed, errors and conditions left aside."""
    if isinstance(node, nodes.Name):
        return node.name in names
    return any(_prints(child, names) for child in _printed_children(node))


def _printed_children(node: nodes.Node) -> Iterator[nodes.Node]:
    if isinstance(node, nodes.Compare | nodes.Test):
        return iter(())
    if isinstance(node, nodes.Call) and node.node == nodes.Name("raise_exception", "load"):
        return iter(())
    if isinstance(node, nodes.CondExpr):
        return iter([node.expr1, *([node.expr2] if node.expr2 else [])])
    return node.iter_child_nodes()


def _texts(node: nodes.Node) -> list[str]:
    """The text constants of a constant or of a list of them."""
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    return [i.value for i in items if isinstance(i, nodes.Const) and isinstance(i.value, str)]

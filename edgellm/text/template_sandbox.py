"""A jinja2 environment in which a hostile template can neither reach anything nor use more than it is given.

jinja2's immutable sandbox keeps private attributes and mutating methods away, but lets a template run for ever or make
a value of any size in a single step, where Python looks neither at the clock nor at Ctrl-C. So operators, comparisons,
slices, `~`, containers and what is printed are compiled into calls of `template_operations`; methods, filters, tests
and functions are those on lists; loops, calls and compiling look at the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import BlockReference, LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from edgellm.text import template_operations
from edgellm.text.template_budget import TemplateRaised, check, current_budget

_LONGEST_REFUSAL = 2000  # characters of an error's text
_LARGEST_PROGRAM = 1024 * 1024  # characters of the Python that a template becomes
#: What has attributes beside text and containers.
_WITH_ATTRIBUTES = (LoopContext, Macro, Cycler, Joiner, Namespace, TemplateReference, BlockReference, jinja2.Undefined)
#: Statements that read other templates, or change how text is printed.
_REFUSED: dict[type[nodes.Node], str] = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "import",
    nodes.Extends: "extends",
    nodes.ScopedEvalContextModifier: "autoescape",
}
#: The methods that templates may call.
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(template_operations.TEXT_METHODS.split()),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
#: What Python's own types have, allowed or not.
_ATTRIBUTES = {kind: frozenset(dir(kind)) for kind in (str, Markup, dict, list, tuple)}
#: Operations that are compiled into calls of filters, by names that nobody writes in a template.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "a < b": template_operations.compare,
    "a ~ b": lambda values: template_operations.concatenated(map(template_operations.printed, values)),
    "{a: b}": template_operations.make_dictionary,
    "a[b:c]": lambda value, *ends: current_budget.get().take(value[slice(*ends)]),
    "[a, b]": lambda value: current_budget.get().take(value),
    "for": lambda value: current_budget.get().take(value),
}


class _Namespace(Namespace):
    """jinja2's namespace, which prints as nothing of what it holds: it is the one value that can be changed later."""

    def __init__(self, pairs: Any = (), /, **values: Any) -> None:
        super().__init__(template_operations.make_dictionary(pairs, **values))

    def __repr__(self) -> str:
        return "namespace"


class _Language(Extension):
    """Bounds the words and signs of a template, and takes `{% generation %}`, which is for training and changes
    nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

    def parse(self, parser: Any) -> list[nodes.Node]:
        """The content of a block of `generation`, in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def filter_stream(self, stream: Any) -> Iterator[Any]:
        """The same tokens, counted."""
        budget = current_budget.get()
        for number, token in enumerate(stream):
            budget.spend(64)
            check(number, budget.limits.source_tokens, "has more than {} words and signs")
            yield token


class _ClockedGenerator(CodeGenerator):
    """jinja2's compiler, which looks at the clock with every node."""

    def get_visitor(self, node: nodes.Node) -> Any:
        """What writes a node."""
        current_budget.get().spend(64)
        return super().get_visitor(node)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, as `transformers` sets it up, with limits."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    code_generator_class = _ClockedGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Language], finalize=_finalize, cache_size=0
        )
        self.optimized = False  # nothing is computed at compile time that could be left for the rendering
        self.concat = template_operations.concatenated  # type: ignore[method-assign]
        self.filters = template_operations.FILTERS | _OPERATIONS
        self.tests = template_operations.TESTS  # type: ignore[assignment]
        kept = {name: self.globals[name] for name in ("range", "joiner", "cycler")}
        self.globals.clear()
        self.globals.update(kept, namespace=_Namespace, dict=template_operations.make_dictionary)
        self.globals.update(raise_exception=_raise_exception, strftime_now=template_operations.date_of_today)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            step = nodes.Filter(nodes.Const(True), "for", [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(step, lineno=loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(step, loop.test, lineno=loop.lineno)
        return _Checked().visit(tree)

    def _compile(self, source: str, filename: str) -> Any:
        check(len(source), _LARGEST_PROGRAM, "becomes a program of more than {} characters")
        code = super()._compile(source, filename)
        current_budget.get().spend(16 * len(source))
        return code

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only those of loops, macros and the like: methods of text and containers are found by `getattr`."""
        return isinstance(obj, _WITH_ATTRIBUTES) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Fail at once rather than when the value is used."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute or item; a method is a bounded one."""
        if type(obj) in _ATTRIBUTES:
            if attribute in _ATTRIBUTES[type(obj)]:
                return self._method(obj, attribute)
            if type(obj) is dict and attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item or attribute; a method is a bounded one."""
        if type(obj) is dict and type(argument) is str and argument in obj:
            return obj[argument]
        if type(obj) in _ATTRIBUTES and type(argument) is str:
            return self.getattr(obj, argument)
        if isinstance(argument, tuple):
            current_budget.get().measure(argument)
        return super().getitem(obj, argument)

    def _method(self, obj: Any, name: str) -> Callable[..., Any]:
        kind = str if isinstance(obj, str) else type(obj)
        if name not in _METHODS[kind]:
            return self.unsafe_undefined(obj, name)  # type: ignore[return-value]
        if name == "format":
            return lambda *args, **values: template_operations.format_text(self, obj, args, values)
        if name == "format_map":
            return lambda values: template_operations.format_text(self, obj, (), values)
        if kind is str:
            return lambda *args, **values: template_operations.call_method(obj, name, *args, **values)

        def measured(*args: Any) -> Any:  # it hashes its argument, or compares it with what the object holds
            for value in (*args[:1], *([obj] if name in ("count", "index") else ())):
                current_budget.get().measure(value)
            return getattr(obj, name)(*args)

        return measured

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result is checked, before it is made where it could be large."""
        return template_operations.binary(operator, left, right, self.binop_table[operator])

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call that pays for its arguments and its result."""
        budget = current_budget.get()
        budget.spend(64 + 8 * (len(args) + len(kwargs)))
        if isinstance(getattr(function, "__self__", None), LoopContext):
            budget.measure(args)  # `loop.changed` compares
        budget.calls += 1
        try:
            check(budget.calls, budget.limits.depth, "is nested too deeply, or calls itself without end")
            return budget.take(super().call(context, function, *args, **kwargs))
        finally:
            budget.calls -= 1


class _Checked(jinja2.visitor.NodeTransformer):
    """Puts the checked operations where jinja2 would write Python's own."""

    def get_visitor(self, node: nodes.Node) -> Any:
        """What replaces a node; None where nothing does."""
        current_budget.get().spend(64)
        if type(node) in _REFUSED:
            raise SecurityError(f"{{% {_REFUSED[type(node)]} %}} is not allowed")
        return super().get_visitor(node)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        current_budget.get().check_integer(node.value)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _operation(self.generic_visit(node), "a ~ b", nodes.List(node.nodes))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        names = nodes.Const(tuple(operand.op for operand in node.ops))
        return _operation(node, "a < b", node.expr, names, nodes.List([operand.expr for operand in node.ops]))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _operation(node, "a[b:c]", node.node, *[nodes.Const(None) if end is None else end for end in ends])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        pairs = nodes.List([nodes.Tuple([pair.key, pair.value], "load") for pair in node.items])
        return _operation(node, "{a: b}", pairs)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" else _operation(node, "[a, b]", node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _operation(self.generic_visit(node), "[a, b]", node)


def _operation(node: nodes.Node, name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _finalize(context: Any, value: Any) -> str:
    """What `{{ }}` prints. It asks for the context so that nothing is printed while a template is compiled."""
    return template_operations.printed(value)


def _raise_exception(message: Any) -> None:
    raise TemplateRaised(template_operations.printed(message)[:_LONGEST_REFUSAL])

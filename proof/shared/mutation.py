"""Mutations of a Python source: each is one small change that a test should notice.

What has no effect on behaviour is left alone: docstrings, annotations, log calls, messages, assertions,
`__slots__`, and what runs for a type checker only.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
EXTREMES = {"min": "max", "max": "min"}
DELETED = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Raise, ast.Expr)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Replace = Callable[[ast.AST], None]


class Mutation(NamedTuple):
    """One change: of which kind, where, and what it says there before and after."""

    kind: str
    line: int
    where: str  # the function or class it is in
    before: str
    after: str
    code: ast.Module

    @property
    def change(self) -> str:
        return f"{self.kind}: {self.before} → {self.after}"


class _Place(NamedTuple):
    """A node that can be changed, with how to put another in its place."""

    node: ast.AST
    replace: Replace
    where: str
    function: ast.AST | None


def mutate(source: str) -> Iterator[Mutation]:
    """Every mutation of the source, in a fixed order; `code` is valid until the next is asked for."""
    tree = ast.parse(source)
    for place in list(_places(tree, "", None)):
        for kind, changed in _changes(place):
            place.replace(changed)
            ast.fix_missing_locations(ast.copy_location(changed, place.node))
            if ast.dump(changed) != ast.dump(place.node):
                located = place.node.target if isinstance(place.node, ast.comprehension) else place.node
                line = getattr(located, "lineno", 0)
                before, after = (_shown(each) for each in (place.node, changed))
                yield Mutation(kind, line, place.where, before, after, tree)
            place.replace(place.node)


def _shown(node: ast.AST) -> str:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return f"if {_shown(node.test)}"
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else text[:87] + "…"


def _places(node: ast.AST, where: str, function: ast.AST | None) -> Iterator[_Place]:
    """The places below a node, in the order of the source."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params", "type_comment"):
            continue
        for child, replace in _children(node, name, value):
            if _is_skipped(child):
                continue
            inner, inside = where, function
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                inner = f"{where}.{child.name}" if where else child.name
                inside = child if isinstance(child, FUNCTIONS) else None
            yield _Place(child, replace, inner, inside)
            yield from _places(child, inner, inside)


def _children(node: ast.AST, name: str, value: object) -> Iterator[tuple[ast.AST, Replace]]:
    if isinstance(value, ast.AST):
        yield value, lambda new: setattr(node, name, new)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            if isinstance(each, ast.AST):
                yield each, _put_at(value, index)


def _put_at(nodes: list[ast.AST], index: int) -> Replace:
    def put(new: ast.AST) -> None:
        nodes[index] = new

    return put


def _is_skipped(node: ast.AST) -> bool:
    """What no test of behaviour should see."""
    match node:
        case (
            ast.Expr(value=ast.Constant()) | ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom()
        ):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            return True
        case ast.Assign(targets=[ast.Name(id="__slots__" | "log")]):
            return True
        case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Subscript(value=ast.Name(id="Generic" | "Protocol")):
            return True
        case ast.ClassDef(bases=[ast.Name(id="Protocol")]):
            return True
    return False


def _changes(place: _Place) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in a node's place."""
    node = place.node
    match node:
        case ast.Compare():
            yield from _compared(node)
        case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC:
            yield "arithmetic", ast.BinOp(left, ARITHMETIC[type(operator)](), right)
        case ast.BoolOp(operator, values):
            yield "boolean", ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", copy.copy(operand)  # it gets another location
        case ast.UnaryOp(ast.USub(), operand):
            yield "sign", copy.copy(operand)
        case ast.Constant(bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield "constant", ast.Constant(value + 1)
            yield "constant", ast.Constant(value - 1)
        case ast.Call(ast.Name(id="min" | "max" as name), arguments, keywords):
            yield "min/max", ast.Call(ast.Name(EXTREMES[name], ast.Load()), arguments, keywords)
        case ast.IfExp(test, body, orelse):
            yield "condition", ast.IfExp(_negated(test), body, orelse)
        case ast.comprehension(target, source, [*conditions], is_async) if conditions:
            negated = [*conditions[:-1], _negated(conditions[-1])]
            yield "condition", ast.comprehension(target, source, negated, is_async)
        case ast.stmt():
            yield from _changed_statement(node, place)


def _changed_statement(node: ast.stmt, place: _Place) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.If(test, body, orelse):
            yield "condition", ast.If(_negated(test), body, orelse)
        case ast.While(test, body, orelse) if not isinstance(test, ast.Constant):
            yield "condition", ast.While(_negated(test), body, orelse)
        case ast.Break():
            yield "loop", ast.Continue()
        case ast.Continue():
            yield "loop", ast.Break()
        case ast.Return(value) if value is not None:
            yield "return", ast.Return(_other_value(value, place.function))
        case ast.AugAssign(target, operator, value) if type(operator) in ARITHMETIC:
            yield "arithmetic", ast.AugAssign(target, ARITHMETIC[type(operator)](), value)
    if isinstance(node, DELETED) and place.function is not None:
        yield "deleted", ast.Pass()


def _compared(node: ast.Compare) -> Iterator[tuple[str, ast.AST]]:
    for index, operator in enumerate(node.ops):
        for other in COMPARISONS[type(operator)]:
            operators = [*node.ops[:index], other(), *node.ops[index + 1 :]]
            yield "comparison", ast.Compare(node.left, operators, node.comparators)


def _negated(test: ast.expr) -> ast.expr:
    return test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else _not(test)


def _not(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _other_value(value: ast.expr, function: ast.AST | None) -> ast.expr:
    """Another value of the same type where that is known to be a truth value or a number, else None."""
    declared = getattr(function, "returns", None)
    match declared:
        case ast.Name(id="bool"):
            return _negated(value)
        case ast.Name(id="int" | "float"):
            return ast.BinOp(value, ast.Add(), ast.Constant(1))
    return ast.Constant(None)

"""Operators: the small defects that may be made in one Python file, each as an edit of its text.

They are found on the syntax tree and made in the text, so that all the rest, line numbers included, stays as it is:
Triton's cache then knows each kernel that was not touched. Nothing is changed in docstrings, annotations, decorators,
f-strings, assertions and `raise`.
"""

from __future__ import annotations

import ast
import dataclasses
from typing import Final

# By name, what each does; --list and the documentation show these.
OPERATORS: Final = {
    "boundary": "a comparison takes or loses its bound: < and <=, > and >=",
    "arithmetic": "+ and - are exchanged, * becomes +, a remainder a quotient; so are the tensor methods of that name",
    "floor": "floor division rounds up, ceiling division down",
    "clamp": "a minimum or maximum is dropped, turned into the other one, or its bound is one more",
    "mask": "a load or store loses its mask, a mask one of its parts; what masked lanes read is one more",
    "narrow": "64 bits become 32",
    "constant": "a number is one more, True is False",
    "stride": "a stride is taken for 1, or for that of another tensor",
    "store": "a store, copy, launch or other call for its effect alone is left out",
    "negate": "a condition is turned round, the two values of a `where` change places, `and` and `or` are exchanged",
}

_BOUNDARY: Final = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
_NEGATED: Final = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_ARITHMETIC: Final = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Mod: ("%", "//")}
_METHODS: Final = {"add": "sub", "sub": "add", "floor_divide": "remainder", "remainder": "floor_divide"}
_EXTREMES: Final = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
_CLAMPS: Final = ("clamp", "clamp_")
_MEMORY: Final = ("load", "store")
_STRIDES: Final = ("_stride", "_width")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Edit:
    """`text` in place of bytes [start, end) of a file, in the definition `scope`; `change` shows it."""

    scope: str
    start: int
    end: int
    operator: str
    text: str
    change: str


def edits(source: str) -> list[Edit]:
    """All edits of a file, in the order of the text."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found), key=lambda edit: (edit.start, edit.end, edit.operator, edit.text))


def apply(source: str, edit: Edit) -> str:
    """The text of the mutant; each line that the edit does not touch keeps its number."""
    text = source.encode()
    return (text[: edit.start] + edit.text.encode() + text[edit.end :]).decode()


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str):
        self._text = source.encode()
        self._lines = [0]
        for line in self._text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._scope: list[str] = []
        self._parameters: list[list[str]] = []
        self.found: list[Edit] = []

    # Text ------------------------------------------------------------------------------------------------------------

    def _span(self, node: ast.AST) -> tuple[int, int]:
        first, last = self._lines[node.lineno - 1], self._lines[node.end_lineno - 1]  # type: ignore[attr-defined]
        return first + node.col_offset, last + node.end_col_offset  # type: ignore[attr-defined]

    def _of(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._text[start:end].decode()

    def _edit(self, operator: str, node: ast.AST, text: str, *, statement: bool = False) -> None:
        start, end = self._span(node)
        old = self._of(node)
        missing = "\n" * (old.count("\n") - text.count("\n"))
        whole = text + missing if statement or not missing else f"({text}{missing})"
        change = f"{' '.join(old.split())} -> {' '.join(text.split())}"
        scope = ".".join(self._scope) or "<module>"
        self.found.append(Edit(scope=scope, start=start, end=end, operator=operator, text=whole, change=change))

    # Definitions -----------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node.name, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._parameters.append([each.arg for each in (*node.args.args, *node.args.kwonlyargs)])
        defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default is not None]
        self._within(node.name, [*defaults, *node.body])
        self._parameters.pop()

    def _within(self, name: str, body: list[ast.AST] | list[ast.stmt]) -> None:
        self._scope.append(name)
        for each in body:
            self.visit(each)
        self._scope.pop()

    # What is left alone ----------------------------------------------------------------------------------------------

    def _leave(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = _leave

    # Names that are given a value outside definitions are definitions, too -------------------------------------------

    def visit_Module(self, node: ast.Module) -> None:
        for each in node.body:
            targets = getattr(each, "targets", [getattr(each, "target", None)])
            names = [name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)]
            if names:
                self._within(names[0], [each])
            else:
                self.visit(each)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    # Statements ------------------------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._edit("store", node, "pass", statement=True)
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        """Not of a single equality, which is turned round by itself."""
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _NEGATED):
            self._edit("negate", test, f"(not ({self._of(test)}))")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        signs = _ARITHMETIC.get(type(node.op))
        if signs is not None:
            text = f"{self._of(node.target)} {signs[1]}= {self._of(node.value)}"
            self._edit("arithmetic", node, text, statement=True)
        self.visit(node.value)

    # Expressions -----------------------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        terms = [node.left, *node.comparators]
        for i, sign in enumerate(node.ops):
            for operator, signs in (("boundary", _BOUNDARY), ("negate", _NEGATED)):
                if type(sign) in signs:
                    words = [self._grouped(terms[0])]
                    for j, (other, term) in enumerate(zip(node.ops, terms[1:], strict=True)):
                        known = {**_BOUNDARY, **_NEGATED}[type(other)]
                        words += [known[i == j], self._grouped(term)]
                    self._edit(operator, node, " ".join(words))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = " or " if isinstance(node.op, ast.And) else " and "
        self._edit("negate", node, f"({other.join(map(self._grouped, node.values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        inner = node.operand
        if isinstance(node.op, ast.USub):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, int):
                self._edit("constant", node, str(1 - inner.value))
                return
            if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.FloorDiv) and _is_minus(inner.left):
                dividend = inner.left.operand  # type: ignore[attr-defined]
                self._edit("floor", node, f"({self._grouped(dividend)} // {self._grouped(inner.right)})")
                self.visit(dividend)
                self.visit(inner.right)
                return
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        left, right = self._grouped(node.left), self._grouped(node.right)
        signs = _ARITHMETIC.get(type(node.op))
        if signs is not None:
            self._edit("arithmetic", node, f"({left} {signs[1]} {right})")
        if isinstance(node.op, ast.FloorDiv):
            # Not by way of negative numbers, which Triton divides towards zero: that would change nothing there.
            self._edit("floor", node, f"(({left} + {right} - 1) // {right})")
        if isinstance(node.op, ast.BitAnd):
            self._edit("mask", node, left)
            self._edit("mask", node, right)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._edit("constant", node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._edit("constant", node, str(node.value + 1))

    def visit_Name(self, node: ast.Name) -> None:
        if self._parameters and isinstance(node.ctx, ast.Load):
            self._strides(node, node.id, [name for name in self._parameters[-1] if name.endswith(_STRIDES)])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "int64":
            self._edit("narrow", node, f"{self._of(node.value)}.int32")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        for change in (self._division, self._extreme, self._clamp, self._memory, self._where, self._method):
            change(node, name)
        strides = [self._of(each) for each in node.args if _is_stride(each)]
        for argument in node.args:
            if _is_stride(argument):
                self._strides(argument, self._of(argument), list(dict.fromkeys(strides)))
        if name == "to" and len(node.args) == 1 and self._of(node.args[0]).endswith(".int64"):
            assert isinstance(function, ast.Attribute)
            self._edit("narrow", node, self._of(function.value))
            self.visit(function.value)
            return
        if name == "arange" and self._of(function).startswith("tl."):
            return  # its bounds are a power of two apart, or nothing compiles
        self.visit(function)
        for each in node.args:
            self.visit(each)
        for keyword in node.keywords:
            # Another axis is another shape; `other` of a load is one more already.
            if keyword.arg not in ("axis", "dim", "other"):
                self.visit(keyword.value)

    def _strides(self, node: ast.AST, text: str, known: list[str]) -> None:
        """`text` is one of `known`: 1 instead, or the next of them."""
        if text in known:
            self._edit("stride", node, "(1)")  # in brackets, as it may be asked for an attribute
            other = known[(known.index(text) + 1) % len(known)]
            if other != text:
                self._edit("stride", node, other)

    def _division(self, node: ast.Call, name: str) -> None:
        if name == "cdiv":
            self._edit("floor", node, f"({self._grouped(node.args[0])} // {self._grouped(node.args[1])})")

    def _extreme(self, node: ast.Call, name: str) -> None:
        if name not in _EXTREMES or len(node.args) != 2 or node.keywords or self._of(node.func).startswith("torch."):
            return
        first, second = map(self._of, node.args)
        caller = self._of(node.func).removesuffix(name)
        self._edit("clamp", node, f"({first})")
        self._edit("clamp", node, f"({second})")
        self._edit("clamp", node, f"{caller}{_EXTREMES[name]}({first}, {second})")
        if not isinstance(node.args[1], ast.Constant):  # whose turn is another
            self._edit("clamp", node, f"{caller}{name}({first}, ({second}) + 1)")

    def _clamp(self, node: ast.Call, name: str) -> None:
        if name not in _CLAMPS:
            return
        assert isinstance(node.func, ast.Attribute)
        limits = [keyword for keyword in node.keywords if keyword.arg in _EXTREMES]
        for keyword in limits:
            if not isinstance(keyword.value, ast.Constant):
                self._edit("clamp", keyword.value, f"({self._of(keyword.value)}) + 1")
            if len(limits) == 1:
                assert keyword.arg is not None
                self._edit("clamp", keyword, f"{_EXTREMES[keyword.arg]}={self._of(keyword.value)}")
        if self._of(node.func.value) != "torch":
            self._edit("clamp", node, self._of(node.func.value))

    def _memory(self, node: ast.Call, name: str) -> None:
        if name not in _MEMORY or not self._of(node.func).startswith("tl."):
            return
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "mask" in given:
            self._edit("mask", node, f"{self._of(node.func)}({', '.join(map(self._of, node.args))})")
        if "other" in given:
            others = [*map(self._of, node.args), f"mask={self._of(given['mask'])}"]
            self._edit(
                "mask", node, f"{self._of(node.func)}({', '.join(others)}, other=({self._of(given['other'])}) + 1)"
            )

    def _where(self, node: ast.Call, name: str) -> None:
        if name == "where" and len(node.args) == 3:
            condition, first, second = map(self._of, node.args)
            kept = "".join(f", {keyword.arg}={self._of(keyword.value)}" for keyword in node.keywords)
            self._edit("negate", node, f"{self._of(node.func)}({condition}, {second}, {first}{kept})")

    def _method(self, node: ast.Call, name: str) -> None:
        if isinstance(node.func, ast.Attribute) and name.rstrip("_") in _METHODS:
            stem = name.rstrip("_")
            function = self._of(node.func).removesuffix(name) + _METHODS[stem] + name[len(stem) :]
            self._edit("arithmetic", node.func, function)

    def _grouped(self, node: ast.expr) -> str:
        """Its text, in brackets where it is more than a name, a number, a call or the like."""
        simple = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript)
        return self._of(node) if isinstance(node, simple) else f"({self._of(node)})"


def _is_minus(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _is_stride(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "stride"

"""`python -m tests.coverage > docs/coverage.md`: every name that users of the field expect, what its values
and its gradient are tested against, and its dtypes.

Tests are read, not run: a name is tested where a test (or a table of the module that it stands in) mentions
it, against the libraries that the test, or a helper that it calls, uses for expected values.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests import names as expected
from whit import Tensor, dtypes
from whit.helpers import WhitError

ROOT = Path(__file__).parent
LEFT_OUT = {
    "as_param call callify": "tinygrad's way to trace functions: `whit.function` and `custom_kernel` do it",
    "schedule_linear linear_with_vars": "a schedule is an object of `whit.schedule`, not a graph",
    "decode_hevc_frame": "needs a video decoder in hardware, which no device of whit has",
    "image_conv2d image_dot": "textures of mobile GPUs: `conv2d` and `dot` are what they compute",
    "shard shard_ shard_like": "there is one device at a time: multi-device lowering is not built",
    "fs_load fs_store": "clients of a storage service that tinygrad's makers run, not of files",
    "fp8_fnuz fp8e4m3fnuz fp8e5m2fnuz": "formats of one vendor's earlier chips; the OCP formats are there",
}
LIBRARIES = {
    "torch": "PyTorch",
    "np": "NumPy",
    "numpy_of": "NumPy",
    "special": "SciPy",
    "scipy": "SciPy",
    "mpmath": "mpmath",
    "strict": "array-api-strict",
    "hashlib": "hashlib",
}
ABOUT_GRADIENTS = re.compile("grad|deriv|backward|slope|rules")
GRADIENTS = {"backward", "gradient", "grad", "vjp", "jacobian", "check_gradient", "value_and_grad"}
OPERATORS = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div", "Mod": "mod", "Pow": "pow", "MatMult": "matmul",
    "BitAnd": "bitwise_and", "BitOr": "bitwise_or", "BitXor": "bitwise_xor", "LShift": "lshift",
    "RShift": "rshift", "FloorDiv": "floor_divide", "Eq": "eq", "NotEq": "ne", "Lt": "lt", "Gt": "gt",
    "USub": "neg", "Not": "logical_not", "Invert": "bitwise_not",
}  # fmt: skip


class Evidence:
    """What tests say of each name: libraries for values, and for gradients."""

    def __init__(self) -> None:
        self.forward: dict[str, set[str]] = defaultdict(set)
        self.gradient: dict[str, set[str]] = defaultdict(set)

    def read(self, path: Path) -> None:
        """All tests of a file; tables at the top of it belong to the tests that use them."""
        tree = ast.parse(path.read_text())
        parts = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        tables = {
            target.id: n
            for n in tree.body
            if isinstance(n, (ast.Assign, ast.AnnAssign, ast.AugAssign))
            for target in getattr(n, "targets", None) or [n.target]  # type: ignore[union-attr]
            if isinstance(target, ast.Name)
        }
        for name, node in parts.items():
            if name.startswith("test_"):
                nodes = _with_helpers(node, {**parts, **tables})
                self._take(nodes, bool(ABOUT_GRADIENTS.search(f"{path.stem} {name}")))

    def _take(self, nodes: list[ast.AST], slopes: bool) -> None:
        words = {w for node in nodes for w in _words(node)}
        used = {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}
        libraries = {LIBRARIES[w] for w in used if w in LIBRARIES} or {"values written out"}
        if libraries > {"NumPy"}:  # NumPy holds the inputs, something else the truth
            libraries = libraries - {"NumPy"}
        for word in words:
            self.forward[word] |= libraries
            if slopes and words & GRADIENTS:
                self.gradient[word] |= libraries


def _with_helpers(node: ast.AST, known: dict[str, Any]) -> list[ast.AST]:
    """A test and everything of its module that it uses."""
    found, stack = {id(node): node}, [node]
    while stack:
        for inner in ast.walk(stack.pop()):
            used = known.get(inner.id) if isinstance(inner, ast.Name) else None
            if used is not None and id(used) not in found:
                found[id(used)] = used
                stack.append(used)
    return list(found.values())


def _words(node: ast.AST) -> Iterable[str]:
    """Attributes, classes, words in texts that are no docstrings, and the methods behind operators."""
    prose = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Expr)}
    for inner in ast.walk(node):
        if id(inner) in prose and isinstance(inner, ast.Constant):
            continue
        if isinstance(inner, ast.Name) and inner.id[0].isupper():
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str) and len(inner.value) < 2000:
            yield from re.findall(r"\w+", inner.value)
        elif isinstance(inner, (ast.BinOp, ast.UnaryOp, ast.AugAssign)):
            yield OPERATORS.get(type(inner.op).__name__, "")
        elif isinstance(inner, ast.Compare):
            yield from [OPERATORS.get(type(op).__name__, "") for op in inner.ops]
        elif isinstance(inner, ast.Subscript):
            yield "__getitem__" if isinstance(inner.ctx, ast.Load) else "__setitem__"


def evidence() -> Evidence:
    """Of all tests."""
    found = Evidence()
    for path in sorted(ROOT.rglob("test_*.py")):
        found.read(path)
    return found


KINDS = [("bool", (dtypes.bool,)), ("integers", dtypes.ints), ("floats", dtypes.floats)]


def dtypes_of(name: str) -> str:
    """The dtypes that a method of one or two tensors takes, found by calling it; "" where it needs more."""
    method = getattr(Tensor, name, None)
    if not callable(method) or isinstance(method, type) or name.startswith("__"):
        return ""
    taken = [d for d in dtypes.all if _takes(name, d)]
    texts = []
    for text, kind in KINDS:
        some = [d for d in kind if d in taken]
        if len(some) == len(kind):
            texts.append(text)
        elif some:
            texts.append(" ".join(d.name for d in some))
    return "all" if len(taken) == len(dtypes.all) else ", ".join(texts)


def _takes(name: str, dtype: Any) -> bool:
    x = Tensor([[1, 1], [1, 1]], dtype=dtype)
    for args in ((), (x,)):
        try:
            getattr(x, name)(*args)
            return True
        except (WhitError, TypeError):
            continue
    return False


def left_out(name: str) -> str:
    """Why a name is not there; "" if it should be."""
    return next((reason for names, reason in LEFT_OUT.items() if name in names.split()), "")


def has(owner: Any, name: str) -> bool:
    """Whether a name is there; `uop` and `grad` are attributes of each tensor."""
    return hasattr(owner, name) or name in getattr(owner, "__annotations__", {}) or name == "uop"


GROUPS: list[tuple[str, str, list[str], bool]] = [
    ("Tensor", "whit:Tensor", expected.TENSOR, True),
    ("nn", "whit.nn", expected.NN, True),
    ("nn.optim", "whit.nn.optim", expected.OPTIM, False),
    ("nn.schedulers", "whit.nn.schedulers", expected.SCHEDULERS, False),
    ("nn.state", "whit.nn.state", expected.STATE, False),
    ("dtypes", "whit:dtypes", expected.DTYPES, False),
    ("transforms", "whit", expected.TRANSFORMS, False),
]


def owner_of(place: str) -> Any:
    """The module, or the class of a module, that has a group's names."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def page() -> str:
    """docs/coverage.md."""
    found = evidence()
    lines = [
        "# Names, and what they are tested against",
        "Generated by `python -m tests.coverage` from the tests: for each name that users of tinygrad,",
        "PyTorch and NumPy expect, the libraries that tests which use it compare values and gradients with,",
        "and the dtypes that it takes. The namespace `whit.array_api` is compared with array-api-strict.",
    ]
    for title, place, names, gradients in GROUPS:
        owner = owner_of(place)
        lines += ["", f"## {title}", "| name | values | gradient | dtypes |", "| --- | --- | --- | --- |"]
        for name in names:
            if not has(owner, name):
                lines.append(f"| `{name}` | left out: {left_out(name) or 'not built yet'} | | |")
                continue
            kinds = dtypes_of(name) if place == "whit:Tensor" else ""
            values = ", ".join(sorted(found.forward[name])) or "examples of its docstring"
            flat = name in expected.FLAT or (kinds and kinds != "all" and "floats" not in kinds)
            slope = ", ".join(sorted(found.gradient[name])) if gradients and not flat else ""
            lines.append(f"| `{name}` | {values} | {slope} | {kinds} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")

"""The intermediate representation: one node type for every level, its op table, types, rewriting and algebra.

Patterns and the rewrite engine load on first use: building tensor graphs needs neither.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from whit.uop.args import BufferArg, LocalArg, ParamArg, RangeArg, ReduceArg, SpecialArg, StageArg, VarArg
from whit.uop.dtype import DType, PyConst, dtypes, promote
from whit.uop.ops import ALU, ELEMENTWISE, MOVEMENT, AxisType, Op, Ops
from whit.uop.uop import Shape, Sint, UOp, broadcast_shapes

if TYPE_CHECKING:
    from whit.uop.pattern import PatternMatcher, Rule, UPat, rule
    from whit.uop.rewrite import Pass, graph_rewrite, rebuild, rule_pass, run_passes

__all__ = [
    "ALU", "ELEMENTWISE", "MOVEMENT", "AxisType", "BufferArg", "DType", "LocalArg", "Op", "Ops", "ParamArg",
    "Pass", "PatternMatcher", "PyConst", "RangeArg", "ReduceArg", "Rule", "Shape", "Sint", "SpecialArg",
    "StageArg",
    "UOp", "UPat", "VarArg", "broadcast_shapes", "dtypes", "graph_rewrite", "promote", "rebuild", "rule",
    "rule_pass", "run_passes",
]

_LAZY = {
    **dict.fromkeys(("PatternMatcher", "Rule", "UPat", "rule"), "whit.uop.pattern"),
    **dict.fromkeys(("Pass", "graph_rewrite", "rebuild", "rule_pass", "run_passes"), "whit.uop.rewrite"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'whit.uop' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value

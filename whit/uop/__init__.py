"""The intermediate representation: one node type for every level, its op table, types, rewriting and algebra.
"""
from whit.uop.dtype import DType, PyConst, dtypes, promote
from whit.uop.ops import ALU, ELEMENTWISE, MOVEMENT, AxisType, Op, Ops
from whit.uop.pattern import PatternMatcher, Rule, UPat, rule
from whit.uop.rewrite import Pass, graph_rewrite, rule_pass, run_passes
from whit.uop.uop import (
                          BufferArg,
                          LocalArg,
                          ParamArg,
                          RangeArg,
                          ReduceArg,
                          Shape,
                          Sint,
                          SpecialArg,
                          StageArg,
                          UOp,
                          VarArg,
                          broadcast_shapes,
)

__all__ = ["ALU", "ELEMENTWISE", "MOVEMENT", "AxisType", "BufferArg", "DType", "LocalArg", "Op", "Ops",
           "ParamArg", "Pass",
           "PatternMatcher", "PyConst", "RangeArg", "ReduceArg", "Rule", "Shape", "Sint", "SpecialArg",
           "StageArg", "UOp", "UPat",
           "VarArg", "broadcast_shapes", "dtypes", "graph_rewrite", "promote", "rule", "rule_pass",
           "run_passes"]

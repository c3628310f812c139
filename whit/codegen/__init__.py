"""From a kernel to a linear program: opts, lowering, linearisation."""
from whit.codegen.generate import Generated, generate
from whit.codegen.target import Target

__all__ = ["Generated", "Target", "generate"]

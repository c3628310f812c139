"""From a kernel to a linear program: opts, lowering, linearisation. The pipeline loads when it is first
needed: a warm start takes kernels from the disk cache."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from whit.codegen.target import Target

if TYPE_CHECKING:
    from whit.codegen.pipeline import Generated, generate

__all__ = ["Generated", "Target", "generate"]


def __getattr__(name: str) -> Any:
    if name not in ("Generated", "generate"):
        raise AttributeError(f"module 'whit.codegen' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("whit.codegen.pipeline"), name)
    return value

"""whit: lazy tensors with autograd, one intermediate representation, a fusing compiler, and devices to run
on.

>>> from whit import Tensor
>>> (Tensor([[1.0, 2.0]]) @ Tensor([[3.0], [4.0]])).tolist()
[[11.0]]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from whit.helpers import VERSION, Context
from whit.tensor import Tensor
from whit.uop import Ops, UOp, dtypes
from whit.uop.dtype import DType

if TYPE_CHECKING:
    from whit import nn
    from whit.engine.counters import GlobalCounters
    from whit.engine.jit import TinyJit
    from whit.runtime.device import Device

Variable = UOp.variable
__version__ = VERSION

# name -> the module that defines it, loaded on first use
_LAZY = {"Device": "whit.runtime.device", "GlobalCounters": "whit.engine", "TinyJit": "whit.engine.jit"}

__all__ = [
    "Context",
    "DType",
    "Device",
    "GlobalCounters",
    "Ops",
    "Tensor",
    "TinyJit",
    "UOp",
    "Variable",
    "dtypes",
    "nn",
]


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("whit.nn")
    if name not in _LAZY:
        raise AttributeError(f"module 'whit' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

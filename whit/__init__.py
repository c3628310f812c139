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
    from whit.transforms import (
        checkpoint,
        custom_gradient,
        detect_nan,
        function,
        grad,
        hessian,
        jacfwd,
        jacobian,
        jacrev,
        jvp,
        scan,
        stop_gradient,
        value_and_grad,
        vjp,
        vmap,
    )

Variable = UOp.variable
__version__ = VERSION

# name -> the module that defines it, loaded on first use
_LAZY = {
    "Device": "whit.runtime.device",
    "GlobalCounters": "whit.engine",
    "TinyJit": "whit.engine.jit",
    "checkpoint": "whit.transforms",
    "custom_gradient": "whit.transforms",
    "detect_nan": "whit.transforms",
    "function": "whit.transforms",
    "grad": "whit.transforms",
    "hessian": "whit.transforms",
    "jacfwd": "whit.transforms",
    "jacobian": "whit.transforms",
    "jacrev": "whit.transforms",
    "jvp": "whit.transforms",
    "scan": "whit.transforms",
    "stop_gradient": "whit.transforms",
    "value_and_grad": "whit.transforms",
    "vjp": "whit.transforms",
    "vmap": "whit.transforms",
}

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
    "checkpoint",
    "custom_gradient",
    "detect_nan",
    "dtypes",
    "function",
    "grad",
    "hessian",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jvp",
    "nn",
    "scan",
    "stop_gradient",
    "value_and_grad",
    "vjp",
    "vmap",
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

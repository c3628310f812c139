"""Functions of tensors to other functions of tensors: derivatives (`derivatives.py`), batches (`vmap.py`,
one rule per op in `batching.py`), gradients that are given or take less memory (`custom.py`), graphs that
are built once (`function.py`), and a look at every value (`nan.py`). They compose with each other and with
`TinyJit`."""

from whit.transforms.custom import checkpoint, custom_gradient
from whit.transforms.derivatives import (
    grad,
    hessian,
    jacfwd,
    jacobian,
    jacrev,
    jvp,
    stop_gradient,
    value_and_grad,
    vjp,
)
from whit.transforms.function import function
from whit.transforms.nan import detect_nan
from whit.transforms.scan import scan
from whit.transforms.vmap import vmap

__all__ = [
    "checkpoint",
    "custom_gradient",
    "detect_nan",
    "function",
    "grad",
    "hessian",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jvp",
    "scan",
    "stop_gradient",
    "value_and_grad",
    "vjp",
    "vmap",
]

"""The work of the kernel rows: for each, the same data and one call for whit and for every peer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.peers import compiled, load, present

Call = Callable[[], Any]


@dataclass
class Work:
    """Contenders by name (whit is one, the first other one gives the expected value), the tolerance in units
    of the greatest magnitude, and what the work needs at least: floating-point operations (in units of a
    float32 multiply-add's two) and bytes."""

    contenders: dict[str, Call]
    tolerance: float
    flops: float
    read: int
    written: int
    peak: float = 1.0  # how many times as many operations as of float32 a register instruction does
    check: Callable[[], float] | None = None  # the difference, where comparing one result does not say it

    def __post_init__(self) -> None:
        if not any(map(shutil.which, ("g++", "clang++"))):  # torch.compile has nothing to compile with
            self.contenders.pop("torch.compile", None)


def draw(*shape: int, seed: int = 0) -> Any:
    """Normal float32 values."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def replayed(function: Callable[..., Any], *inputs: Any) -> Call:
    """whit's call: the function under TinyJit over realized tensors of the inputs."""
    whit = load("whit")
    tensors = [x if isinstance(x, whit.Tensor) else whit.Tensor(x).contiguous().realize() for x in inputs]

    def run(*arguments: Any) -> Any:
        result = function(*arguments)
        results = result if isinstance(result, (tuple, list)) else (result,)
        whit.Tensor.realize(*results)
        return result

    jitted = whit.TinyJit(run)
    return lambda: jitted(*tensors)


def eager(function: Callable[..., Any], *inputs: Any) -> Call:
    """torch's call, without a graph for gradients."""
    torch = load("torch")
    tensors = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in inputs]

    def run() -> Any:
        with torch.inference_mode():
            return function(*tensors)

    return run


def xla(function: Callable[..., Any], *inputs: Any) -> Call:
    """jax's call: compiled, waiting for the result."""
    jax = load("jax")
    devices = [jax.device_put(x) for x in inputs]
    jitted = jax.jit(function)
    return lambda: jitted(*devices).block_until_ready()


def add_jax(contenders: dict[str, Call], function: Callable[..., Any], *inputs: Any) -> None:
    """jax takes part where it is installed."""
    if present("jax"):
        contenders["jax"] = xla(function, *inputs)


# ---- products ----------------------------------------------------------------------------------------------


def matmul(m: int, k: int, n: int, layout: str = "nn") -> Work:
    """float32 (m, k) @ (k, n). layout: n or t for each operand; t lies in memory transposed."""
    a, b = draw(m, k), draw(k, n, seed=1)
    a = np.ascontiguousarray(a.T) if layout[0] == "t" else a
    b = np.ascontiguousarray(b.T) if layout[1] == "t" else b
    out, torch_out = np.empty((m, n), np.float32), load("torch").empty(m, n)

    def product(x: Any, y: Any) -> Any:
        return (x.T if layout[0] == "t" else x) @ (y.T if layout[1] == "t" else y)

    def into(x: Any, y: Any) -> Any:
        x, y = (x.T if layout[0] == "t" else x), (y.T if layout[1] == "t" else y)
        return load("torch").matmul(x, y, out=torch_out)

    left, right = (a.T if layout[0] == "t" else a), (b.T if layout[1] == "t" else b)
    contenders = {
        "whit": replayed(product, a, b),
        "numpy": lambda: np.matmul(left, right, out=out),
        "torch": eager(into, a, b),
    }
    add_jax(contenders, product, a, b)
    return Work(contenders, 1e-5, 2 * m * k * n, 4 * (m * k + k * n), 4 * m * n)


def matmul_narrow(size: int, dtype: str) -> Work:
    """Square product in float16 or bfloat16, added up in float32, rounded once."""
    torch = load("torch")
    a, b = draw(size, size), draw(size, size, seed=1)
    kind = getattr(torch, dtype)
    x, y = torch.from_numpy(a).to(kind), torch.from_numpy(b).to(kind)
    whit = load("whit")
    mine = [whit.Tensor(v).cast(dtype).contiguous().realize() for v in (a, b)]
    contenders = {"whit": replayed(lambda p, q: p @ q, *mine), "torch": eager(lambda p, q: p @ q, x, y)}
    # torch adds up in an order, and rounds between, in its own way
    return Work(contenders, 2e-2, 2 * size**3, 4 * size * size, 2 * size * size)


def matmul_int8(size: int) -> Work:
    """int8 operands, int32 sums."""
    torch = load("torch")
    numbers = np.random.default_rng(0).integers(-128, 128, (2, size, size), dtype=np.int8)
    x, y = torch.from_numpy(numbers[0]), torch.from_numpy(numbers[1])
    contenders = {
        "whit": replayed(lambda p, q: p.matmul(q, dtype="int32"), numbers[0], numbers[1]),
        "torch": eager(torch._int_mm, x, y),
    }
    return Work(contenders, 0.0, 2 * size**3, 2 * size * size, 4 * size * size, peak=4.0)


def matvec(size: int) -> Work:
    """A square float32 matrix times a vector: the matrix is read once."""
    a, x = draw(size, size), draw(size, seed=1)
    out, torch_out = np.empty(size, np.float32), load("torch").empty(size)
    contenders = {
        "whit": replayed(lambda p, q: p @ q, a, x),
        "numpy": lambda: np.matmul(a, x, out=out),
        "torch": eager(lambda p, q: load("torch").mv(p, q, out=torch_out), a, x),
    }
    add_jax(contenders, lambda p, q: p @ q, a, x)
    return Work(contenders, 1e-5, 2 * size**2, 4 * (size**2 + size), 4 * size)


# ---- convolutions ------------------------------------------------------------------------------------------


def conv(
    batch: int, channels: int, size: int, out: int, kernel: int, stride: int = 1, groups: int = 1
) -> Work:
    """float32 convolution with padding kernel // 2."""
    x = draw(batch, channels, size, size)
    w = draw(out, channels // groups, kernel, kernel, seed=1)
    padding = kernel // 2
    side = (size + 2 * padding - kernel) // stride + 1
    function = load("torch").nn.functional.conv2d
    options: dict[str, Any] = {"stride": stride, "padding": padding, "groups": groups}
    contenders = {
        "whit": replayed(lambda p, q: p.conv2d(q, **options), x, w),
        "torch": eager(lambda p, q: function(p, q, **options), x, w),
    }
    results = batch * out * side * side
    flops = 2 * results * (channels // groups) * kernel * kernel
    return Work(contenders, 1e-5, flops, 4 * (x.size + w.size), 4 * results)


# ---- memory ------------------------------------------------------------------------------------------------


def chain(rows: int, columns: int) -> Work:
    """max(x * 1.5 + 0.5, 0) * x - 0.25: six operations, one read, one write."""
    torch, x = load("torch"), draw(rows, columns)
    out = torch.empty(rows, columns)

    def into(v: Any) -> Any:
        torch.mul(v, 1.5, out=out).add_(0.5).clamp_(min=0).mul_(v)
        return out.sub_(0.25)

    contenders = {
        "whit": replayed(lambda v: (v * 1.5 + 0.5).maximum(0) * v - 0.25, x),
        "torch": eager(into, x),
        "torch.compile": eager(compiled(lambda v: (v * 1.5 + 0.5).clamp(min=0) * v - 0.25), x),
    }
    if present("jax"):
        jnp = load("jax.numpy")
        add_jax(contenders, lambda v: jnp.maximum(v * 1.5 + 0.5, 0) * v - 0.25, x)
    return Work(contenders, 1e-6, 5 * x.size, x.nbytes, x.nbytes)


def total(rows: int, columns: int) -> Work:
    """The sum of everything."""
    torch, x = load("torch"), draw(rows, columns) + 1
    contenders = {
        "whit": replayed(lambda v: v.sum(), x),
        "torch": eager(lambda v: v.sum(), x),
        "torch.compile": eager(torch.compile(lambda v: v.sum()), x),
    }
    add_jax(contenders, lambda v: v.sum(), x)
    return Work(contenders, 1e-5, x.size, x.nbytes, 4)


def softmax(rows: int, columns: int) -> Work:
    """Over the last axis."""
    torch, x = load("torch"), draw(rows, columns)
    out = torch.empty(rows, columns)
    contenders = {
        "whit": replayed(lambda v: v.softmax(-1), x),
        "torch": eager(lambda v: torch.softmax(v, -1, out=out), x),
        "torch.compile": eager(compiled(lambda v: v.softmax(-1)), x),
    }
    if present("jax"):
        add_jax(contenders, load("jax").nn.softmax, x)
    return Work(contenders, 1e-5, 20 * x.size, x.nbytes, x.nbytes)


def layer_norm(rows: int, columns: int) -> Work:
    """Over the last axis, with weight and bias."""
    torch, x = load("torch"), draw(rows, columns)
    w, b = draw(columns, seed=1), draw(columns, seed=2)
    out, mean, deviation = torch.empty(rows, columns), torch.empty(rows, 1), torch.empty(rows, 1)
    names = {"out0": out, "out1": mean, "out2": deviation}
    native = torch.ops.aten.native_layer_norm.out
    function = compiled(lambda v, p, q: torch.nn.functional.layer_norm(v, (columns,), p, q))
    contenders = {
        "whit": replayed(lambda v, p, q: v.layernorm() * p + q, x, w, b),
        "torch": eager(lambda v, p, q: native(v, [columns], p, q, 1e-5, **names)[0], x, w, b),
        "torch.compile": eager(function, x, w, b),
    }
    if present("jax"):
        rsqrt = load("jax").lax.rsqrt

        def normal(v: Any, p: Any, q: Any) -> Any:
            centered = v - v.mean(-1, keepdims=True)
            return centered * rsqrt((centered * centered).mean(-1, keepdims=True) + 1e-5) * p + q

        add_jax(contenders, normal, x, w, b)
    return Work(contenders, 1e-5, 8 * x.size, x.nbytes, x.nbytes)


def rms_norm(rows: int, columns: int) -> Work:
    """Over the last axis, with weight."""
    torch, x, w = load("torch"), draw(rows, columns), draw(columns, seed=1)
    function = torch.nn.functional.rms_norm
    contenders = {
        "whit": replayed(lambda v, p: v.rms_norm(p, eps=1e-6), x, w),
        "torch": eager(lambda v, p: function(v, (columns,), p, 1e-6), x, w),
        "torch.compile": eager(compiled(lambda v, p: function(v, (columns,), p, 1e-6)), x, w),
    }
    if present("jax"):
        rsqrt = load("jax").lax.rsqrt
        add_jax(contenders, lambda v, p: v * rsqrt((v * v).mean(-1, keepdims=True) + 1e-6) * p, x, w)
    return Work(contenders, 1e-5, 4 * x.size, x.nbytes, x.nbytes)


# ---- attention ---------------------------------------------------------------------------------------------


def attention(heads: int, steps: int, dim: int, backward: bool = False) -> Work:
    """Causal, float32; `backward`: the gradients of q, k and v too."""
    torch = load("torch")
    q, k, v, g = (draw(1, heads, steps, dim, seed=seed) for seed in range(4))
    function = torch.nn.functional.scaled_dot_product_attention

    def forward(q: Any, k: Any, v: Any) -> Any:
        return q.scaled_dot_product_attention(k, v, is_causal=True)

    def both(q: Any, k: Any, v: Any, g: Any) -> Any:
        result = forward(q, k, v)
        return (result, *result.gradient(q, k, v, gradient=g))

    def both_torch() -> Any:
        result = function(*leaves, is_causal=True)
        return (result, *torch.autograd.grad(result, leaves, upstream))

    half = 4 * heads * steps * steps * dim / 2  # both products of the lower triangle
    size = q.nbytes
    if not backward:
        contenders = {
            "whit": replayed(forward, q, k, v),
            "torch": eager(lambda a, b, c: function(a, b, c, is_causal=True), q, k, v),
        }
        return Work(contenders, 1e-5, half, 3 * size, size)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    upstream = torch.from_numpy(g)
    contenders = {"whit": replayed(both, q, k, v, g), "torch": both_torch}
    return Work(
        contenders, 1e-4, half * 3.5, 4 * size, 4 * size
    )  # backward: five products, one of them again

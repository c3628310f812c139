"""Malformed calls of everything public end in a right answer or in a WhitError with all three parts: never in
a bare AssertionError, IndexError or the like, never in a crash."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import whit.array_api as xp
from tests.integration.bad_calls import LEFT_OUT, fault, faults_of, receivers, signature_of
from whit import Context, Device, Tensor, TinyJit, dtypes, nn
from whit.helpers import (
    ArgumentError,
    DeviceError,
    DTypeError,
    FileFormatError,
    IndexingError,
    SettingError,
    ShapeError,
    WhitError,
)
from whit.nn import (
    attention,
    clip,
    containers,
    ema,
    init,
    layers,
    optim,
    recurrent,
    scaling,
    schedulers,
    state,
)

SPECIAL = [
    "__add__",
    "__and__",
    "__eq__",
    "__floordiv__",
    "__getitem__",
    "__invert__",
    "__len__",
    "__bool__",
    "__float__",
    "__int__",
    "__lt__",
    "__lshift__",
    "__matmul__",
    "__mod__",
    "__neg__",
    "__pow__",
    "__rpow__",
    "__rsub__",
    "__setitem__",
    "__truediv__",
    "__iter__",
    "__array__",
    "__array_namespace__",
    "__complex__",
    "__contains__",
    "__dlpack__",
    "__iadd__",
    "__index__",
    "__ipow__",
]
METHODS = [
    n
    for n in (*dir(Tensor), *SPECIAL)
    if (
        n not in LEFT_OUT
        and (n in SPECIAL or not n.startswith("_"))
        and callable(inspect.getattr_static(Tensor, n, None) or 0)
    )
    or (
        isinstance(inspect.getattr_static(Tensor, n, None), (classmethod, staticmethod))
        and not n.startswith("_")
        and n not in LEFT_OUT
    )
]
BUILT = [
    o
    for m in (attention, containers, ema, layers, optim, recurrent, scaling, schedulers)
    for n, o in vars(m).items()
    if inspect.isclass(o) and o.__module__ == m.__name__ and not n.startswith("_")
]
FILES = [
    *[f for n, f in vars(init).items() if n.endswith("_") and not n.startswith("_")],
    init.calculate_gain,
    *[getattr(clip, n) for n in ("get_total_norm", "clip_grad_norm_", "clip_grad_value_")],
    state.get_state_dict,
    state.get_parameters,
    state.load_state_dict,
    state.safe_save,
    state.safe_load,
    state.safe_load_metadata,
]


def is_static(name: str) -> bool:
    return isinstance(inspect.getattr_static(Tensor, name), (classmethod, staticmethod))


def check(calls: int, seed: int, name: str) -> None:
    found = faults_of(name, getattr(Tensor, name), calls, seed, None if is_static(name) else ())
    assert not found, "\n".join(found)


def test_the_methods_are_there() -> None:
    assert len(METHODS) > 250 and {"conv2d", "zeros", "einsum", "sort", "assign"} <= set(METHODS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(4))
def test_methods_of_tensors(part: int) -> None:
    wrong = []
    for name in METHODS[part::4]:
        wrong += faults_of(name, getattr(Tensor, name), 8, 1, None if is_static(name) else ())
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METHODS)
def test_each_method_often(name: str) -> None:
    for seed in range(4):
        check(60, seed, name)


API = [(xp, n) for n in xp.__all__ if inspect.isfunction(getattr(xp, n))]
API += [(xp.linalg, n) for n in xp.linalg.__all__]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(3))
def test_functions_of_the_array_api(part: int) -> None:
    wrong = []
    for module, name in API[part::3]:
        wrong += faults_of(name, getattr(module, name), 8, 1, None)
        if next(iter(signature_of(getattr(module, name))), None) is not None:
            wrong += faults_of(name, getattr(module, name), 6, 2, ())
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module, name", API)
def test_each_function_of_the_array_api_often(module: Any, name: str) -> None:
    for seed in range(4):
        found = faults_of(name, getattr(module, name), 60, seed, None)
        assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore")
def test_construction_of_tensors() -> None:
    found = faults_of("Tensor", Tensor, 150, 0, None)
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", BUILT, ids=lambda o: o.__name__)
def test_construction_of_layers_and_optimisers(made: Any) -> None:
    found = faults_of(made.__name__, made, 30, 0, None)
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 2),
        nn.Conv2d(1, 2, 3),
        nn.Embedding(5, 2),
        nn.LayerNorm(3),
        nn.BatchNorm(1),
        nn.GroupNorm(1, 1),
        nn.RMSNorm(3),
        nn.LSTMCell(3, 2),
        nn.GRUCell(3, 2),
        nn.RNNCell(3, 2),
        nn.LSTM(3, 2),
        nn.GRU(3, 2),
        nn.RNN(3, 2),
        nn.Dropout(0.5),
        nn.Conv1d(1, 2, 2),
        nn.ConvTranspose2d(1, 1, 2),
        nn.Conv3d(1, 1, 2),
        nn.ConvTranspose3d(1, 1, 2),
        nn.MultiheadAttention(3, 1),
        nn.TransformerEncoderLayer(3, 1, 4),
    ],
    ids=lambda o: type(o).__name__,
)
def test_calls_of_layers(layer: Any) -> None:
    found = faults_of(type(layer).__name__, layer.__call__, 60, 0, None)
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", FILES, ids=lambda f: f.__name__)
def test_parameters_and_files(function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = faults_of(function.__name__, function, 60, 0, None)
    assert not found, "\n".join(found)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.booleans())
def test_safetensors_files_of_any_bytes(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, header: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(len(body).to_bytes(8, "little") + body if header else body)
    assert fault(lambda: list(state.safe_load(path).values())) is None


VALID = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, len(VALID) - 1), st.characters(min_codepoint=32, max_codepoint=126), st.integers(-3, 3))
def test_safetensors_headers_with_one_wrong_letter(
    tmp_path_factory: pytest.TempPathFactory, at: int, letter: str, longer: int
) -> None:
    head = VALID[:at] + letter.encode() + VALID[at + 1 :]
    path = tmp_path_factory.getbasetemp() / "letter.safetensors"
    path.write_bytes((len(head) + longer).to_bytes(8, "little") + head + bytes(8))
    assert fault(lambda: list(state.safe_load(path).values())) is None


@pytest.mark.filterwarnings("ignore")
def test_calls_of_a_jitted_function() -> None:
    @TinyJit
    def step(x: Tensor, *args: Any, **named: Any) -> Tensor:
        return (x + 1).realize()

    found = faults_of("step", step, 80, 0, receivers())
    assert not found, "\n".join(found)


@pytest.mark.parametrize("function", [None, 3, "x", [], object()])
def test_a_jit_of_no_function(function: Any) -> None:
    with pytest.raises(ArgumentError, match="decorate a function"):
        TinyJit(function)


@pytest.mark.parametrize(
    "bad", [{"NOPE": 1}, {"DEBUG": "x"}, {"DEBUG": None}, {"DEBUG": [1]}, {"DEV": 3}, {"DEV": None}]
)
def test_unknown_settings_and_values(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as caught:
        Context(**bad)
    assert caught.value.asked and caught.value.because and caught.value.fix


@pytest.mark.parametrize(
    "name",
    [
        "",
        "CPU:99999999999999999999",
        "CPU:clang-",
        "GPU",
        "cpu:x",
        "CUDA",
        3,
        b"CPU",
        (),
        "DISK:",
        "DISK:/nonexistent/x",
        "🦆",
        "CPU:",
        ":",
        "NULL:1",
    ],
)
def test_devices_of_any_name(name: Any) -> None:
    assert fault(lambda: Device.get(Device.canonical(name))) is None
    assert fault(lambda: Tensor([1.0], device=name)) is None


# each call, what it must raise, and a piece of what it must say
CALLS: list[tuple[Callable[[], Any], type[WhitError], str]] = [
    (lambda: Tensor.ones(2, 3) @ Tensor.ones(2, 3), ShapeError, r"\(2, 3\)"),
    (lambda: Tensor.ones(2, 3) + Tensor.ones(2), ShapeError, r"\(2,\)"),
    (lambda: Tensor.ones(2, 3).reshape(4, 2), ShapeError, "6"),
    (lambda: Tensor.ones(2, 3).reshape(-1, -1), ShapeError, "-1"),
    (lambda: Tensor.ones(2, 3).sum(2), ShapeError, "axis 2"),
    (lambda: Tensor.ones(2, 3).permute(0, 0), ShapeError, "permute"),
    (lambda: Tensor.ones(2, 3).expand(4, 3), ShapeError, "expand"),
    (lambda: Tensor.ones(2, 3)[5], IndexingError, "5"),
    (lambda: Tensor.ones(2, 3)[0, 0, 0], IndexingError, "ind"),
    (lambda: Tensor.ones(2, 3)["a"], IndexingError, "a"),
    (lambda: Tensor.ones(2, 3)[1.5], IndexingError, "1.5"),
    (lambda: Tensor([[1], [2, 3]]), ShapeError, ""),
    (lambda: Tensor(["a"]), WhitError, ""),
    (lambda: Tensor([1.0], dtype="float33"), DTypeError, "float33"),
    (lambda: Tensor([1.0], device="TPU"), DeviceError, "TPU"),
    (lambda: Tensor([1.0]) & 1, DTypeError, ""),
    (lambda: Tensor([1, 2]).realize().assign(Tensor([1.0, 2.0])), DTypeError, "assign"),
    (lambda: Tensor([1, 2]).realize().assign(Tensor([1, 2, 3])), ShapeError, "assign"),
    (lambda: Tensor([1.0]).backward(), WhitError, "requires_grad"),
    (lambda: Tensor([1, 2]).item(), WhitError, "item"),
    (lambda: bool(Tensor([1, 2])), WhitError, ""),
    (lambda: Tensor.ones(1, 1, 2, 2).conv2d(Tensor.ones(1, 1, 3, 3)), ShapeError, "convolution"),
    (lambda: Tensor.ones(1, 2, 4, 4).conv2d(Tensor.ones(1, 1, 3, 3)), ShapeError, "convolution"),
    (lambda: Tensor.einsum("ij,jk->ik", Tensor.ones(2, 3), Tensor.ones(2, 3)), ShapeError, ""),
    (lambda: Tensor.einsum("ij,jk", Tensor.ones(2, 3)), WhitError, ""),
    (lambda: Tensor([1.0], device="PYTHON") + Tensor([1.0]), DeviceError, "PYTHON"),
    (lambda: Tensor.ones(3).cat(Tensor.ones(2, 2)), ShapeError, "cat"),
    (lambda: Tensor.stack(Tensor.ones(3), Tensor.ones(2)), ShapeError, "stack"),
    (lambda: Tensor.zeros(0).max(), WhitError, ""),
    (lambda: Tensor.zeros(0).argmax(), WhitError, ""),
    (lambda: Tensor([1.0]).dropout(2.0), WhitError, "dropout"),
    (lambda: nn.Linear(3, 2)(Tensor.ones(2, 4)), ShapeError, "Linear"),
    (lambda: nn.Linear(-1, 2), ArgumentError, "Linear"),
    (lambda: nn.optim.SGD([], lr=0.1), ArgumentError, ""),
    (lambda: nn.optim.Adam([Tensor([1.0])], lr=-1), ArgumentError, "lr"),
    (lambda: nn.state.safe_load("/nonexistent"), WhitError, "nonexistent"),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_common_mistakes_have_their_own_words(number: int) -> None:
    call, kind, words = CALLS[number]
    with pytest.raises(kind, match=words or None) as caught:
        call()
    assert caught.value.asked and caught.value.because and caught.value.fix


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    state.safe_save({"a": Tensor([1.0, 2.0])}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(FileFormatError):
            state.safe_load(path)


def test_a_failed_call_leaves_tensors_as_they_were() -> None:
    x = Tensor([[1.0, 2.0], [3.0, 4.0]]).realize()
    for wrong in (
        lambda: x.assign(Tensor([1.0, 2.0, 3.0])),
        lambda: x.__setitem__(5, 1.0),
        lambda: x.__setitem__(0, Tensor.ones(3)),
        lambda: operator.iadd(x, Tensor.ones(3)),
        lambda: x.replace(Tensor([1.0])),
        lambda: x.to_("TPU"),
    ):
        with pytest.raises(WhitError):
            wrong()
        assert x.tolist() == [[1.0, 2.0], [3.0, 4.0]] and x.device == "CPU"


def test_very_deep_graphs_and_lists() -> None:
    x = Tensor([1.0])
    for _ in range(3000):
        x = x + 1
    assert x.item() == 3001
    deep: Any = 1.0
    for _ in range(5000):
        deep = [deep]
    assert fault(lambda: Tensor(deep)) is None


def test_nan_and_infinity_are_values() -> None:
    x = Tensor([np.nan, np.inf, -np.inf, 1.0])
    assert np.isnan(x.max().item()) and np.isnan(x.sum().item())
    assert x.cast(dtypes.int32).tolist() == [0, 2**31 - 1, -(2**31), 1]
    assert fault(lambda: x.softmax()) is None and fault(lambda: x.sort()) is None


def test_settings_of_the_environment_are_named(tmp_path: Path) -> None:
    import subprocess
    import sys

    run = subprocess.run(
        [sys.executable, "-c", "import whit"],
        env={**os.environ, "DEBUG": "lots"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode and "DEBUG='lots'" in run.stderr and "whole number" in run.stderr

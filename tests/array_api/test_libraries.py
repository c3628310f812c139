"""Libraries written for the array API take tensors: array-api-compat and -extra, einops, scikit-learn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import array_api_compat as compat
import array_api_extra as extra
import einops
import einops.array_api
import numpy as np
import pytest

import whit.array_api.einops_backend  # noqa: F401  # registers it
from tests.tensor.reference import DEVICE
from whit import Tensor

pytestmark = pytest.mark.skipif(DEVICE == "reference", reason="runs on a device")
X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.5]], np.float32)


def test_compat_takes_tensors() -> None:
    x = Tensor(X)
    assert compat.array_namespace(x, x).__name__ == "whit.array_api"
    assert compat.is_array_api_obj(x) and not compat.is_lazy_array(x)
    assert compat.size(x) == 6 and compat.device(x) == x.device and compat.to_device(x, x.device) is x


@pytest.mark.parametrize(
    "call",
    [
        lambda a: extra.at(a)[0, 1].set(9.0, copy=True),
        lambda a: extra.at(a)[:, 1].add(9.0, copy=True),
        lambda a: extra.at(a)[a > 3].multiply(2.0, copy=True),
        lambda a: extra.atleast_nd(a, ndim=4),
        lambda a: extra.cov(a),
        lambda a: extra.create_diagonal(a[0]),
        lambda a: compat.array_namespace(a).expand_dims(a, axis=(0, 3)),
        lambda a: extra.kron(a, a),
        lambda a: extra.setdiff1d(a, a[0]),
        lambda a: extra.sinc(a / 3),
        lambda a: extra.pad(a, 1),
        lambda a: extra.isclose(a, a),
        lambda a: extra.nunique(a),
        lambda a: extra.apply_where(a > 2, (a,), lambda v: v * 2, lambda v: v),
        lambda a: extra.isin(a, a[0]),
        lambda a: extra.nan_to_num(a / 0),
        lambda a: extra.union1d(a, a[0]),
        lambda a: einops.array_api.rearrange(a, "(a c) b -> b a c", c=2),
        lambda a: einops.array_api.reduce(a, "a b -> a", "max"),
        lambda a: einops.array_api.repeat(a, "a b -> a b c", c=2),
        lambda a: einops.rearrange(a, "a b -> b a"),
        lambda a: einops.reduce(a, "a b -> b", "mean"),
        lambda a: einops.repeat(a, "a b -> (a k) b", k=3),
        lambda a: einops.einsum(a, a, "a b, c b -> a c"),
        lambda a: einops.pack([a, a], "* b")[0],
        lambda a: einops.rearrange([a, a], "n a b -> b n a"),
    ],
)
def test_functions_give_what_they_give_for_arrays(call: Any) -> None:
    with np.errstate(all="ignore"):
        want = call(X.copy())
    got = call(Tensor(X))
    assert isinstance(got, Tensor) or np.isscalar(want)
    # NumPy's cov is in float64, and so is kron of array-api-extra
    np.testing.assert_allclose(np.asarray(got), want, 1e-5, 1e-7)


def test_scikit_learn_in_array_api_mode() -> None:
    program = Path(__file__).with_name("sklearn_program.py")
    root = str(program.parents[2])
    settings = {"PYTHONPATH": root, "SCIPY_ARRAY_API": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=root,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0 and "all equal" in done.stdout, done.stderr[-2000:]

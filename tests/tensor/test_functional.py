"""The functions of neural networks against PyTorch."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.tensor.reference import evaluate as numpy_of
from whit.helpers import ArgumentError, Context, DTypeError, ShapeError
from whit.tensor import Tensor
from whit.uop import dtypes

few = settings(max_examples=60, deadline=None)
rng = np.random.default_rng(1)


def values(*shape: int, dtype: Any = np.float64) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def close(got: Any, expected: Any, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    assert tuple(got.shape) == tuple(expected.shape)
    np.testing.assert_allclose(numpy_of(got), expected.detach().numpy(), rtol=rtol, atol=atol)


def both(*arrays: Any) -> tuple[list[Tensor], list[torch.Tensor]]:
    return [Tensor(a) for a in arrays], [torch.from_numpy(np.asarray(a)) for a in arrays]


# ---- convolution -------------------------------------------------------------------------------------------


@few
@given(st.data())
def test_convolutions_are_torchs(data: Any) -> None:
    count = data.draw(st.integers(1, 3))
    groups, c, r = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(count)]
    stride = [data.draw(st.integers(1, 4)) for _ in range(count)]
    dilation = [data.draw(st.integers(1, 3)) for _ in range(count)]
    padding = [data.draw(st.integers(0, 2)) for _ in range(count)]
    size = [data.draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 8 if count < 3 else 7))
            for k, d, p in zip(kernel, dilation, padding)]
    x, w, b = values(2, groups * c, *size), values(groups * r, c, *kernel), values(groups * r)
    (x_, w_, b_), (xt, wt, bt) = both(x, w, b)
    conv = [F.conv1d, F.conv2d, F.conv3d][count - 1]
    expected = conv(xt, wt, bt, stride, padding, dilation, groups)
    close(x_.conv2d(w_, b_, groups, tuple(stride), tuple(dilation), tuple(padding)), expected)


@few
@given(st.data())
def test_transposed_convolutions_are_torchs(data: Any) -> None:
    count = data.draw(st.integers(1, 2))
    groups, c, r = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(count)]
    stride = [data.draw(st.integers(1, 3)) for _ in range(count)]
    dilation = [data.draw(st.integers(1, 2)) for _ in range(count)]
    padding = [data.draw(st.integers(0, 2)) for _ in range(count)]
    extra = [data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation)]
    size = [data.draw(st.integers(1, 5)) for _ in range(count)]
    x, w = values(2, groups * c, *size), values(groups * c, r, *kernel)
    (x_, w_), (xt, wt) = both(x, w)
    conv = [F.conv_transpose1d, F.conv_transpose2d][count - 1]
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + e + 1 > 0
               for n, s, p, d, k, e in zip(size, stride, padding, dilation, kernel, extra)))
    expected = conv(xt, wt, None, stride, padding, extra, groups, dilation)
    close(x_.conv_transpose2d(w_, None, groups, tuple(stride), tuple(dilation), tuple(padding), tuple(extra)),
          expected)


def test_paddings() -> None:
    x, w = values(1, 2, 7, 6), values(3, 2, 3, 2)
    (x_, w_), (xt, wt) = both(x, w)
    close(x_.conv2d(w_, padding="same"), F.conv2d(xt, wt, padding="same"))
    close(x_.conv2d(w_, padding=(1, 2, 3, 0)), F.conv2d(F.pad(xt, (1, 2, 3, 0)), wt))
    close(x_.conv2d(w_, padding=((3, 0), (1, 2))), F.conv2d(F.pad(xt, (1, 2, 3, 0)), wt))
    close(x_[0].conv2d(w_), F.conv2d(xt[0], wt))
    half = Tensor(x.astype(np.float16)).conv2d(Tensor(w.astype(np.float16)))
    assert half.dtype is dtypes.float16
    np.testing.assert_allclose(numpy_of(half).astype(float), F.conv2d(xt, wt).numpy(), rtol=2e-2, atol=2e-2)


def test_bad_convolutions() -> None:
    x, w = Tensor(values(1, 2, 5, 5)), Tensor(values(3, 2, 3, 3))
    for bad in (lambda: x.conv2d(w, groups=2), lambda: x[0, 0].conv2d(w),
                lambda: x.conv2d(Tensor(values(3, 2, 6, 6))),
                lambda: x.conv2d(w, Tensor(values(2))), lambda: x.conv1d(w), lambda: x.conv_transpose2d(w)):
        with pytest.raises(ShapeError):
            bad()
    for worse in (lambda: x.conv2d(w, stride=0), lambda: x.conv2d(w, padding="full"),
                  lambda: x.conv2d(w, padding="same", stride=2),
                  lambda: x.conv2d(w, stride=(1, 1, 1))):
        with pytest.raises(ArgumentError):
            worse()


# ---- pooling -----------------------------------------------------------------------------------------------


@few
@given(st.data())
def test_pools_are_torchs(data: Any) -> None:
    kernel = tuple(data.draw(st.integers(1, 3)) for _ in range(2))
    stride = data.draw(st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = data.draw(st.integers(1, 2))
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    ceil_mode = data.draw(st.booleans())
    size = [data.draw(st.integers(max(1, dilation * (k - 1) + 1 - 2 * p), 8)) for k,
            p in zip(kernel, padding)]
    x = values(2, 2, *size)
    (x_,), (xt,) = both(x)
    expected, places = F.max_pool2d(xt, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
    # of a window of nothing but padding torch gives an arbitrary index
    assume(bool(torch.isfinite(expected).all()))
    got, indices = x_.max_pool2d(kernel, stride, dilation, padding, ceil_mode, return_indices=True)
    close(got, expected)
    np.testing.assert_array_equal(numpy_of(indices), places.numpy())
    if dilation == 1:
        for count_include_pad in (True, False):
            close(x_.avg_pool2d(kernel, stride, 1, padding, ceil_mode, count_include_pad),
                  F.avg_pool2d(xt, kernel, stride, padding, ceil_mode, count_include_pad))


def test_pools_of_other_kinds() -> None:
    x = rng.integers(-9, 9, (1, 2, 6, 6)).astype(np.int32)
    expected = F.max_pool2d(torch.from_numpy(x).double(), 3, 1, 1).int().numpy()
    np.testing.assert_array_equal(numpy_of(Tensor(x).max_pool2d(3, 1, 1, 1)), expected)
    (x_,), (xt,) = both(values(2, 3, 9))
    close(x_.max_pool2d((3,), (2,)), F.max_pool1d(xt, 3, 2))
    close(x_.avg_pool2d((3,), (2,)), F.avg_pool1d(xt, 3, 2))
    (x_,), (xt,) = both(values(1, 2, 6, 6))
    out, where = F.max_pool2d(xt, 2, return_indices=True)
    close(Tensor(out.numpy()).max_unpool2d(Tensor(where.numpy()), 2), F.max_unpool2d(out, where, 2))
    with pytest.raises(ShapeError):
        x_.max_pool2d(7)
    with pytest.raises(ArgumentError):
        x_.avg_pool2d(2, stride=0)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (5, 7), (6, 10)])
def test_adaptive_pools(size: tuple[int, int]) -> None:
    (x,), (xt,) = both(values(2, 3, 6, 10))
    close(x.adaptive_avg_pool2d(size), F.adaptive_avg_pool2d(xt, size))
    close(x.adaptive_max_pool2d(size), F.adaptive_max_pool2d(xt, size))
    close(x[0].adaptive_max_pool2d((size[1],)), F.adaptive_max_pool1d(xt[0], size[1]))


def test_pixel_shuffles() -> None:
    (x,), (xt,) = both(values(2, 12, 3, 4))
    close(x.pixel_shuffle(2), F.pixel_shuffle(xt, 2))
    close(x.pixel_shuffle(2).pixel_unshuffle(2), xt)
    with pytest.raises(ShapeError):
        x.pixel_shuffle(5)


# ---- softmax, normalisation --------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmaxes(axis: int) -> None:
    (x,), (xt,) = both(values(3, 4, 5) * 30)
    close(x.softmax(axis), xt.softmax(axis))
    close(x.log_softmax(axis), xt.log_softmax(axis))
    close(x.softmin(axis), F.softmin(xt, axis))
    half = Tensor(values(3, 4, 5, dtype=np.float16))
    assert half.softmax(axis).dtype is dtypes.float16
    assert half.softmax(axis, dtype="float32").dtype is dtypes.float32
    big = Tensor([1000.0, 1000.0, -np.inf])
    np.testing.assert_allclose(numpy_of(big.softmax()), [0.5, 0.5, 0.0])


def test_normalisations() -> None:
    (x, w), (xt, wt) = both(values(2, 3, 4, 5) * 3 + 1, values(5))
    close(x.layernorm(), F.layer_norm(xt, (5,)))
    close(x.layernorm((-2, -1)), F.layer_norm(xt, (4, 5)))
    close(x.rms_norm(w), F.rms_norm(xt, (5,), wt, 1e-6))
    close(x.normalize(), F.normalize(xt))
    close(x.normalize(1.5, -1), F.normalize(xt, 1.5, -1))
    close(x.normalize(float("inf"), 2), F.normalize(xt, float("inf"), 2))
    close(x.cosine_similarity(x * 2 + 1, 2), F.cosine_similarity(xt, xt * 2 + 1, 2))
    (g, s, m, v), (gt, st_, mt, vt) = both(values(3), values(3), values(3), abs(values(3)))
    close(x.batchnorm(g, s, m, (v + 1e-5).rsqrt()), F.batch_norm(xt, mt, vt, gt, st_))
    close(x.batchnorm(None, None, m, (v + 1e-5).rsqrt()), F.batch_norm(xt, mt, vt))


def test_layernorm_of_a_large_mean() -> None:
    x = (values(4, 64) + 1e4).astype(np.float32)
    close(Tensor(x).layernorm(), F.layer_norm(torch.from_numpy(x).double(), (64,)).float(), rtol=2e-2,
          atol=2e-3)


# ---- attention and dropout ---------------------------------------------------------------------------------


def test_attention() -> None:
    (q, k, v), (qt, kt, vt) = both(values(2, 4, 5, 8), values(2, 4, 7, 8), values(2, 4, 7, 3))
    close(q.scaled_dot_product_attention(k, v), F.scaled_dot_product_attention(qt, kt, vt))
    close(q.scaled_dot_product_attention(k, v, is_causal=True),
          F.scaled_dot_product_attention(qt, kt, vt, is_causal=True))
    close(q.scaled_dot_product_attention(k, v, scale=0.3),
          F.scaled_dot_product_attention(qt, kt, vt, scale=0.3))
    mask = rng.random((5, 7)) > 0.3
    mask[:, 0] = True
    bias = values(2, 1, 5, 7)
    close(q.scaled_dot_product_attention(k, v, Tensor(mask)),
          F.scaled_dot_product_attention(qt, kt, vt, torch.from_numpy(mask)))
    close(q.scaled_dot_product_attention(k, v, Tensor(bias)),
          F.scaled_dot_product_attention(qt, kt, vt, torch.from_numpy(bias)))
    close(q.scaled_dot_product_attention(k[:, :2], v[:, :2], enable_gqa=True),
          F.scaled_dot_product_attention(qt, kt[:, :2], vt[:, :2], enable_gqa=True))
    mask[2] = False
    close(q.scaled_dot_product_attention(k, v, Tensor(mask)),
          F.scaled_dot_product_attention(qt, kt, vt, torch.from_numpy(mask)))
    with pytest.raises(ArgumentError):
        q.scaled_dot_product_attention(k, v, Tensor(mask), is_causal=True)
    with pytest.raises(ShapeError):
        q.scaled_dot_product_attention(k[:, :3], v[:, :3], enable_gqa=True)


def test_dropout() -> None:
    x = Tensor(np.ones((50, 40), np.float32))
    assert x.dropout(0.5) is x
    with pytest.raises(ArgumentError):
        x.dropout(1.5)
    with Context(TRAINING=1):
        got = numpy_of(x.dropout(0.25))
        assert numpy_of(x.dropout(1.0)).sum() == 0
    assert set(np.unique(got)) == {np.float32(0), np.float32(1 / 0.75)}
    assert 0.2 < (got == 0).mean() < 0.3


# ---- losses ------------------------------------------------------------------------------------------------

reductions = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@reductions
@pytest.mark.parametrize("shape", [(4, 5), (2, 5, 3), (2, 5, 3, 2)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(reduction: str, shape: tuple[int, ...], smoothing: float) -> None:
    x = values(*shape) * 3
    labels = rng.integers(0, 5, (shape[0], *shape[2:]))
    labels.flat[0] = -100
    weight = abs(values(5))
    shares = rng.random(shape)
    (x_, y_, w_, s_), (xt, yt, wt, st_) = both(x, labels, weight, shares)
    close(x_.cross_entropy(y_, reduction, smoothing), F.cross_entropy(xt, yt, reduction=reduction,
                                                                      label_smoothing=smoothing))
    close(x_.cross_entropy(y_, reduction, smoothing, w_),
          F.cross_entropy(xt, yt, wt, reduction=reduction, label_smoothing=smoothing))
    if reduction == "mean":
        count = labels.size
        expected = F.cross_entropy(xt, st_, wt, reduction="sum", label_smoothing=smoothing) / count
    else:
        expected = F.cross_entropy(xt, st_, wt, reduction=reduction, label_smoothing=smoothing)
    close(x_.cross_entropy(s_, reduction, smoothing, w_), expected)


@reductions
def test_other_class_losses(reduction: str) -> None:
    x, labels = values(2, 3, 5), rng.integers(0, 5, (2, 3))
    (x_, y_), (xt, yt) = both(x, labels)
    expected = F.cross_entropy(xt.permute(0, 2, 1), yt, reduction=reduction)
    close(x_.sparse_categorical_crossentropy(y_, reduction=reduction), expected)
    logp, names = np.log(rng.random((4, 5, 2))), rng.integers(0, 5, (4, 2))
    weight = rng.random(5)
    (p_, n_, w_), (pt, nt, wt) = both(logp, names, weight)
    close(p_.nll_loss(n_, reduction=reduction), F.nll_loss(pt, nt, reduction=reduction))
    close(p_.nll_loss(n_, w_, 2, reduction), F.nll_loss(pt, nt, wt, ignore_index=2, reduction=reduction))
    (v_, l_), (vt, lt) = both(values(5), np.array(3))
    close(v_.cross_entropy(l_), F.cross_entropy(vt, lt))


@reductions
def test_elementwise_losses(reduction: str) -> None:
    x, y = values(3, 4), values(3, 4)
    p, q = rng.random((3, 4)), rng.random((3, 4))
    q[0, 0], p[1, 1] = 0.0, 1.0
    (x_, y_, p_, q_), (xt, yt, pt, qt) = both(x, y, p, q)
    r = {"reduction": reduction}
    close(x_.mse_loss(y_, **r), F.mse_loss(xt, yt, **r))
    close(x_.l1_loss(y_, **r), F.l1_loss(xt, yt, **r))
    close(x_.huber_loss(y_, delta=0.7, **r), F.huber_loss(xt, yt, delta=0.7, **r))
    close(x_.smooth_l1_loss(y_, beta=0.5, **r), F.smooth_l1_loss(xt, yt, beta=0.5, **r))
    close(p_.binary_crossentropy(q_, **r), F.binary_cross_entropy(pt, qt, **r))
    close(x_.binary_crossentropy_logits(q_, **r), F.binary_cross_entropy_with_logits(xt, qt, **r))
    weight = abs(values(4))
    close(x_.binary_crossentropy_logits(q_, pos_weight=Tensor(weight), **r),
          F.binary_cross_entropy_with_logits(xt, qt, pos_weight=torch.from_numpy(weight), **r))
    close(x_.kl_div(q_, **r), F.kl_div(xt, qt, **r))
    close(x_.kl_div(y_, log_target=True, **r), F.kl_div(xt, yt, log_target=True, **r))
    close(x_.kl_div(q_, "batchmean"), F.kl_div(xt, qt, reduction="batchmean"))


def test_bad_losses() -> None:
    x = Tensor(values(3, 4))
    with pytest.raises(ShapeError):
        x.mse_loss(Tensor(values(4)))
    with pytest.raises(ArgumentError, match="reduction"):
        x.mse_loss(x, reduction="max")
    with pytest.raises(DTypeError, match="class numbers"):
        x.cross_entropy(Tensor(values(3)))
    with pytest.raises(ShapeError, match="one class"):
        x.cross_entropy(Tensor([0, 1]))
    with pytest.raises(ArgumentError, match="label_smoothing"):
        x.cross_entropy(Tensor([0, 1, 2]), label_smoothing=2)


# ---- resizing ----------------------------------------------------------------------------------------------


@few
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_interpolate(h: int, w: int, new_h: int, new_w: int, align_corners: bool) -> None:
    (x,), (xt,) = both(values(1, 2, h, w))
    size = (new_h, new_w)
    close(x.interpolate(size, "linear", align_corners),
          F.interpolate(xt, size, mode="bilinear", align_corners=align_corners), atol=1e-7)
    close(x.interpolate(size, "nearest"), F.interpolate(xt, size, mode="nearest"))
    close(x.interpolate(size, "nearest-exact"), F.interpolate(xt, size, mode="nearest-exact"))
    close(x.interpolate(size, "bicubic", align_corners),
          F.interpolate(xt, size, mode="bicubic", align_corners=align_corners), atol=1e-7)
    close(x.interpolate(size, "area"), F.interpolate(xt, size, mode="area"), atol=1e-7)


def test_interpolate_volumes_and_halves() -> None:
    (x,), (xt,) = both(values(2, 2, 3, 4, 5))
    close(x.interpolate((5, 3, 7), "trilinear"), F.interpolate(xt, (5, 3, 7), mode="trilinear"), atol=1e-7)
    close(x.interpolate((2, 6, 3), "area"), F.interpolate(xt, (2, 6, 3), mode="area"), atol=1e-7)
    half = x.half().interpolate((4, 4), "cubic")
    assert half.dtype.name == "float16" and half.shape == (2, 2, 3, 4, 4)


def test_bad_interpolate() -> None:
    with pytest.raises(ArgumentError, match="mode"):
        Tensor(values(2, 3)).interpolate((2,), "quartic")
    with pytest.raises(ShapeError):
        Tensor(values(3)).interpolate((0,))


def test_sequential() -> None:
    assert numpy_of(Tensor([1.0, -1.0]).sequential([lambda x: x * 2, Tensor.relu])).tolist() == [2.0, 0.0]

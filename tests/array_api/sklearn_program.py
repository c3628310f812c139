"""scikit-learn in array-API mode on tensors: every estimator and metric gives tensors (or numbers) with the
values that it gives for NumPy arrays.

Run as a program with SCIPY_ARRAY_API=1, which SciPy reads when it is imported.
"""

from __future__ import annotations

import numpy as np
from sklearn import metrics, set_config
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.metrics import pairwise
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import (
    Binarizer,
    LabelEncoder,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    PolynomialFeatures,
    StandardScaler,
)

from whit import Tensor

set_config(array_api_dispatch=True)
rng = np.random.default_rng(0)
X = rng.normal(size=(60, 5)).astype(np.float32)
y = (X[:, 0] + X[:, 1] > 0).astype(np.int32)
Y = (X @ rng.normal(size=5)).astype(np.float32)

for scaler in (StandardScaler, MinMaxScaler, Normalizer, MaxAbsScaler, PolynomialFeatures, Binarizer):
    got = scaler().fit_transform(Tensor(X))
    assert isinstance(got, Tensor), scaler
    np.testing.assert_allclose(got.numpy(), scaler().fit_transform(X), 1e-4, 1e-5)
assert LabelEncoder().fit_transform(Tensor([3, 1, 3])).tolist() == [1, 0, 1]

labels, found = rng.integers(0, 2, (2, 30)).astype(np.int32)
for name in (
    "accuracy_score",
    "zero_one_loss",
    "f1_score",
    "precision_score",
    "recall_score",
    "confusion_matrix",
):
    metric = getattr(metrics, name)
    got, want = metric(Tensor(labels), Tensor(found)), metric(labels, found)
    np.testing.assert_allclose(np.asarray(got), want, 1e-5, err_msg=name)
a, b = rng.random((2, 20)).astype(np.float32)
for name in ("mean_squared_error", "mean_absolute_error", "r2_score", "mean_squared_log_error", "max_error"):
    metric = getattr(metrics, name)
    np.testing.assert_allclose(float(metric(Tensor(a), Tensor(b))), metric(a, b), 1e-4, err_msg=name)
for name in ("cosine_similarity", "euclidean_distances", "rbf_kernel", "linear_kernel", "polynomial_kernel"):
    kernel = getattr(pairwise, name)
    got = kernel(Tensor(X), Tensor(X))
    assert isinstance(got, Tensor), name
    np.testing.assert_allclose(got.numpy(), kernel(X, X), 1e-4, 2e-3, err_msg=name)

ridge, peer = Ridge(solver="svd").fit(Tensor(X), Tensor(Y)), Ridge(solver="svd").fit(X, Y)
assert isinstance(ridge.coef_, Tensor)
np.testing.assert_allclose(ridge.coef_.numpy(), peer.coef_, 1e-3, 1e-4)
np.testing.assert_allclose(ridge.predict(Tensor(X)).numpy(), peer.predict(X), 1e-3, 1e-3)
pca, peer = PCA(2, svd_solver="full").fit(Tensor(X)), PCA(2, svd_solver="full").fit(X)
np.testing.assert_allclose(np.abs(pca.components_.numpy()), np.abs(peer.components_), 1e-3, 1e-3)
assert isinstance(pca.transform(Tensor(X)), Tensor)
lda, peer = LinearDiscriminantAnalysis().fit(Tensor(X), Tensor(y)), LinearDiscriminantAnalysis().fit(X, y)
assert (lda.predict(Tensor(X)).numpy() == peer.predict(X)).all()
parts, peers = (train_test_split(*d, random_state=0) for d in ((Tensor(X), Tensor(y)), (X, y)))
for got, want in zip(parts, peers):
    np.testing.assert_array_equal(got.numpy(), want)
print("all equal")

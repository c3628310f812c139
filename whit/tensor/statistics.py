"""Covariance and correlation."""

from __future__ import annotations

from typing import Any, Self

from whit.helpers import ShapeError
from whit.tensor.sampling import SamplingMixin
from whit.uop.uop import show_shape


class StatisticsMixin(SamplingMixin):
    """Methods of the family of statistics."""

    def cov(self, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Self:
        """Covariances between the rows: each row is a variable, each column an observation.

        Shapes: (variables, observations) -> (variables, variables); (observations,) -> (). fweights: how
        often each observation counts (integers); aweights: weights of observations. Dtype: the float dtype of
        self. Errors: ShapeError for more than two axes or weights of another length.

        >>> Tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]).cov().tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
        """
        if self.ndim > 2:
            raise ShapeError(
                f"cov of shape {show_shape(self.shape)}",
                because="it takes a matrix of one row a variable",
                fix="reshape to two axes",
            )
        x = self._float() if self.ndim == 2 else self._float().reshape(1, -1)
        count = x.shape[1]
        weights: Any = None
        for given in (fweights, aweights):
            if given is not None:
                w = self._of(given)
                if w.shape != (count,):
                    raise ShapeError(
                        f"cov of {count} observations with weights of shape {show_shape(w.shape)}",
                        because="each observation has one weight",
                        fix=f"pass {count} weights",
                    )
                weights = w.cast(x.dtype) if weights is None else weights * w.cast(x.dtype)
        if weights is None:
            x = x - x.mean(1, keepdim=True)
            total: Any = count - correction
            products = x.matmul(x.transpose(0, 1))
        else:
            mass = weights.sum()
            x = x - (x * weights).sum(1, keepdim=True) / mass
            products = (x * weights).matmul(x.transpose(0, 1))
            total = mass - correction
            if aweights is not None:
                part = (weights * self._of(aweights).cast(x.dtype)).sum() / mass
                total = mass - part * correction
        result: Self = products / total
        return result if self.ndim == 2 else result.reshape(())

    def corrcoef(self) -> Self:
        """Pearson's correlations between the rows, limited to [-1, 1]; NaN for a row without variance.

        Shapes: (variables, observations) -> (variables, variables); (observations,) -> ().

        >>> Tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]).corrcoef().round(decimals=5).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
        """
        c = self.cov()
        if c.ndim == 0:
            return c / c
        deviation = c.diagonal().sqrt()
        return (c / deviation.reshape(-1, 1) / deviation).clip(-1.0, 1.0)

"""Estimators that notice when their parameters were changed after they were fitted."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

_OF_NO_CONSEQUENCE = ("n_jobs", "verbose")


class Fitted(BaseEstimator):
    """What is fitted belongs to the parameters that it was fitted with."""

    def _note_parameters(self) -> None:
        """To be called at the end of a fit."""
        self._fitted_with = self._consequential()

    def _check_fitted(self) -> None:
        """Raises unless there was a fit, and with the parameters of now."""
        check_is_fitted(self)
        for name, now in self._consequential().items():
            then = self._fitted_with[name]
            if now is not then and not np.array_equal(now, then):
                raise ValueError(f"{name} was {then!r} in the last fit and is {now!r} now; fit again.")

    def _consequential(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.get_params(deep=False)
        return {name: value for name, value in parameters.items() if name not in _OF_NO_CONSEQUENCE}

"""Least squares for positive constants within bounds, and which constants the measurements determine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kumi.plan.layout_batch import Floats, Ints

_Residuals = Callable[[Floats], Floats]
_Values = Floats | Sequence[float]

# Step in a parameter's logarithm for numerical derivatives: small, but far above rounding errors.
_DIFFERENCE = 1e-4
_MAX_ITERATIONS = 60
# Converged when no logarithm changes by more than this.
_TOLERANCE = 1e-7


def least_squares(residuals: _Residuals, start: _Values, lower: _Values, upper: _Values) -> Floats:
    """Return the parameters in [`lower`, `upper`] that minimize the sum of squares of `residuals(parameters)`.

    All parameters are positive. The method is Levenberg-Marquardt (Marquardt, 1963) on the parameters' logarithms, so
    bandwidths and latencies have the same scale. A step that leaves the bounds is cut off at them.
    """
    low, high = np.log(np.asarray(lower, np.float64)), np.log(np.asarray(upper, np.float64))
    logs = np.clip(np.log(np.asarray(start, np.float64)), low, high)
    errors = residuals(np.exp(logs))
    damping = 1e-3
    for _ in range(_MAX_ITERATIONS):
        jacobian = _log_jacobian(residuals, logs, errors)
        gradient = jacobian.T @ errors
        # Exclude parameters at a bound with a gradient that points outside.
        free = ~(((logs <= low) & (gradient > 0)) | ((logs >= high) & (gradient < 0)))
        if not free.any():
            break
        curvature = jacobian[:, free].T @ jacobian[:, free]
        scale = np.diag(np.diag(curvature) + 1e-12)
        step = np.zeros_like(logs)
        step[free] = -np.linalg.solve(curvature + damping * scale, gradient[free])
        # A parameter changes at most by a factor of e squared in an iteration.
        new_logs = np.clip(logs + np.clip(step, -2.0, 2.0), low, high)
        new_errors = residuals(np.exp(new_logs))
        if new_errors @ new_errors < errors @ errors:
            change = float(np.max(np.abs(new_logs - logs)))
            logs, errors, damping = new_logs, new_errors, max(damping / 10, 1e-12)
            if change < _TOLERANCE:
                break
        elif damping > 1e8:
            break
        else:
            damping *= 10
    fitted: Floats = np.exp(logs)
    return fitted


def log_jacobian(residuals: _Residuals, parameters: _Values) -> Floats:
    """Return the derivative of each residual (row) with respect to the logarithm of each parameter (column)."""
    logs = np.log(np.asarray(parameters, np.float64))
    return _log_jacobian(residuals, logs, residuals(np.exp(logs)))


def _log_jacobian(residuals: _Residuals, logs: Floats, errors: Floats) -> Floats:
    """Return `log_jacobian` at the logarithms `logs`, by differences from `errors`, the residuals there."""
    columns = []
    for index in range(len(logs)):
        shifted = logs.copy()
        shifted[index] += _DIFFERENCE
        columns.append((residuals(np.exp(shifted)) - errors) / _DIFFERENCE)
    return np.stack(columns, axis=1) if columns else np.zeros((len(errors), 0))


def identifiable_columns(jacobian: Floats, least: float) -> Ints:
    """Return the indices of the parameters (columns) that the residuals (rows) determine independently, the best first.

    The method is QR decomposition with column pivoting (Golub, 1965). Each parameter is chosen for the norm of its
    column after projecting out the columns chosen before, and this norm must be at least `least`.
    """
    remaining, chosen = jacobian.astype(np.float64).copy(), []
    for _ in range(min(jacobian.shape)):
        norms = np.sqrt((remaining**2).sum(axis=0))
        best = int(np.argmax(norms))
        if norms[best] < least:
            break
        chosen.append(best)
        direction = remaining[:, best] / norms[best]
        remaining -= np.outer(direction, direction @ remaining)
    return np.array(chosen, np.int64)

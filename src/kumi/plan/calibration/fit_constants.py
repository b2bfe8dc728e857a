"""Constants from measurements: bounded least squares on positive parameters, and which of them can be told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kumi.plan.layout_batch import Floats, Ints

Residuals = Callable[[Floats], Floats]
Values = Floats | Sequence[float]

# Change of a parameter's logarithm with which derivatives are taken: small, and far above rounding.
_NUDGE = 1e-4
_ROUNDS = 60
# Change of the logarithms at which nothing more is to be gained.
_STILL = 1e-7


def least_squares(residuals: Residuals, start: Values, lower: Values, upper: Values) -> Floats:
    """Parameters within [`lower`, `upper`] for which the sum of squared `residuals(parameters)` is least.

    Levenberg-Marquardt (Marquardt, 1963) in the parameters' logarithms, so that bandwidths and latencies are alike;
    a step that leaves the bounds ends at them. All parameters are positive.
    """
    low, high = np.log(np.asarray(lower, np.float64)), np.log(np.asarray(upper, np.float64))
    at = np.clip(np.log(np.asarray(start, np.float64)), low, high)
    now = residuals(np.exp(at))
    damping = 1e-3
    for _ in range(_ROUNDS):
        slopes = _slopes(residuals, at, now)
        gradient = slopes.T @ now
        # A parameter that rests on a bound and is pushed against it takes no part in the step.
        free = ~(((at <= low) & (gradient > 0)) | ((at >= high) & (gradient < 0)))
        if not free.any():
            break
        curvature = slopes[:, free].T @ slopes[:, free]
        scale = np.diag(np.diag(curvature) + 1e-12)
        step = np.zeros_like(at)
        step[free] = -np.linalg.solve(curvature + damping * scale, gradient[free])
        to = np.clip(at + np.clip(step, -2.0, 2.0), low, high)
        found = residuals(np.exp(to))
        if found @ found < now @ now:
            moved = float(np.max(np.abs(to - at)))
            at, now, damping = to, found, max(damping / 10, 1e-12)
            if moved < _STILL:
                break
        elif damping > 1e8:
            break
        else:
            damping *= 10
    fitted: Floats = np.exp(at)
    return fitted


def slopes(residuals: Residuals, at: Values) -> Floats:
    """How much each residual (row) changes when a parameter (column) grows by a factor of e, near `at`."""
    logs = np.log(np.asarray(at, np.float64))
    return _slopes(residuals, logs, residuals(np.exp(logs)))


def _slopes(residuals: Residuals, logs: Floats, now: Floats) -> Floats:
    columns = []
    for index in range(len(logs)):
        nudged = logs.copy()
        nudged[index] += _NUDGE
        columns.append((residuals(np.exp(nudged)) - now) / _NUDGE)
    return np.stack(columns, axis=1) if columns else np.zeros((len(now), 0))


def identifiable(slopes: Floats, least: float) -> Ints:
    """Indices of the parameters (columns) that the residuals (rows) can tell apart, the best determined first.

    QR decomposition with column pivoting (Golub, 1965): each is chosen for what remains of its influence on the
    residuals when that of those before it is taken away, and must have `least` of it left.
    """
    left, chosen = slopes.astype(np.float64).copy(), []
    for _ in range(min(slopes.shape)):
        sizes = np.sqrt((left**2).sum(axis=0))
        best = int(np.argmax(sizes))
        if sizes[best] < least:
            break
        chosen.append(best)
        direction = left[:, best] / sizes[best]
        left -= np.outer(direction, direction @ left)
    return np.array(chosen, np.int64)

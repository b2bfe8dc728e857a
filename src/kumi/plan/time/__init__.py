"""Seconds of a training step: operations, collectives, gradients and the optimizer."""

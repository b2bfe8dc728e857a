"""What is learned: pure functions of per-token log-probabilities, blind to how the model is split."""

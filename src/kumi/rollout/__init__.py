"""The training data of reinforcement learning: the policy's replies to prompts, scored by rewards, as batches.

prompts -> engine (replies with the sampler's log-probs) -> rewards -> groups -> the trainer's own log-probs
  -> rows, balanced over data-parallel ranks -> `kumi.rollout.rollout_source`, the batches of the training loop
"""

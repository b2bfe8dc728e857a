"""Reinforcement learning's data: replies of the policy to prompts, scored by rewards, as batches of training.

prompts -> engine (replies with the sampler's log-probs) -> rewards -> groups -> the trainer's own log-probs
  -> rows, balanced over data-parallel ranks -> `kumi.rollout.rollout_source`, the batches of the training loop
"""

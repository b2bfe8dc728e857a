"""The colours of reports: the colour-blind-safe palette of Okabe and Ito (2008, "Color Universal Design").

No picture relies on colour alone: every area also has a label, a pattern, a letter or a fixed position.
"""

from __future__ import annotations

ORANGE, SKY, GREEN = "#e69f00", "#56b4e9", "#009e73"
YELLOW, BLUE, RED, PURPLE, GREY = "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"

# The colours of the fields of `MemoryEstimate`.
MEMORY_COLOURS = {
    "params": BLUE,
    "grads": GREEN,
    "optimizer": ORANGE,
    "gathered": SKY,
    "weights": SKY,
    "activations": RED,
    "head": PURPLE,
    "buffers": YELLOW,
    "reference": BLUE,
    "critic": PURPLE,
    "cache": YELLOW,
    "reward_models": ORANGE,
    "reserved": GREY,
}
# Kinds that are hatched: they share a colour with another kind, or look like it in black and white.
HATCHED = ("gathered", "grads", "activations", "reference", "critic", "cache", "reward_models", "reserved")

# The colours of the kinds of `Estimate.time` but communication, which has TRAFFIC_COLOUR.
TIME_COLOURS = {
    "forward": BLUE,
    "backward": BLUE,
    "recompute": SKY,
    "bubble": GREY,
    "passes": SKY,
    "rollout": PURPLE,
    "scoring": YELLOW,
    "critic": ORANGE,
    "optimizer": GREEN,
    "offload": PURPLE,
    "host": YELLOW,
}
TRAFFIC_COLOUR = ORANGE
# Actions of a pipeline: forward, full backward, gradient of the inputs, gradient of the weights.
ACTION_COLOURS = {"F": SKY, "B": BLUE, "I": ORANGE, "W": GREEN}


def time_colour(kind: str) -> str:
    """Return the colour of a kind of time; communication on every axis has the same one."""
    return TIME_COLOURS.get(kind, TRAFFIC_COLOUR)

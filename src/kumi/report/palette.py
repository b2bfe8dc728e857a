"""The colours of reports: those that Okabe and Ito (2008, "Color Universal Design") found everyone can tell apart.

No picture relies on them alone: every area is labelled, or has a pattern, a letter or a place of its own.
"""

from __future__ import annotations

ORANGE, SKY, GREEN = "#e69f00", "#56b4e9", "#009e73"
YELLOW, BLUE, RED, PURPLE, GREY = "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"

MEMORY_COLOURS = {
    "params": BLUE,
    "grads": GREEN,
    "optimizer": ORANGE,
    "gathered": SKY,
    "weights": SKY,
    "activations": RED,
    "head": PURPLE,
    "buffers": YELLOW,
    "reserved": GREY,
}
# Kinds that share a colour with another, or need setting apart from it in black and white, are hatched.
HATCHED = ("gathered", "grads", "activations", "reserved")

TIME_COLOURS = {
    "forward": BLUE,
    "backward": BLUE,
    "recompute": SKY,
    "bubble": GREY,
    "optimizer": GREEN,
    "offload": PURPLE,
    "host": YELLOW,
}
TRAFFIC_COLOUR = ORANGE
# Actions of a pipeline: forward, full backward, gradient of the inputs, gradient of the weights.
ACTION_COLOURS = {"F": SKY, "B": BLUE, "I": ORANGE, "W": GREEN}


def time_colour(kind: str) -> str:
    """The colour of a kind of time: traffic of every axis has one."""
    return TIME_COLOURS.get(kind, TRAFFIC_COLOUR)

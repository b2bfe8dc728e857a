"""`kumi doctor --gpu`: one validation of a GPU, whose report a user reads and sends.

    validate(out, device)    the parts of `part_table`, each in a process of its own; a JSON file and a page

This package does not import torch; the processes of parts do.
"""

from kumi.validation.run_parts import validate

__all__ = ["validate"]

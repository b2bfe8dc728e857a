"""How the memory of a run was read: by which tool, and on which ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What a tool reads: all memory of the device, the memory in use, or what PyTorch's allocator has reserved. Trainers
# print memory in use first.
TOOLS = ("nvidia-smi", "allocated", "reserved")
# Words of clauses that speak of memory; "reserved" nodes and "allocated" hours do not.
MEMORY = r"\bmem|memory|peak|nvidia-smi|\bgi?b\b|allocator"
UNSTATED = r"not (stated|said|given|known|printed)"


@dataclass(frozen=True)
class Reading:
    """`tool`: one of `TOOLS`, "" where it is not known. `pp_rank`: the rank of the pipeline that was read, None for the
    fullest."""

    tool: str = ""
    pp_rank: int | None = None


def stated_tool(text: str, cell: str) -> str:
    """The tool that the notes `text` name for the number in `cell`; "" where they name none.

    Clauses about memory count, but for those that say "not stated". Of two tools, the one beside the number in the cell
    counts; where neither has that number, the first of `TOOLS`.
    """
    named: dict[str, str] = {}
    for clause in re.split(r";|\. ", text):
        if re.search(MEMORY, clause) and not re.search(UNSTATED, clause):
            for tool in re.findall("|".join(TOOLS), clause):
                named.setdefault(tool, clause)
    beside = [tool for tool, clause in named.items() if cell and cell in _numbers_beside(tool, clause)]
    return next((tool for tool in (*beside, *TOOLS) if tool in named), "")


def _numbers_beside(tool: str, clause: str) -> list[str]:
    """The numbers right before or after `tool`: "allocated 50.1", "50.1 GiB reserved", "reserved: 60"."""
    after = re.findall(rf"{tool}(?: memory)?[ :=(]+([\d.]*\d)", clause)
    before = re.findall(rf"([\d.]*\d) *(?:gi?b)? *\(?{tool}", clause)
    return [*after, *before]

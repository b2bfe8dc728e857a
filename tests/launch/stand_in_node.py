"""Stands for `kumi train` on a node: writes what it was given, waits for the stop file, ends with a code of its own.

    stand_in_node.py FOLDER train RUN.toml KEY=VALUE ...

FOLDER/codes has the exit code of each start, a line each; an empty line waits for the stop file and ends with 75, or
for SIGTERM and ends with 143.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def terminated(*_: object) -> None:
    print("saved TERM", flush=True)
    sys.exit(143)


signal.signal(signal.SIGTERM, terminated)
folder, words = Path(sys.argv[1]), sys.argv[2:]
start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
node = os.environ["KUMI_NODE"]
seen = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
draft = folder / f"node-{node}-{start}.part"
draft.write_text(json.dumps(seen))
draft.rename(folder / f"node-{node}-{start}.json")
code = (folder / "codes").read_text().splitlines()[start]
if code:
    sys.exit(int(code))
stop = Path((folder / "out").read_text()) / "stop"
while not stop.exists():
    time.sleep(0.05)
print("saved", stop.read_text().strip(), flush=True)
sys.exit(75)

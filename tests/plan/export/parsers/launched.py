"""The command that a shell file runs: bash runs it with stand-ins for the launchers, which print their arguments."""

import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
STAND_IN = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"launcher": os.path.basename(sys.argv[0]), "arguments": sys.argv[1:],
                   "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")}}))
"""


def launched(script: Path) -> dict:
    """Return the launcher's name, its arguments and CUDA_DEVICE_MAX_CONNECTIONS."""
    with tempfile.TemporaryDirectory() as folder:
        for name in LAUNCHERS:
            path = Path(folder, name)
            path.write_text(STAND_IN)
            path.chmod(0o755)
        env = {key: value for key, value in os.environ.items() if key != "CUDA_DEVICE_MAX_CONNECTIONS"}
        env |= {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "NODE_RANK": "0",
            "MASTER_ADDR": "localhost",
            "HOSTFILE": "hosts",
        }
        process = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"{script}: bash ended with {process.returncode}: {process.stderr}")
    return json.loads(process.stdout)


def main(read, needs) -> None:
    """Print `read(folder)` of each folder on the command line; exit with 77 if a package is missing."""
    import importlib.util
    import warnings

    warnings.simplefilter("ignore")
    try:
        # A package that is missing is noticed before another one, which takes long, is imported.
        if missing := [name for name in needs if importlib.util.find_spec(name) is None]:
            raise ImportError(f"No module named {missing[0]!r}")
        for name in needs:
            importlib.import_module(name)
    except ImportError as error:
        print(f"{needs[-1]} cannot be imported here: {error}")
        raise SystemExit(77) from None
    print(json.dumps([read(Path(folder)) for folder in sys.argv[1:]], default=str))


def command(file: Path) -> list:
    """Return the words of the launch command in the comment at the head of `file`."""
    return next(line for line in file.read_text().splitlines() if line.startswith("# $ ")).split()[2:]


def processes(arguments: list) -> int:
    """Return the number of ranks that a torchrun command starts."""
    process = dict(pairwise(arguments))
    return int(process.get("--nnodes", 1)) * int(process["--nproc-per-node"])

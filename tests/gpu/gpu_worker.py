"""Steps of tiny decoders on one rank of a layout, on GPUs over NCCL or on CPUs over gloo.

python gpu_worker.py CASES.json OUT.json cuda      # with the environment that torchrun gives a rank
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from kumi.parallel import build_mesh, init_distributed
from kumi.parallel.mesh import close_distributed
from kumi.spec.comm import Comm
from kumi.spec.layout import Layout
from kumi.validation.tiny_steps import TinyCase, tiny_steps


def loaded_case(case: dict[str, Any]) -> TinyCase:
    """The inverse of `dataclasses.asdict`."""
    layout = Layout(**case["layout"] | {"stage_layers": tuple(case["layout"]["stage_layers"])})
    return TinyCase(**case | {"layout": layout, "comm": Comm(**case["comm"])})


def main() -> None:
    cases, out, device = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    place, results = init_distributed(device, timeout_s=120.0), {}
    # Groups are kept, and shared by the cases of a layout: PyTorch would give the name of a destroyed group to the next
    # one, which would then meet at the addresses that the old one left in the store.
    mesh_of = cache(lambda layout: build_mesh(layout, place))
    for name, case in cases.items():
        print(f"rank {place.rank}: {name}", file=sys.stderr, flush=True)
        reference = loaded_case(case)
        results[name] = tiny_steps(reference, mesh_of(reference.layout))
        if place.rank == 0:  # results survive failures of later cases
            out.write_text(json.dumps(results))
    close_distributed()


if __name__ == "__main__":
    main()

"""Steps of tiny decoders on one rank of a layout, on GPUs over NCCL or on CPUs over gloo.

python gpu_worker.py CASES.json OUT.json cuda      # with the environment that torchrun gives a rank
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

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
    world = set(groups())
    for name, case in cases.items():
        print(f"rank {place.rank}: {name}", file=sys.stderr, flush=True)
        reference = loaded_case(case)
        results[name] = tiny_steps(reference, build_mesh(reference.layout, place))
        for group in groups():
            if group not in world:  # else each case would add its communicators to those of all earlier ones
                dist.destroy_process_group(group)
        if place.rank == 0:  # results survive failures of later cases
            out.write_text(json.dumps(results))
    close_distributed()


def groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this rank, in the order in which they were made."""
    return list(dist.distributed_c10d._world.pg_map)


if __name__ == "__main__":
    main()

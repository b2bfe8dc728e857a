"""Read tasks with SkyPilot's own code, as `sky jobs launch` does. A program of SkyPilot's environment, without kumi.

    read_tasks.py ANSWERS < REQUESTS

Requests: JSON with `accelerators`, the names of the catalogue, and `tasks`, each with the `text` of a task file and the
`secrets` of the command line, a list of [name, value]. Answers: a JSON list with each task as SkyPilot read it, or
`refused` with its reason. SkyPilot's own catalogue is on the web; a small one with these names takes its
place, in the home of the user.
"""

import json
import sys
import tempfile
from pathlib import Path

import sky
from sky.catalog.common import get_catalog_path
from sky.utils import dag_utils


def read(text, secrets):
    """Return what SkyPilot reads from the task file `text`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.yaml"
        file.write_text(text)
        sky.Task.from_yaml(str(file))
        dag = dag_utils.load_chain_dag_from_yaml(str(file), secret_overrides=secrets)
    dag.validate()
    (task,) = dag.tasks
    (resources,) = task.resources
    return {
        "name": dag.name,
        "nodes": task.num_nodes,
        "run": task.run,
        "setup": task.setup,
        "workdir": task.workdir,
        "accelerators": resources.accelerators,
        "cpus": resources.cpus,
        "memory": resources.memory,
        "spot": resources.use_spot,
        "recovery": resources.job_recovery,
        "storage": {path: mount.source for path, mount in task.storage_mounts.items()},
        "volumes": task.volumes,
        "secrets": {key: str(value.get_secret_value()) for key, value in task.secrets.items()},
        "managed": [reference.name for reference in task.managed_secret_refs],
        "shown": repr(task) + dag_utils.dump_chain_dag_to_yaml_str(dag, use_user_specified_yaml=True),
    }


def write_catalogue(names):
    """Write a catalogue: all clouds have the accelerators `names`, and Amazon's has one machine in one region."""
    clouds = "['AWS', 'GCP', 'Kubernetes']"
    tables = {
        "common/accelerators.csv": ["AcceleratorName,Clouds", *(f'{name},"{clouds}"' for name in names)],
        "aws/vms.csv": [
            "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone",
            "p5.48xlarge,H100,8,192,2048,,55,20,us-east-1,us-east-1a",
        ],
    }
    for name, lines in tables.items():
        file = Path(get_catalog_path(name))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")


requests = json.load(sys.stdin)
write_catalogue(requests["accelerators"])
answers = []
for request in requests["tasks"]:
    try:
        answers.append(read(request["text"], [tuple(pair) for pair in request["secrets"]]))
    except Exception as error:
        answers.append({"refused": f"{type(error).__name__}: {error}"})
Path(sys.argv[1]).write_text(json.dumps(answers, default=str))

"""Read tasks with SkyPilot's own code, as `sky jobs launch` does. A program of SkyPilot's environment, without kumi.

    read_tasks.py < REQUESTS > ANSWERS

Requests and answers are JSON lists of the same length. A request: `text` of a task file, `env` and `secrets` as lists
of [name, value] from the command line. An answer: the task as SkyPilot read it, or `refused` with its reason.
"""

import json
import sys
import tempfile
from pathlib import Path

import sky
from sky.utils import dag_utils


def read(text, secrets):
    """Return what SkyPilot reads from the task file `text`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.yaml"
        file.write_text(text)
        task = sky.Task.from_yaml(str(file))
        dag = dag_utils.load_chain_dag_from_yaml(str(file), secrets_overrides=secrets)
    dag.validate()
    (loaded,) = dag.tasks
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
        "secrets": {key: str(value) for key, value in loaded.secrets.items()},
        "shown": repr(loaded) + json.dumps(loaded.to_yaml_config(use_user_specified_yaml=False), default=str),
    }


answers = []
for request in json.load(sys.stdin):
    try:
        answers.append(read(request["text"], [tuple(pair) for pair in request["secrets"]]))
    except Exception as error:
        answers.append({"refused": f"{type(error).__name__}: {error}"})
json.dump(answers, sys.stdout, default=str)

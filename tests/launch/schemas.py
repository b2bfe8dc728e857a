"""Check manifests by the schemas of Kubernetes and the models of Kubeflow, without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

KUBERNETES = "1.33"
_MODELS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): ("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): ("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
}


def check_manifest(document: dict[str, Any]) -> None:
    """Raise an error unless `document` is a valid object of Kubernetes 1.33, or of its custom resource."""
    kind = (document["apiVersion"], document["kind"])
    if kind not in _MODELS:
        import_module("kubernetes_validate").validate(document, KUBERNETES, strict=True)
        return
    file, name = _MODELS[kind]
    model = getattr(import_module(f"kubeflow_trainer_api.models.{file}"), name).from_dict(document)
    dropped = list(_dropped(document, model.to_dict(), ""))
    if dropped:
        raise ValueError(f"unknown keys: {', '.join(dropped)}")
    # The models leave pod specs of jobs untyped in places; Kubernetes' own schema checks them.
    for child in document["spec"].get("replicatedJobs", ()):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": child["template"]["spec"]}
        import_module("kubernetes_validate").validate(job, KUBERNETES, strict=True)


def _dropped(given: Any, read: Any, path: str) -> Iterator[str]:
    """Yield the keys of `given` that the model did not read: it ignores unknown ones."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            if key not in read:
                yield f"{path}.{key}"
            else:
                yield from _dropped(value, read[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(read, list):
        for number, (item, other) in enumerate(zip(given, read)):
            yield from _dropped(item, other, f"{path}[{number}]")

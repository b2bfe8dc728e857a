"""The table of checks, in the order of `kumi doctor`'s lines. To add a check, write its function and add a line here.

Checks that nodes make together come last, in this order on all nodes. docs/doctor.md explains every line.
"""

from __future__ import annotations

from kumi.doctor.clock_checks import clock_skew, within_skew
from kumi.doctor.disk_checks import free_disk, shared_folder
from kumi.doctor.finding import Check
from kumi.doctor.fleet_rules import enough, same, sound
from kumi.doctor.gpu_checks import chosen_kernels, gpu_count, gpu_memory_errors, gpu_throttling, nvlinks
from kumi.doctor.limit_checks import locked_memory, open_files, processes, shared_memory, show_count
from kumi.doctor.network_checks import (
    all_connected,
    interface,
    network_variables,
    open_ports,
    reaches_all,
    same_variables,
)
from kumi.doctor.software_checks import (
    IMPORT_SECONDS,
    configuration,
    cuda_libraries,
    kumi_version,
    python_version,
    same_configuration,
    torch_version,
)
from kumi.doctor.speed_checks import (
    all_reduce_sum,
    device_speed,
    pair_bandwidth,
    pairs_near_median,
    right_sum,
    speed_near_median,
)
from kumi.doctor.store_checks import store_access
from kumi.units import format_bytes

# Devices of several nodes exchange tensors only if none of these checks has failed.
_BEFORE_TENSORS = ("kumi version", "interface", "open ports")

CHECKS: tuple[Check, ...] = (
    # software_checks.py
    Check("kumi version", kumi_version, same(), "install the same version of kumi on all nodes"),
    Check("python version", python_version, same(), "start kumi from the same environment on all nodes"),
    Check("torch version", torch_version, same(), "install the same version and build of torch on all nodes"),
    Check(
        "configuration",
        configuration,
        same_configuration,
        "start all nodes with the same run file and overrides; `kumi describe RUN.toml --resolved` prints them",
    ),
    # limit_checks.py
    Check(
        "shared memory",
        shared_memory,
        enough(format_bytes),
        "enlarge /dev/shm: `mount -o remount,size=16G /dev/shm`, `docker run --shm-size=16g`, or an emptyDir with "
        "medium Memory on Kubernetes; delete files that dead processes left there",
    ),
    Check(
        "open files",
        open_files,
        enough(show_count),
        "raise the limit: `ulimit -n 65536` before kumi, LimitNOFILE in the service of slurmd or containerd",
    ),
    Check(
        "locked memory",
        locked_memory,
        enough(format_bytes),
        "raise the limit: `ulimit -l unlimited` before kumi, LimitMEMLOCK=infinity in slurmd's service, IPC_LOCK in a "
        "container",
    ),
    Check("processes", processes, enough(show_count), "raise the limit: `ulimit -u`, TasksMax of a service"),
    # disk_checks.py
    Check(
        "free disk",
        free_disk,
        enough(format_bytes),
        "free some space, lower checkpoint.keep, or set train.out to a folder on a larger disk; if train.out is a URL, "
        "raise KUMI_CACHE_LIMIT, or set KUMI_CACHE to a folder on a larger disk",
    ),
    # network_checks.py
    Check(
        "interface",
        interface,
        reaches_all,
        "unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or set them to an interface of this node that reaches the "
        "others (`ip route get HEAD`); give the head by a name or an address that other machines reach",
    ),
    Check(
        "network variables",
        network_variables,
        same_variables,
        "unset these variables, or set them to the same valid value on all nodes",
    ),
    # From here on, nodes measure together.
    Check(
        "clock",
        clock_skew,
        within_skew,
        "synchronise the clocks: start chronyd or ntpd on the named nodes (`chronyc makestep`)",
        together=True,
        needs=("kumi version",),
        seconds=60.0,
    ),
    Check(
        "shared folder",
        shared_folder,
        sound("one writable folder for all"),
        "mount the same file system on all nodes, writable for this user, and set train.out to a folder on it; if "
        "train.out is a URL, set KUMI_CACHE instead",
        together=True,
        needs=("kumi version",),
        seconds=30.0,
    ),
    # store_checks.py
    Check(
        "object store",
        store_access,
        sound("write, read and remove"),
        "set the credentials and the endpoint on the named node as the store's own tools want them (AWS_PROFILE, "
        "AWS_ENDPOINT_URL), create the bucket, and allow these credentials to write, read, list and remove below "
        "train.out",
        together=True,
        needs=("kumi version",),
        seconds=120.0,
    ),
    # network_checks.py
    Check(
        "open ports",
        open_ports,
        all_connected,
        "open the ports above 1024 between the nodes: firewall, security group, network policy",
        together=True,
        needs=("kumi version",),
        seconds=20.0,
    ),
    Check(
        "CUDA libraries",
        cuda_libraries,
        same(),
        "install the same build of torch on all nodes, and use GPUs of one kind",
        together=True,
        needs=("kumi version",),
        seconds=IMPORT_SECONDS + 10.0,
    ),
    # speed_checks.py
    Check(
        "device speed",
        device_speed,
        speed_near_median,
        "stop other processes on the named node, look at its clocks and temperature, or leave the node out",
        together=True,
        needs=("kumi version",),
        seconds=20.0,
        stops_run=False,
    ),
    # gpu_checks.py: after `device speed`, which runs nvidia-smi while the GPUs compute
    Check(
        "GPUs",
        gpu_count,
        enough(show_count),
        "set cluster.devices_per_node to the number of GPUs, ask the scheduler for more, or reset the missing GPU",
        together=True,
        seconds=20.0,
    ),
    Check(
        "GPU memory errors",
        gpu_memory_errors,
        sound("none"),
        "drain the node and reset the GPU (`nvidia-smi -r`); replace it if errors come back",
        together=True,
    ),
    Check(
        "GPU throttling",
        gpu_throttling,
        sound("none"),
        "look at the cooling and the power supply of the named node; a power cap is set by `nvidia-smi -pl`",
        together=True,
        stops_run=False,
    ),
    Check(
        "NVLink",
        nvlinks,
        sound("equal on all GPUs"),
        "restart nvidia-fabricmanager, and look at `nvidia-smi nvlink --status` on the named node",
        together=True,
        seconds=20.0,
    ),
    Check(
        "kernels",
        chosen_kernels,
        sound("chosen by measurement"),
        "a run measures by itself; `kumi doctor --gpu` compares compiled layers and float8, too",
        together=True,
    ),
    # speed_checks.py
    Check(
        "all-reduce",
        all_reduce_sum,
        right_sum,
        "look at the interface and the ports above; NCCL_DEBUG=INFO shows the connections; leave out a node whose sum "
        "is wrong, since its device or adapter computes or transfers wrongly",
        together=True,
        needs=_BEFORE_TENSORS,
        seconds=60.0,
    ),
    Check(
        "bandwidth",
        pair_bandwidth,
        pairs_near_median,
        "look at the cables, adapters and switch ports of the named nodes (`ibstat`, `ethtool`), or leave them out",
        together=True,
        needs=_BEFORE_TENSORS,
        seconds=50.0,
        stops_run=False,
    ),
)

"""Measurements as a machine with round figures would give them."""

from dataclasses import replace

from kumi.bench.measurements import Measurements, Timing, Transfer
from kumi.plan.time.collective_times import collective_seconds
from kumi.spec.cluster import ClusterSpec, Device, Link

CPU = Device("Testor 3000", "cpu", 8 * 2**30, ("float32", "bfloat16"))
GPU = Device(
    "Testor GPU",
    "cuda",
    80 * 2**30,
    ("float32", "bfloat16"),
    (("bfloat16", 1e15), ("float32", 6e13)),
    memory_bandwidth=3e12,
    watts=700.0,
)
LINK = Link("gloo", 4, 2e9, 3e-4, 1.0)


def measurements(*, processors: int = 0, speed: float = 1e11, memory: float = 2e10, transfers=()) -> Measurements:
    """Matmuls at `speed` FLOP/s (twice in bfloat16), layers at 0.8 and 0.4 of it, memory sweeps at `memory` bytes/s."""
    timings = [
        timing("launch", "float32", "one element", 1.0, 1 / 5e-6),
        timing("copy", "float32", "64 MiB", 1e8, memory / 2),
        timing("update", "float32", "4 Mi parameters", 1e8, memory),
    ]
    for dtype, gain in (("float32", 1), ("bfloat16", 2)):
        for form in ("forward", "backward input", "backward weight"):
            timings.append(timing("product", dtype, f"{form} 2048x2048x2048", 2.0 * 2048**3, speed * gain))
        timings.append(timing("product", dtype, "forward 999x999x999", 2.0 * 999**3, speed * gain / 2))
        timings.append(timing("product", dtype, "forward 64x64x64", 2.0 * 64**3, speed * gain / 10))
        timings.append(timing("linear", dtype, "1024x256x256", 6e8, 0.8 * speed * gain))
        timings.append(timing("linear", dtype, "1024x256x768", 6e8, 0.4 * speed * gain))
        timings.append(replace(timing("read", dtype, "32 weights, 8 rows", 1e8, memory / 4), rows=8))
        for kind in ("add", "gate", "norm", "rope", "logits"):
            timings.append(timing("element-wise", dtype, f"{kind} 2048x512", 1e7, memory * 0.4))
        for tokens, share in ((256, 0.5), (2048, 1.0)):
            for direction, rate in (("forward", speed * gain / 4), ("backward", speed * gain / 5)):
                what = f"{direction} 1x{tokens}, 4 heads of 128"
                timings.append(replace(timing("attention", dtype, what, 1e9, rate * share), tokens=tokens))
    return Measurements(tuple(timings), tuple(transfers), 300 * 2**20, processors, 1, "2.13.0")


def timing(kind: str, dtype: str, what: str, amount: float, rate: float) -> Timing:
    """Return a timing of `amount` FLOPs or bytes at `rate` per second."""
    return Timing(kind, dtype, what, amount, amount / rate)


def transfers(link: Link = LINK, device: Device = CPU) -> list[Transfer]:
    """Return collectives that take exactly the planned time over `link` between devices like `device`."""
    cluster = ClusterSpec("", device, link.span, links=(link,))
    return [
        Transfer(kind, degree, size, float(collective_seconds(cluster, kind, size, degree, 1)))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
        for degree in (2, 4)
        for size in (2**12, 2**16, 2**20, 2**24)
    ]

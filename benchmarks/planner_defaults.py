"""What is taken for granted where a published table is silent: one place, a reason each.

Tables are read from the top; the first entry whose words are in a run's text (source, model and notes, in lower case)
counts, of `TRAITS` the first that says something of a trait. Nothing here was fitted to a run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from planner_readings import Reading
from planner_rows import Run

from kumi.plan.engines import ENGINES
from kumi.spec.engine import Engine

# Who trained, by words of the text; the reason is the document that says so.
ENGINE_OF = (
    # BigScience's runs from 28 February 2022 on had the bfloat16 optimizer (the chronicles' "Rebalancing layers").
    (r"chronicles-prequel.*\(02-28\)", "megatron-deepspeed-bf16"),
    (r"megatron-deepspeed|bigscience|vtrain", "megatron-deepspeed"),
    (
        r"2104\.04473|jan ?2021|sep ?2020|cases_(april|jan)2021|mt-nlg|turing|2201\.11990|2205\.05198",
        "megatron-lm-2021",
    ),
    # Megatron-LM's Llama examples follow NeMo's recipes, as their README says.
    (r"megatron-bridge|dgxc-benchmarking|nemo|megatron-lm/examples/llama", "megatron-bridge"),
    (r"nanotron|ultra-scale|picotron", "nanotron"),
    (r"torchtitan.*2024(0\d|1[012])|2024-\d\d.*torchtitan", "torchtitan-2024"),
    (r"_202412_torchtitan|torchtitan of (2024|2025-0[1-3])", "torchtitan-2024"),
    (r"torchtitan", "torchtitan"),
    (r"llm-foundry|mosaicml", "llm-foundry"),
    (r"deepspeed|zero-infinity", "deepspeed"),
    (r"fsdp paper|2304\.11277|accelerate|transformers trainer|axolotl", "accelerate-fsdp"),
    (r"hagemann|2311\.05610", "scaling"),
    (r"megatron", "megatron-lm"),
)
# Whoever is not known trains with Megatron's habits where tensors or layers are divided, else with FSDP2's.
UNKNOWN_DIVIDED, UNKNOWN = "megatron-lm", "torchtitan"

# Words of the text that say more of the trainer than its name does.
TRAITS = (
    (r"kernel=torch", {"attention": "eager", "kernels": "eager"}),
    (r"kernel=fused", {"attention": "fused-softmax", "kernels": "eager"}),
    (r"flash_attentionv1", {"attention": "flash-1", "kernels": "eager"}),
    (r"rms kernel", {"attention": "flash", "kernels": "fused", "autograd": ("gate", "attention")}),
    (r"kernel=flash_attention2", {"attention": "flash", "kernels": "eager"}),
    (r"torch\.compile=n\b|compile=no\b", {"kernels": "eager"}),
    (r"async_tp=no\b", {"overlap_tp": False}),
    (r"async_tp=yes", {"overlap_tp": True}),
    (r"vanilla tp", {"overlap_tp": False}),
    (r"(?<!no )asynctp|(?<!no )async tp", {"overlap_tp": True}),
    (r"tp-comm-overlap", {"overlap_tp": True}),
    (r"alltoall dispatcher", {"tokens_once": False}),
    # An eighth of the logits at a time in float32, of all in bfloat16 with their gradient.
    (r"chunked cross entropy", {"logit_bytes": 5.0}),
    # MaxText and Paxml: XLA fuses, and gathers FSDP's parameters ahead. Paxml's GPT models have USE_FLASH_ATTENTION off
    # (paxml/contrib/gpu/scripts_gpu/configs.py).
    (r"paxml", {"kernels": "compiled", "overlap_tp": False, "dispatch": 1.0, "attention": "fused-softmax"}),
    (r"maxtext", {"kernels": "compiled", "overlap_tp": False, "dispatch": 1.0}),
)

# The campaign that measured a run, where that is not its set: by the set, its text and its GPU. A campaign is one
# group's runs of one trainer on one kind of machine: such runs share what the planner cannot know of them.
EXPERIMENT_OF = (
    # One grid and two scans of the playbook, on one cluster; the two parts of vTrain's ground truth.
    (r"^nano(-dp|-tp)?: ", "nanotron"),
    (r"^vtrain-[ms]: ", "vtrain"),
    # NVIDIA's tables: other trainers than Megatron's, and other machines.
    (r"^dgxc: .*(maxtext|paxml)", "dgxc-xla"),
    *((rf"^mbridge: .* {gpu}$", f"mbridge-{gpu}") for gpu in ("h100", "b200", "b300", "gb200", "gb300")),
    # torchtitan's documents, each by another group or on another machine.
    (r"^titan: .*asynctp", "titan-asynctp"),
    (r"^titan: .*_202412_", "titan-202412"),
    (r"^titan: .*whitefiber", "titan-h200"),
    (r"^titan: .*quantization/", "titan-blackwell"),
)

# Attention of runs that deny flash attention, where nothing else is said of their kernels.
NO_FLASH = "fused-softmax"

# How memory was read, by the trainer that printed it, where a table does not say: (tool, rank of the pipeline).
READING_OF = (
    # nanotron prints what rank 0 has in use, and what its allocator reserves (helpers.log_throughput, by rank 0 alone).
    # The playbook's figures are the latter: repeats of one program, without ZeRO and with gradient accumulation, differ
    # by more than 1 % in 31 of 39 groups without a pipeline, and in eight of 839 pairs more sequences need less
    # (tests/published/README.md).
    (r"nanotron|ultra-scale", ("reserved", 0)),
    # torchtitan prints max_reserved_gib of its DeviceMemoryMonitor (torchtitan/components/metrics.py).
    (r"torchtitan", ("reserved", None)),
)

# GPU, by words of its column -> the node preset it comes in, and the network where the row does not name one.
NODE_OF = (
    (r"gb300|288 ?g", "gb300-nvl72"),
    (r"gb200|sm100 \(184", "gb200-nvl72"),
    (r"b300", "b300"),
    (r"b200", "b200"),
    (r"gh200", "gh200"),
    (r"h200", "h200-sxm"),
    (r"h100.*(96|hbm2e)", "h100-96gb"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100|h800", "h100-sxm"),
    (r"a100.*40 ?gb|40 ?gb.*a100", "a100-sxm-40gb"),
    (r"a100.*pcie", "a100-pcie-80gb"),
    (r"a100|a800|^80gb", "a100-sxm-80gb"),
    (r"v100.*dgx-?2", "dgx-2"),
    (r"v100", "v100-32gb"),
    (r"mi300", "mi300x"),
    (r"l40s", "l40s"),
    (r"\bl4\b", "l4"),
    (r"4090", "rtx-4090"),
)

# Networks by words of the row's inter-node column and text, and of its GPU -> preset, for latency and efficiency.
NETWORK_OF = (
    (r"a100.*efa|efa.*a100|p4d", "efa-p4d"),
    (r"p5en", "efa-p5en"),
    (r"\befa\b|aws p5", "efa-p5"),
    (r"roce.*(a100|1600)", "roce-1600"),
    (r"roce.*800", "roce-800"),
    (r"\broce\b", "roce-3200"),
    # Jean Zay's A100 partition: four Omni-Path links of 100 Gb/s a node (BigScience's chronicles).
    (r"bigscience|omni-?path|jean zay", "opa-4"),
    (r"abci", "ib-hdr-4"),
    (r"\bxdr\b", "ib-xdr"),
    (r"\bndr\b|cx-?7", "ib-ndr"),
    (r"\bhdr\b", "ib-hdr"),
    (r"\bedr\b", "ib-edr-8"),
)

# Recomputation that the text speaks of. Where it says nothing, a run is taken to compute again no more than it must in
# order to fit (`planner_scores.complete`): the least of none, selective and full whose estimate its memory holds.
RECOMPUTE_OF = (
    (r"activation (re)?(checkpointing|computation)", "full"),
    # MT-NLG 530B checkpointed every layer (arXiv:2201.11990, section 3.2).
    (r"mt-nlg|2201\.11990", "full"),
    # The table's TFLOP/s are 8 operations for each parameter and token, not 6.
    (r"megatron-lm sep 2020", "full"),
    # nanotron recomputes only where it is told to.
    (r"nanotron|ultra-scale", "none"),
    # NVIDIA's recipes for Megatron keep all but a few cheap activations (Megatron-Bridge, scripts/performance/configs).
    (r"megatron-bridge|megatron-lm/examples/llama|dgxc(?!.*(maxtext|paxml))", "none"),
)

# Fine-tuning by words of the text: (rank, format of the frozen matrices) of LoRA where it is silent about the rank.
# "SFT" trains all parameters, as pre-training does.
LORA_RANK_OF = (
    # LoRA's defaults: Megatron-Bridge's and NeMo's dim = 32 (peft/lora.py), torchtune's and PEFT's r = 8.
    (r"megatron-bridge|nemo|dgxc", 32),
    (r"", 8),
)
# Adapters that are no pairs of matrices of low rank.
OTHER_ADAPTERS = r"\bpeft\b|adapters?\b|prefix.tuning|prompt.tuning|\bia3\b"

# Models cut to some of their layers: the number of those left, in words of the model's name or the notes.
CUT_LAYERS = (
    r"(?:cut|reduced|truncated|shortened) (?:down )?to (\d+) layers",
    r"\b(\d+) of (?:its |the )?\d+ layers",
    r"first (\d+) layers",
)

# Attention heads of models whose table leaves them out, by hidden size: SC'21 table 1 (arXiv:2104.04473), and
# BigScience's candidates of 14336 ("all NHEADS=64").
HEADS_OF = {
    2304: 24,
    3072: 32,
    4096: 32,
    6144: 48,
    8192: 64,
    10240: 80,
    12288: 96,
    14336: 64,
    16384: 128,
    20480: 128,
    25600: 160,
}

# Microbatches of SC'21's table 1 by hidden size, and virtual stages, from the paper's scripts (megatron.csv has them).
SC21_MICRO_BATCH = {2304: 16, 3072: 16, 4096: 16, 6144: 8, 8192: 4, 10240: 2, 12288: 2, 16384: 1, 20480: 1, 25600: 1}
SC21_STAGES = {10240: 3, 12288: 2, 16384: 2, 20480: 3}

# Sequences in a step of sources that leave the batch out: the playbook's grid has 1,048,576 tokens.
GLOBAL_BATCH_OF = ((r"ultra-scale", 256),)

# Vocabulary of GPT models whose table leaves it out: GPT-2's 50,257, padded to a multiple of 1,024.
GPT_VOCAB = 51200


@dataclass(frozen=True)
class Counted:
    """FLOPs that a table's TFLOP/s count: matmuls of forward and backward with the logits, `attention` as a share of
    all S x S pairs, and with `recomputed` a second forward pass of layers that recompute in full."""

    recomputed: bool = False
    attention: float = 1.0


# The FLOPs behind TFLOP/s, by source. Where a table also prints tokens or seconds, tests/published checks them against
# each other.
FLOPS_COUNTED = (
    # SC'21, equation 3, whose factor 96 has four forwards; BigScience's script and MT-NLG's figures are the same.
    (r"2104\.04473|jan ?2021|sep ?2020|cases_(april|jan)2021|bigscience|mt-nlg", Counted(recomputed=True)),
    # The FSDP paper's 186 TFLOP/s are "hardware" FLOP/s with activation checkpointing.
    (r"2304\.11277", Counted(recomputed=True)),
    # Megatron-Bridge counts the causal half of attention (training/utils/flop_utils.py), as Megatron-LM has since 2025.
    (r"megatron-bridge", Counted(attention=0.5)),
    # Megatron-LM until core_r0.12: num_floating_point_operations has all pairs, and no recomputation. So have NeMo's,
    # llm-foundry's and Hagemann's formulas (6 N + 12 L H Q T).
    (r"", Counted()),
)


def first(table, text: str):
    """The value of the first entry of `table` whose pattern is found in `text`; None where there is none."""
    return next((value for pattern, value in table if re.search(pattern, text)), None)


def reading_of(run: Run) -> Reading:
    """How the memory of a run was read: as its notes state, else as its trainer prints it."""
    tool, pp_rank = first(READING_OF, run.text) or ("", None)
    return Reading(run.reading or tool, pp_rank)


def engine_of(run: Run) -> Engine:
    """The traits of the trainer that a run says it used."""
    divided = (run.tp or 1) > 1 or (run.pp or 1) > 1
    name = first(ENGINE_OF, run.text) or (UNKNOWN_DIVIDED if divided else UNKNOWN)
    engine = ENGINES[name]
    if run.flash is False:
        engine = replace(engine, attention=NO_FLASH)
    for pattern, traits in reversed(TRAITS):
        if re.search(pattern, run.text):
            engine = replace(engine, **traits)
    return engine


def zero_of(run: Run, engine: Engine, dp: int, in_node: int) -> tuple[int, int] | None:
    """(ZeRO stage, how many ranks share), from the column; where that is blank, what the trainer does by itself.

    Of hybrid sharding, the number of ranks that share: "HSDP=8", or the second of "HSDP 4x8", replicas first. Without a
    number, the `in_node` data-parallel ranks of a node share and nodes are replicas, as PyTorch's HYBRID_SHARD does by
    default. Megatron-Core's recipes and "DDP" in NVIDIA's tables divide optimizer states (the distributed optimizer);
    Megatron before 2022, and Megatron-DeepSpeed without a word, do not.
    """
    sharding = run.sharding.lower()
    number = re.search(r"zero[- _]?(\d)", sharding)
    stage = int(number.group(1)) if number else 2 if re.search(r"shard_grad_op|zero2", sharding) else 3
    group = re.search(r"(?:fsdp|hsdp)[ =(]+(?:\d+ *[x,] *)?(\d+)", sharding)
    if group:
        return stage, int(group.group(1))
    if re.search(r"hsdp|hybrid", sharding):
        return stage, min(dp, in_node)
    if number or stage == 2:
        return stage, dp
    if "no_shard" in sharding:
        return 0, dp
    if "fsdp" in sharding or (not sharding and not engine.half_weights and engine.name != "kumi"):
        return 3, dp
    if sharding and sharding != "ddp":
        return None
    undivided = ("megatron-lm-2021", "megatron-deepspeed", "megatron-deepspeed-bf16", "nanotron")
    return (0, dp) if engine.name in undivided else (1, dp)

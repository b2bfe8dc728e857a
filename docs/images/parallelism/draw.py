"""Draw the pictures of docs/parallelism from the specs and the planner. Run it in the repository's root.

python docs/images/parallelism/draw.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kumi.config import job, load_plan
from kumi.plan.estimate import estimate
from kumi.plan.pipeline.timeline import simulate
from kumi.report import palette, phrases, svg
from kumi.report.quantities import memory_kinds
from kumi.spec import schedule
from kumi.spec.batch import BatchSpec
from kumi.spec.layout import Layout
from kumi.spec.ledger import layer_ops
from kumi.spec.process_groups import axis
from kumi.spec.sharding import shard_shape, tp_style
from kumi.units import format_bytes

HERE = Path(__file__).parent
# A colour for each of up to eight ranks or indices; all of them carry their number, too.
RANKS = (palette.SKY, palette.ORANGE, palette.GREEN, palette.PURPLE, palette.YELLOW, palette.BLUE, palette.RED,
         palette.GREY)  # fmt: skip
SMALL = 11.0
GIB = 2.0**30


def pictures() -> dict[str, str]:
    """Return every picture as an SVG document, by the name of its file."""
    return {"placement": placement(), "data": data(), "tensor": tensor(), "pipeline": pipeline(),
            "context": context(), "expert": expert(), "memory": memory()}  # fmt: skip


def _cell(x: float, y: float, width: float, height: float, index: int, text: str) -> list[str]:
    fill = RANKS[index % len(RANKS)]
    middle = y + height / 2 + SMALL / 3
    return [svg.rect(x, y, width, height, fill, apart=True),
            svg.text(x + width / 2, middle, text, anchor="middle", size=SMALL, fill=svg.contrasting(fill))]  # fmt: skip


def _strips(layout: Layout, names: Sequence[str], top: float, *, per_node: int) -> tuple[list[str], float]:
    """Draw a row for every axis, the coordinate of each rank in a column; also return the lower end of the rows."""
    left, row, world = 110.0, 24.0, layout.world_size
    width = (svg.RIGHT - left) / world
    marks = [svg.text(left - 8, top + 16, "rank", anchor="end", bold=True)]
    for rank in range(world):
        marks.append(svg.text(left + width * (rank + 0.5), top + 16, str(rank), anchor="middle", size=12, bold=True))
    for line, name in enumerate(names, start=1):
        y = top + row * line
        marks.append(svg.text(left - 8, y + 16, name, anchor="end"))
        for rank in range(world):
            index = axis(layout, name).index(rank)
            marks += _cell(left + width * rank, y, width - 1, row - 2, index, str(index))
    bottom = top + row * (len(names) + 1)
    for node in range(1, world // per_node):
        x = left + width * per_node * node - 0.5
        marks.append(svg.line(x, top, x, bottom, width=2.5))
    return marks, bottom


def placement() -> str:
    """Draw sixteen ranks on two nodes, and their coordinates."""
    layout = Layout(pp=2, dp_shard=2, cp=2, tp=2, zero=3)
    marks, bottom = _strips(layout, ("pp", "dp_shard", "cp", "tp"), 26, per_node=8)
    marks += [svg.text(110, 16, "node 0"), svg.text(svg.RIGHT, 16, "node 1", anchor="end")]
    alt = ("Sixteen ranks on two nodes of eight, and the coordinate of each on every axis. tp changes from one rank "
           "to the next, then cp, then dp_shard; pp changes between the nodes.")  # fmt: skip
    return svg.picture("placement", "Coordinates of ranks", alt, bottom + 10, marks)


def data() -> str:
    """Draw the states on four ranks, resident and transient, for each ZeRO stage."""
    kinds = [("parameters", palette.BLUE), ("gradients", palette.GREEN), ("optimizer states", palette.ORANGE)]
    transient = ("hatched: only during a step", palette.GREY, True)
    marks, top = svg.legend([*((name, fill, False) for name, fill in kinds), transient])
    left, gap, height = 96.0, 150.0, 66.0
    for zero in range(4):
        y = top + 14 + zero * (height + 18)
        marks.append(svg.text(left - 14, y + height / 2 + 5, f"zero = {zero}", anchor="end", bold=True))
        for rank in range(4):
            marks += _rank_states(left + gap * rank, y, height, rank, zero, [fill for _, fill in kinds])
    bottom = top + 14 + 4 * (height + 18)
    for rank in range(4):
        marks.append(svg.text(left + gap * rank + 60, bottom + 4, f"rank {rank}", anchor="middle"))
    alt = ("Four data-parallel ranks, each with three columns for parameters, gradients and optimizer states. With "
           "zero = 0 all are full on every rank. With zero = 1 to 3 each rank keeps a quarter of each; during a step "
           "zero = 1 has all parameters and gradients unsharded, zero = 2 all parameters and the gradients of a unit, "
           "zero = 3 the parameters and the gradients of a unit.")  # fmt: skip
    return svg.picture("data", "States of data-parallel ranks", alt, bottom + 16, marks)


def _rank_states(x: float, y: float, height: float, rank: int, zero: int, fills: Sequence[str]) -> list[str]:
    """Draw three columns: resident states filled, transient ones hatched."""
    transient = {0: (0, 0, 0), 1: (1, 1, 0), 2: (1, 0.16, 0), 3: (0.16, 0.16, 0)}[zero]
    marks = []
    for number, (fill, share) in enumerate(zip(fills, transient, strict=True)):
        at = x + 40 * number
        marks.append(svg.rect(at, y, 34, height, "#eeeeee"))
        # A transient unit is drawn next to the rank's own shard, not under it.
        from_top = rank == 3 and share < 1
        transient_at = y if from_top else y + height * (1 - share)
        marks.append(svg.rect(at, transient_at, 34, height * share, fill, hatched=True))
        part = height if zero == 0 else height / 4
        marks.append(svg.rect(at, y if zero == 0 else y + rank * part, 34, part, fill, apart=True))
    return marks


def tensor() -> str:
    """Draw the matrices of a layer of Llama 3 8B, to scale, sharded over two ranks."""
    model = job(load_plan("examples/plan/llama-3-8b.toml")).model
    matrices = [op for op in layer_ops(model, 0) if op.kind == "linear"]
    scale, x, top, marks = 44 / 4096, 14.0, 42.0, []
    for op in matrices:
        (param,) = op.params
        rows, columns = (dim.size for dim in param.dims)
        width, height = scale * columns, scale * rows
        marks += _cut_matrix(x, top, width, height, tp_style(op))
        name = op.name.rpartition(".")[2]
        marks.append(svg.text(x, top - 22, name, size=12, bold=True))
        local = " x ".join(str(size) for size in shard_shape(param, 2, 1, 1))
        marks.append(svg.text(x, top - 7, local, size=10))
        x += max(width, 76.0) + 14
    bottom = top + scale * 14336 + 26
    marks += _blocks(bottom)
    alt = ("The seven matrices of a layer, stored as outputs by inputs. Those of queries, keys, values, gate and up "
           "are sharded by rows, their outputs; o_proj and down_proj by columns, their inputs. Below, one layer "
           "in time: tokens are gathered before the attention and before the feed-forward, and reduce-scattered "
           "after each; in between every rank has half of the tokens.")  # fmt: skip
    return svg.picture("tensor", "Shards of tensor parallelism", alt, bottom + 84, marks)


def _cut_matrix(x: float, y: float, width: float, height: float, how: str) -> list[str]:
    if how == "row":
        half = width / 2
        return [*_cell(x, y, half, height, 0, "0"), *_cell(x + half, y, half, height, 1, "1")]
    half = height / 2
    labels = ("0", "1") if half > SMALL else ("", "")
    return [*_cell(x, y, width, half, 0, labels[0]), *_cell(x, y + half, width, half, 1, labels[1])]


def _blocks(top: float) -> list[str]:
    """Draw a layer from left to right: each rank has half of the tokens, and all of them inside of the blocks."""
    parts = [("norm", False), ("attention: half of the heads", True), ("add, norm", False),
             ("feed-forward: half of the width", True), ("add", False)]  # fmt: skip
    marks, x = [], 14.0
    for text, inside in parts:
        width = 196.0 if inside else 86.0
        for rank in range(2):
            y = top + 28 * rank
            marks.append(svg.rect(x, y, width, 24, RANKS[rank], hatched=inside))
            label = text if inside else f"{text}: 1/2"
            marks.append(svg.text(x + width / 2, y + 16, label, anchor="middle", size=SMALL, fill="#000000"))
        x += width + 12
    marks.append(svg.text(14, top + 74, "1/2: of the tokens, under sequence_parallel; hatched: all tokens, gathered "
                          "before and reduce-scattered after", size=12))  # fmt: skip
    return marks


PIPELINES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe", 2))


def pipeline() -> str:
    """Draw four ranks and eight microbatches under six schedules, all to the same scale."""
    pp, microbatches, lane, left = 4, 8, 17.0, 60.0
    names = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
    marks, y = svg.legend([(name, palette.ACTION_COLOURS[kind], kind == "W") for kind, name in names.items()])
    runs = [(name, stages, simulate(schedule.actions(name, pp, stages, microbatches),
                                    schedule.stage_assignment(name, pp, stages), [(1 / stages,) * 3] * (pp * stages)))
            for name, stages in PIPELINES]  # fmt: skip
    scale = (svg.RIGHT - left) / max(run.seconds for _, _, run in runs)
    for name, stages, run in runs:
        idle = phrases.percent(sum(run.idle) / pp / run.seconds)
        several = f", {stages} stages a rank" if stages > 1 else ""
        marks.append(svg.text(14, y + 24, f"{name}{several}: ranks wait {idle} of the time", bold=True))
        y += 32
        for rank, spans in enumerate(run.spans):
            marks.append(svg.text(left - 8, y + 12, f"rank {rank}", anchor="end", size=12))
            for span in spans:
                x, width = left + scale * span.start, scale * (span.end - span.start)
                fill = palette.ACTION_COLOURS[span.action.kind]
                marks.append(svg.rect(x, y, width, lane - 2, fill, hatched=span.action.kind == "W", apart=True))
                if span.action.stage >= pp:
                    marks.append(svg.rect(x, y + lane - 4, width, 2, svg.INK))
                if width > 9 and span.action.kind != "W":
                    label = str(span.action.microbatch)
                    marks.append(
                        svg.text(x + width / 2, y + 11, label, anchor="middle", size=9, fill=svg.contrasting(fill))
                    )
            y += lane
    marks.append(svg.text(14, y + 20, "A number is a microbatch; underlined: a rank's second stage.", size=12))
    marks.append(svg.text(14, y + 36, "A forward, a gradient of inputs and one of weights take equally long.", size=12))
    alt = "; ".join(f"{name}: ranks wait {phrases.percent(sum(run.idle) / pp / run.seconds)}" for name, _, run in runs)
    return svg.picture("pipeline", "Six schedules of four ranks and eight microbatches", alt, y + 46, marks)


def context() -> str:
    """Draw the ranks' parts of causal attention, in two chunks a rank and in one."""
    cp, size, top, marks = 4, 26.0, 46.0, []
    cuts = [("2 x cp chunks, an early and a late one", [min(piece, 2 * cp - 1 - piece) for piece in range(2 * cp)]),
            ("cp chunks, one after another", [piece // 2 for piece in range(2 * cp)])]  # fmt: skip
    for number, (title, owner) in enumerate(cuts):
        left = 14.0 + 360 * number
        marks.append(svg.text(left, 18, title, bold=True))
        marks.append(svg.text(left, 36, "queries down, keys across; a number is a rank", size=12))
        for query in range(2 * cp):
            for key in range(query + 1):
                rank = owner[query]
                x, y = left + size * key, top + size * query
                if key == query:
                    corners = [(x, y), (x, y + size), (x + size, y + size)]
                    marks.append(svg.shape(corners, fill=RANKS[rank]))
                else:
                    marks += _cell(x, y, size, size, rank, str(rank))
        marks += _work(left + size * 2 * cp + 10, top, owner, cp)
    bottom = top + size * 2 * cp
    alt = ("The triangle of causal attention, queries down and keys across, in eight by eight chunks. On the left "
           "each of four ranks has one chunk of queries from the beginning and one from the end, and all compute "
           "equally much. On the right each has two neighbouring chunks, and the last rank computes seven times as "
           "much as the first.")  # fmt: skip
    return svg.picture("context", "Causal attention on four ranks", alt, bottom + 12, marks)


def _work(left: float, top: float, owner: Sequence[int], cp: int) -> list[str]:
    """Draw bars of the pairs that each rank computes."""
    work = [sum(piece + 0.5 for piece, rank in enumerate(owner) if rank == one) for one in range(cp)]
    marks = [svg.text(left, top + 10, "chunks to compute", size=12)]
    for rank, pieces in enumerate(work):
        y = top + 20 + 26 * rank
        marks.append(svg.rect(left, y, 5 * pieces, 18, RANKS[rank], apart=True))
        marks.append(svg.text(left + 5 * pieces + 5, y + 13, f"{pieces:g}", size=12))
    return marks


def expert() -> str:
    """Draw the two arrangements of eight ranks."""
    layout = Layout(dp_shard=2, tp=4, ep=2, expert_tp=2, zero=3)
    marks = [svg.text(14, 18, "attention, norms, embedding, head: everything except routed experts")]
    first, middle = _strips(layout, ("dp_shard", "tp"), 26, per_node=8)
    marks += [*first, svg.text(14, middle + 30, "routed experts, on the same ranks")]
    second, bottom = _strips(layout, ("expert_dp", "ep", "expert_tp"), middle + 38, per_node=8)
    alt = ("Eight ranks arranged twice: by dp_shard and tp for dense weights, and by expert_dp, ep and expert_tp "
           "for routed experts. expert_tp changes from one rank to the next.")  # fmt: skip
    return svg.picture("expert", "One set of ranks, two arrangements", alt, bottom + 10, [*marks, *second])


def memory() -> str:
    """Draw the memory of a rank by kind under the techniques, for Llama 3 8B on eight devices."""
    example = replace(
        job(load_plan("examples/plan/llama-3-8b.toml", ["cluster.nodes=1"])), batch=BatchSpec(8192, 2**18)
    )
    base = Layout(dp_shard=8, zero=3)
    rows = [("nothing", base), ("selective", replace(base, recompute="selective")),
            ("full, in 16 layers", replace(base, recompute="full", recompute_layers=16)),
            ("full", replace(base, recompute="full")),
            ("full, optimizer offloaded", replace(base, recompute="full", offload="optimizer")),
            ("full, states offloaded", replace(base, recompute="full", offload="states"))]  # fmt: skip
    estimates = [(name, estimate(example, layout).memory[0]) for name, layout in rows]
    kinds = [kind for kind in phrases.MEMORY if any(getattr(one, kind) for _, one in estimates)]
    marks, top = svg.legend(
        [(phrases.MEMORY[kind], palette.MEMORY_COLOURS[kind], kind in palette.HATCHED) for kind in kinds]
    )
    left = 14 + max(svg.width_of(name) for name, _ in estimates)
    scale = (svg.RIGHT - left - 80) / max(one.total for _, one in estimates)
    for row, (name, estimated) in enumerate(estimates):
        y, x = top + 12 + 28 * row, left
        marks.append(svg.text(left - 8, y + 14, name, anchor="end"))
        for kind, size in memory_kinds(estimated):
            fill = palette.MEMORY_COLOURS[kind]
            marks.append(svg.rect(x, y, scale * size, 18, fill, hatched=kind in palette.HATCHED, apart=True))
            x += scale * size
        marks.append(svg.text(x + 6, y + 14, format_bytes(estimated.total), bold=True))
    alt = "; ".join(f"{name}: {format_bytes(one.total)}" for name, one in estimates)
    return svg.picture("memory", "Memory of a rank by technique", alt, top + 20 + 28 * len(estimates), marks)


if __name__ == "__main__":
    for name, drawn in pictures().items():
        (HERE / f"{name}.svg").write_text(drawn + "\n", encoding="utf-8")

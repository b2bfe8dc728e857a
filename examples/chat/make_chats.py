"""Make chats.jsonl, 200 short conversations about training on many GPUs, and a tokenizer for them, tokenizer.json; and
pairs.jsonl, 120 questions about the same with a right and a wrong or rambling answer.

    python examples/chat/make_chats.py [FOLDER]

Every figure in an answer is computed here. A quarter of the conversations call a tool, a quarter have thoughts. The
files are the same at every run.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
SIZES = (0.5, 0.6, 1, 1.7, 3, 4, 7, 8, 13, 14, 30, 32, 70, 72, 123, 235, 405)

FACTS = {
    "What does data parallelism do?": (
        "Every GPU has a copy of the model and works on its own sequences. After the backward pass the gradients "
        "are averaged, so all copies stay equal."
    ),
    "What does ZeRO-1 split?": (
        "Only the states of the optimizer. Each rank updates its part of the parameters, and an all-gather gives "
        "everyone the new values."
    ),
    "How is ZeRO-2 different from ZeRO-1?": (
        "It also splits the gradients: a reduce-scatter leaves each rank the sum of the part that it updates."
    ),
    "And ZeRO-3, what is that?": (
        "It splits parameters, gradients and optimizer states. A layer's parameters are gathered shortly before "
        "they are used and freed afterwards."
    ),
    "What is tensor parallelism?": (
        "The matrices of a layer are split over several GPUs, and each computes a part of the result. It needs "
        "fast links, because it communicates in every layer."
    ),
    "Why is pipeline parallelism used?": (
        "The layers are split into stages on different GPUs. Only activations travel between stages, so slow links "
        "are enough."
    ),
    "What is the bubble of a pipeline?": (
        "The time in which a stage waits because it has no microbatch to work on. More microbatches per step make "
        "its share smaller."
    ),
    "What is a microbatch?": (
        "The sequences of one forward and backward pass. The gradients of several microbatches are added before "
        "one update."
    ),
    "When is context parallelism needed?": (
        "When one sequence is too long for the memory of a GPU. Its tokens are split, and the keys and values "
        "travel around in a ring."
    ),
    "What does expert parallelism mean?": (
        "The experts of a mixture of experts live on different GPUs. An all-to-all sends each token to the GPUs of "
        "its experts and brings the results back."
    ),
    "Why are activations recomputed?": (
        "To save memory. The forward pass of a layer is repeated during the backward pass instead of keeping all "
        "of its intermediate results."
    ),
    "What is gradient clipping?": (
        "If the norm of all gradients is above a limit, they are scaled down to the limit. It keeps one bad batch "
        "from spoiling the weights."
    ),
    "Why is a learning rate warmed up?": (
        "Adam's statistics are unreliable in the first steps. A small rate at the start avoids large steps in "
        "wrong directions."
    ),
    "What is LoRA?": (
        "Small matrices of low rank are trained beside frozen weights. It needs little memory, because gradients "
        "and optimizer states exist for the small matrices only."
    ),
    "What does an all-reduce do?": ("It adds the tensors of all ranks and gives every rank the sum."),
    "What is a loss mask?": (
        "It says which tokens are learnt. In a conversation these are the tokens of the assistant, with the token "
        "that ends each reply."
    ),
    "Why is packing useful?": (
        "Short conversations share one row, so little of the row is padding. Attention must not cross from one "
        "conversation to the next."
    ),
    "What is model FLOPs utilisation?": (
        "The FLOPs that the model needs, divided by the time and by the peak of the GPU. Recomputed work does not "
        "count."
    ),
    "What happens if one GPU fails?": (
        "The step cannot finish, and the run continues from its last checkpoint. Frequent checkpoints lose little work."
    ),
    "Is a larger batch always better?": (
        "No. Beyond some size, more sequences a step no longer make the gradient better, and the same tokens give "
        "fewer updates."
    ),
    "Why keep master weights in fp32?": (
        "An update is often smaller than the spacing of bf16 numbers. It would be rounded away without a more "
        "precise copy."
    ),
    "What is a KV cache?": (
        "The keys and values of earlier tokens. With them, each new token needs one pass over itself only."
    ),
    "What is a tokenizer?": (
        "It splits text into pieces of a fixed vocabulary and numbers them. The model sees only these numbers."
    ),
    "What does DPO train on?": (
        "On pairs of replies to the same prompt, one preferred over the other. It raises the odds of the preferred "
        "one, relative to a reference model."
    ),
    "What is a reward model?": (
        "A model that gives a reply one number. It learns from pairs which of two replies people prefer."
    ),
}
FOLLOW_UPS: dict[str, Callable[[str], str]] = {
    "Can you say that in one sentence?": lambda answer: answer.split(". ")[0].rstrip(".") + ".",
    "How many words was your answer?": lambda answer: f"It had {len(answer.split())} words.",
    "Thanks!": lambda answer: "You are welcome.",
}
RAMBLINGS = (
    "That is a very good question, and I am glad that you ask it.",
    "There are many opinions about this, and each of them has its reasons.",
    "Before I answer, let me say that training is a wide field.",
    "I could write a whole book about it.",
    "As a helpful assistant, I always do my best to answer.",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You answer questions about training large language models.",
    "Answer briefly and with figures.",
)
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 7e9 * 2 / 1e9"}},
            "required": ["expression"],
        },
    },
}


def number(value: float) -> str:
    """Return `value` as text, with one digit after the point unless that is 0."""
    return f"{value:,.1f}".rstrip("0").rstrip(".")


def fact(rng: random.Random) -> dict[str, Any]:
    """Return a question and its answer, with a system message or a second turn in some."""
    question = rng.choice(list(FACTS))
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": FACTS[question]}]
    if rng.random() < 0.4:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    if rng.random() < 0.6:
        more = rng.choice(list(FOLLOW_UPS))
        messages.append({"role": "user", "content": more})
        messages.append({"role": "assistant", "content": FOLLOW_UPS[more](FACTS[question])})
    return {"messages": messages}


def memory(rng: random.Random) -> dict[str, Any]:
    """Return two or three questions about the memory of a model."""
    size, dtype, ranks = rng.choice(SIZES), rng.choice(list(BYTES)), rng.choice((2, 4, 8, 16, 64))
    weights, states = size * BYTES[dtype], size * 16
    messages = [
        {"role": "user", "content": f"How much memory do the weights of a {size}B model take in {dtype}?"},
        {"role": "assistant", "content": f"{number(weights)} GB: {BYTES[dtype]} bytes for each parameter."},
        {"role": "user", "content": "And to train it with Adam in mixed precision?"},
        {
            "role": "assistant",
            "content": f"About {number(states)} GB without activations: 16 bytes for each parameter, for bf16 weights "
            "and gradients, fp32 master weights and two fp32 moments.",
        },
    ]
    if rng.random() < 0.6:
        messages += [
            {"role": "user", "content": f"If I split all of that over {ranks} GPUs?"},
            {"role": "assistant", "content": f"Then it is {number(states / ranks)} GB for each of the {ranks} GPUs."},
        ]
    return {"messages": messages}


def tool_call(rng: random.Random) -> dict[str, Any]:
    """Return a question that the assistant answers with the calculator."""
    size, tokens, gpus = rng.choice(SIZES), rng.choice((1, 2, 10, 100, 1000, 15000)), rng.choice((8, 64, 512, 4096))
    flops = 6 * size * 1e9 * tokens * 1e9
    days = flops / (gpus * 400e12) / 86400
    expression = f"6 * {size}e9 * {tokens}e9 / ({gpus} * 400e12) / 86400"
    call = {
        "id": f"call{rng.randrange(10**6):06d}",
        "type": "function",
        "function": {"name": "calculate", "arguments": {"expression": expression}},
    }
    unit, count = ("days", days) if days >= 1 else ("hours", 24 * days)
    result = f"{days:.4g}"
    return {
        "messages": [
            {
                "role": "user",
                "content": f"How long do {gpus} GPUs train a {size}B model on {tokens}B tokens, at 400 TFLOP/s each?",
            },
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculate", "tool_call_id": call["id"], "content": result},
            {
                "role": "assistant",
                "content": f"About {number(count)} {unit}: training needs 6 FLOPs for each parameter and token.",
            },
        ],
        "tools": [CALCULATOR],
    }


def thought(rng: random.Random) -> dict[str, Any]:
    """Return a question whose answer has thoughts before it."""
    rows, ranks = rng.choice((64, 128, 256, 512, 1024)), rng.choice((4, 8, 16, 32))
    micro = rng.choice((1, 2, 4))
    steps = rows // (ranks * micro)
    if steps == 0 or rows % (ranks * micro):
        answer = f"It is not possible: {rows} sequences cannot be split into groups of {ranks * micro}."
        reason = (
            f"Each pass of all ranks takes {ranks} x {micro} = {ranks * micro} sequences. {rows} is not a multiple."
        )
    else:
        answer = f"{steps}."
        reason = (
            f"Each pass of all ranks takes {ranks} x {micro} = {ranks * micro} sequences. "
            f"{rows} / {ranks * micro} = {steps}."
        )
    question = (
        f"A step has {rows} sequences, there are {ranks} data-parallel ranks and a microbatch is {micro}. How many "
        "microbatches does each rank run?"
    )
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "reasoning_content": reason, "content": answer},
    ]
    if rng.random() < 0.3:
        messages += [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "reasoning_content": "I explain the division.", "content": reason},
        ]
    return {"messages": messages}


def chats(count: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    """Return `count` conversations, a quarter of each kind, shuffled."""
    rng = random.Random(seed)
    rows = [make(rng) for make in (fact, memory, tool_call, thought) for _ in range(count // 4)]
    rng.shuffle(rows)
    return rows


def figure_pair(rng: random.Random) -> dict[str, Any]:
    """Return a question about memory, its answer, and one that forgets the bytes of a number."""
    size, dtype = rng.choice(SIZES), rng.choice([name for name in BYTES if BYTES[name] > 1])
    return pair(
        rng.choice(("How much memory do", "How many GB do")) + f" the weights of a {size}B model take in {dtype}?",
        f"{number(size * BYTES[dtype])} GB: {BYTES[dtype]} bytes for each parameter.",
        f"{number(size)} GB: 1 byte for each parameter.",
    )


def other_answer_pair(rng: random.Random) -> dict[str, Any]:
    """Return a question, its answer, and the answer to another question."""
    question, other = rng.sample(list(FACTS), 2)
    return pair(question, FACTS[question], FACTS[other])


def rambling_pair(rng: random.Random) -> dict[str, Any]:
    """Return a question, its answer, and the same after talk that nobody asked for."""
    question = rng.choice(list(FACTS))
    return pair(question, FACTS[question], " ".join((*rng.sample(RAMBLINGS, 2), FACTS[question])))


def pair(question: str, chosen: str, rejected: str) -> dict[str, Any]:
    """Return the row of a preference pair, with prompt and replies as messages."""
    prompt = [{"role": "user", "content": question}]
    sides = {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt} | {side: [{"role": "assistant", "content": answer}] for side, answer in sides.items()}


def pairs(count: int = 120, seed: int = 0) -> list[dict[str, Any]]:
    """Return `count` preference pairs, all different, a third of each kind, shuffled."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    for number_of_kind, make in enumerate((figure_pair, other_answer_pair, rambling_pair), start=1):
        while len(rows) < number_of_kind * count // 3:
            row = make(rng)
            rows[json.dumps(row)] = row
    shuffled = list(rows.values())
    rng.shuffle(shuffled)
    return shuffled


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows` as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer of 1,024 ids on the conversations, with the control tokens of the template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024 - len(marks),
        special_tokens=control,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [json.dumps(row, ensure_ascii=False) for row in chats()]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    write_rows(folder / "chats.jsonl", chats())
    write_rows(folder / "pairs.jsonl", pairs())
    write_tokenizer(folder)

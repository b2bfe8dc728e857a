"""Read the script arguments in the launch commands of DeepSpeed and accelerate with transformers' TrainingArguments."""

from launched import launched, main


def read(folder):
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.optimization import get_scheduler

    script = next(path for path in (folder / "deepspeed.sh", folder / "accelerate_fsdp.sh") if path.exists())
    words = launched(script)["arguments"]
    words = words[words.index("--output_dir") :]
    words[words.index("--bf16") + 1] = words[words.index("--fp16") + 1] = "false"  # no device here computes in them
    (args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses([*words, "--use_cpu", "true"])
    import torch

    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=args.learning_rate)
    schedule = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        int(args.warmup_steps),
        args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    rates = []
    for _ in range(args.max_steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return {
        "microbatch": args.per_device_train_batch_size,
        "microbatches": args.gradient_accumulation_steps,
        "recompute": bool(args.gradient_checkpointing),
        "optimizer": args.optim.value,
        "betas": [args.adam_beta1, args.adam_beta2],
        "steps": args.max_steps,
        "last_rate": rates[-1],
        "top_rate": max(rates),
    }


if __name__ == "__main__":
    main(read, ["accelerate", "transformers"])

"""Plan, train and use a model from Python. Run it in a folder with a run file, such as the one `kumi init` writes."""

from typing import Any

import torch

import kumi


class StopWhenGood(kumi.TrainerCallback):
    """Ends the run once the validation loss is below `threshold` nats a token."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        control.should_training_stop = metrics["eval/loss"] < self.threshold


report = kumi.plan_run("run.toml")
print(report.best.layout, f"{report.best.step_seconds:.3g} s a step, {report.best.peak_memory / 2**30:.3g} GiB")

result = kumi.train_run("run.toml", {"log.every": 2}, callbacks=[StopWhenGood(1.0)])
print(result.global_step, result.training_loss, result.metrics["eval/loss"], result.model_dir)

decoder = kumi.load_decoder(result.model_dir or result.output_dir)  # a Hugging Face folder, or the last checkpoint
tokenizer = kumi.tokenizer(result.output_dir)
ids = torch.tensor([tokenizer.encode("the model learns")])
print(decoder(ids).shape)  # (1, tokens, vocabulary)

"""Training steps, by transformers' Trainer: its optimizer, schedule, accumulation, checkpoints."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from kvsearch.errors import KvsearchError, OutOfMemory, RunError
from kvsearch.models.read import muted
from kvsearch.train.recipe import Recipe
from kvsearch.train.scheduled import IGNORED, Scheduled
from kvsearch.train.work import Checkpoint, Work, saving

SAVE_SECONDS = 600.0  # at most, between checkpoints
MANY = 1 << 30  # steps where only minutes are a limit

Told = Callable[[int, float, float], None]


@dataclass(frozen=True)
class Trained:
    """What training did.

    Attributes:
        steps: optimizer steps.
        seconds: of training, those before an interruption included.
        losses: of every step: `step`, `loss` in nats per token before it, `grad_norm`,
            `learning_rate`.
    """

    steps: int
    seconds: float
    losses: list[dict[str, float]]


def fit(
    model: Any,
    under: Scheduled,
    examples: list[dict[str, Tensor]],
    recipe: Recipe,
    work: Work,
    *,
    bf16: bool = False,
    told: Told | None = None,
) -> Trained:
    """Train `model`, from the last whole checkpoint on.

    Args:
        model: with gradients for what is trained, see `lora.opened`; changed in place.
        under: the policy's loss.
        examples: of the text.
        recipe: how.
        work: holds checkpoints.
        bf16: compute in bfloat16, on weights in float32.
        told: called after every step with its number, its loss and the seconds so far.

    Raises:
        KvsearchError: a loss is not finite.
        RunError: the checkpoint is damaged, or none can be written.
        OutOfMemory: the device has no room for activations and the optimizer.
    """
    start = work.last()
    watch = _Watch(recipe, work, start, told)
    device = under.loaded.device
    alone = under.policy.anchors is not None  # their sequences differ from text to text
    with muted():
        trainer = _Trainer(
            under,
            model=model,
            args=TrainingArguments(
                output_dir=str(work.checkpoints),
                max_steps=MANY if recipe.most is None else recipe.most,
                per_device_train_batch_size=1 if alone else recipe.batch,
                gradient_accumulation_steps=recipe.accumulate * (recipe.batch if alone else 1),
                learning_rate=recipe.rate,
                warmup_steps=recipe.warmup,
                lr_scheduler_type="constant_with_warmup",
                optim="adamw_torch",
                adam_beta2=0.95,
                logging_steps=1,
                logging_nan_inf_filter=False,
                save_steps=recipe.save_every,
                save_total_limit=2,
                seed=recipe.seed,
                bf16=bf16,
                use_cpu=device == "cpu",
                disable_tqdm=True,
                report_to="none",
                remove_unused_columns=False,
                dataloader_pin_memory=device != "cpu",
            ),
            train_dataset=examples,
            data_collator=_collate,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train(resume_from_checkpoint=None if start is None else str(start.path))
        except _OverAlready:
            pass
        except torch.OutOfMemoryError as e:
            raise OutOfMemory(
                "out of memory while training; lower --context or --batch, or use --lora"
            ) from e
        except KvsearchError:
            raise
        except Exception as e:
            if start is None or watch.stepping:
                raise
            raise RunError(
                f"{start.path} is damaged ({' '.join(str(e).split())[:100]}); remove it and run "
                "the same command again"
            ) from e
        if bf16:
            trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    names = ("step", "loss", "grad_norm", "learning_rate")
    losses = [{k: x[k] for k in names} for x in trainer.state.log_history if "loss" in x]
    return Trained(trainer.state.global_step, watch.seconds, losses)


class _Trainer(Trainer):
    """Losses are `Scheduled`'s, summed over a step's tokens and divided by their number."""

    def __init__(self, under: Scheduled, **more: Any) -> None:
        self.under = under
        cached = more["model"].config.use_cache
        super().__init__(**more)
        more["model"].config.use_cache = cached  # goes into the checkpoint
        self.args._n_gpu = min(1, self.args.n_gpu)
        self.model_accepts_loss_kwargs = True  # gives the number of tokens
        self.loss_is_scaled_for_ga = True

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Of one forward pass, as its share of the step's mean."""
        return self.under.loss(model, inputs) / num_items_in_batch

    def _save_checkpoint(self, *args: Any, **more: Any) -> None:
        with saving(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **more)


class _OverAlready(Exception):
    """The checkpoint is the last one; its weights have been loaded."""


class _Watch(TrainerCallback):
    """Time, progress, and the mark of a whole checkpoint.

    Attributes:
        stepping: whether the checkpoint was read and the first step has begun.
    """

    def __init__(
        self, recipe: Recipe, work: Work, start: Checkpoint | None, told: Told | None
    ) -> None:
        self._recipe, self._work, self._told, self._start = recipe, work, told, start
        self._before = 0.0 if start is None else start.seconds
        self._began = self._saved = time.monotonic()
        self.stepping = False

    @property
    def seconds(self) -> float:
        """Of training so far."""
        return self._before + time.monotonic() - self._began

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = self._saved = time.monotonic()
        if self._start is not None and self._recipe.over(self._start.step, self._start.seconds):
            raise _OverAlready

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stepping = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        late = time.monotonic() - self._saved >= SAVE_SECONDS
        over = self._recipe.over(state.global_step, self.seconds)
        control.should_training_stop |= over
        control.should_save |= over or late

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise KvsearchError(
                f"the loss of step {state.global_step} is not finite; lower --lr or raise --warmup"
            )
        if self._told is not None:
            self._told(state.global_step, loss, self.seconds)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._work.mark(state.global_step, self.seconds)
        self._saved = time.monotonic()


def _collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack examples; shorter ones are filled up behind, where nothing before sees it."""
    longest = max(len(x["input_ids"]) for x in examples)
    fill = dict(input_ids=0, labels=IGNORED)
    batch = {
        name: torch.stack([
            torch.nn.functional.pad(x[name], (0, longest - len(x[name])), value=value)
            for x in examples
        ])
        for name, value in fill.items()
    }  # fmt: skip
    return {**batch, "prompt": torch.stack([x["prompt"] for x in examples])}

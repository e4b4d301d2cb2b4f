"""How a model is trained: what of it, how long, and in which steps."""

from dataclasses import dataclass
from importlib.util import find_spec

from kvsearch.errors import KvsearchError

STEPS = 200  # where neither steps nor minutes are given
LORA_LR, FULL_LR = 1e-4, 2e-5  # LLM-Pruner's public recipe, and AnLLM's


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training. Adam has AnLLM's betas 0.9 and 0.95, and no weight decay.

    Attributes:
        lora: rank of low-rank additions, which are merged in the end (arXiv:2106.09685) with twice
            the rank as alpha; None trains all weights.
        lr: learning rate after the warm-up, constant from then on; None is that of the papers.
        warmup: steps over which it rises from 0.
        steps: optimizer steps, at most; None is as many as the minutes allow.
        minutes: of training, at most, those before an interruption included.
        batch: windows per forward pass.
        accumulate: forward passes per step.
        save_every: steps between checkpoints; there is one every ten minutes in any case.
        seed: of the order of windows and of the additions.
    """

    lora: int | None = None
    lr: float | None = None
    warmup: int = 20
    steps: int | None = None
    minutes: float | None = None
    batch: int = 1
    accumulate: int = 8
    save_every: int = 50
    seed: int = 0

    def require_package(self) -> None:
        """Raise a `KvsearchError` where LoRA has no package."""
        if self.lora is not None and find_spec("peft") is None:
            raise KvsearchError(
                "LoRA needs peft: pip install 'kvsearch[train]'; --no-lora trains all weights"
            )

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.lr or (FULL_LR if self.lora is None else LORA_LR)

    @property
    def most(self) -> int | None:
        """Steps at most, or None where only minutes are a limit."""
        return STEPS if self.steps is None and self.minutes is None else self.steps

    def over(self, step: int, seconds: float) -> bool:
        """Whether training is over after so many steps and seconds."""
        late = self.minutes is not None and seconds >= 60 * self.minutes
        return late or (self.most is not None and step >= self.most)

    def words(self) -> str:
        """What is trained."""
        return "all weights" if self.lora is None else f"LoRA of rank {self.lora}"

"""Evaluating on a language model: what a slot loads, and what it does with a job.

Separate from `worker`, so that a driver whose evaluators are elsewhere need not import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsearch.errors import lacks_memory
from kvsearch.evaluation.answers import answers, fits
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.evaluation.part import losses
from kvsearch.models.load import load_model
from kvsearch.policy import Policy
from kvsearch.policy_search.worker import Job, Unusable
from kvsearch.results.measurement import Measurement
from kvsearch.workloads.items import Prompts
from kvsearch.workloads.measured_parts import Part


@dataclass(frozen=True, eq=False)
class ModelWork:
    """Evaluates on a language model that each slot loads for itself.

    Attributes:
        model, dtype, batch: as in `load_model` and `Evaluator`.
        devices: slot i uses `devices[i % len]`.
        parts: windows and prompts, by name.
        threads: CPU threads of one slot; 0 leaves torch's default.
    """

    model: str
    dtype: str
    devices: tuple[str, ...]
    parts: Mapping[str, Part]
    batch: int | None = None
    threads: int = 0

    def open(self, slot: int) -> "ModelSession":
        """Load the model on the slot's device."""
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        device = self.devices[slot % len(self.devices)]
        if device.startswith("cuda"):  # kernels and allocations of this process go there
            import torch

            torch.cuda.set_device(device)
        loaded = load_model(self.model, dtype=self.dtype, device=device, announce=lambda _: None)
        return ModelSession(Evaluator(loaded, self.batch), self.parts)


class ModelSession:
    """A loaded model, and the parts that policies are measured on."""

    def __init__(self, evaluator: Evaluator, parts: Mapping[str, Part]) -> None:
        self.evaluator, self.parts = evaluator, parts
        self._full: dict[int, Sequence[Any]] = {}  # `Answers.log` of the report's items

    def run(self, job: Job) -> Measurement:
        """Evaluate one job."""
        part = self.parts[job.part]
        some = part.cut(job.first, job.windows)
        full = self._expected(part, some, job.first) if job.part == "report" else None
        return losses(self.evaluator, job.policy, some, resident=job.resident, full=full)

    def _expected(self, part: Part, some: Part, first: int) -> list[Any] | None:
        """Log-probabilities of the full cache at answers; None if all of the part's are too many.

        A session measures them once for each item.
        """
        if not fits(self.evaluator, part):
            return None
        mine = [i for i, item in enumerate(some.items, first) if item.asks]
        if lacking := [i for i in mine if i not in self._full]:
            less = Prompts(part.name, tuple(part.items[i] for i in lacking), part.see)
            log = iter(answers(self.evaluator, Policy(), less, resident=False, keep=True).log)
            for i in lacking:
                self._full[i] = [next(log) for _ in part.items[i].asks]
        return [x for i in mine for x in self._full[i]]

    def forget(self) -> None:
        """Drop the caches of a job that failed, so that the next one has all the memory.

        Raises:
            Unusable: after an error such as an illegal memory access CUDA refuses everything that
                follows in a process, and the next policies are not the cause.
        """
        gpus = [x for x in self.evaluator.loaded.devices.split(",") if x.startswith("cuda")]
        if not gpus:
            return
        import torch

        try:
            for gpu in gpus:
                torch.cuda.synchronize(gpu)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            if not lacks_memory(error):
                raise Unusable((str(error).strip() or "no message").splitlines()[0]) from error

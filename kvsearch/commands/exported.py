"""What an export found: the policy that a runtime runs, its bytes and losses, and the files."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from kvsearch.commands.evaluated import EvaluateResult
from kvsearch.exporters import Proof, Target, Verdict, proof
from kvsearch.policy import Policy
from kvsearch.results.records import Interval

_ANY = TypeAdapter(Any)


@dataclass(frozen=True)
class Loss:
    """Losses on the same tokens.

    Attributes:
        text: its name.
        tokens: scored ones.
        asked, given: mean NLL in nats per token, by our evaluator.
        runtime: the same of the policy given, in the runtime; None if it told none.
        off: `runtime` minus `given`, token by token, with its interval.
    """

    text: str
    tokens: int
    asked: float
    given: float
    runtime: float | None = None
    off: Interval | None = None

    @property
    def ppl_off(self) -> float | None:
        """How far the runtime's PPL is from our evaluator's, as a share."""
        return None if self.runtime is None else float(np.expm1(self.runtime - self.given))

    @property
    def agrees(self) -> bool | None:
        """Whether that is within `proof.TOLERANCE`."""
        return None if self.ppl_off is None else abs(self.ppl_off) <= proof.TOLERANCE


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        target: the runtime.
        given: the policy that it runs.
        proof: how far that is proven.
        verdicts: what became of the fields.
        files: what was written.
        tokens: length of the stream that bytes are counted for.
        bytes_asked, bytes_given: at the peak; None where the model's shape is not known.
        loss: on a text, if there was one.
        answers: on prompts, if there were some, and on the text beside them: of the policies
            `asked` and `given`.
        measured: what the runtime said of its cache.
        notes: what no field says, one sentence each.
    """

    target: Target
    given: Policy
    proof: Proof
    verdicts: list[Verdict]
    files: tuple[Path, ...]
    tokens: int
    bytes_asked: int | None
    bytes_given: int | None
    loss: Loss | None
    measured: dict[str, int]
    notes: tuple[str, ...]
    answers: EvaluateResult | None = None

    def document(self) -> dict[str, Any]:
        """What `kvsearch export --json` prints."""
        t, loss = self.target, self.loss
        return {
            "target": t.name,
            "runtime": t.runtime,
            "version": t.version,
            "proof": self.proof,
            "policy": self.given.plain(),
            "fields": [
                {"field": v.field, "asked": _ANY.dump_python(v.asked, mode="json"),
                 "given": _ANY.dump_python(v.given, mode="json"), "verdict": v.verdict}
                for v in self.verdicts
            ],
            "tokens": self.tokens,
            "bytes_peak": {"asked": self.bytes_asked, "given": self.bytes_given},
            "loss": None if loss is None else asdict(loss) | {
                "ppl_off": loss.ppl_off, "agrees": loss.agrees
            },
            **({} if self.answers is None else {"answers": self.answers.document()}),
            "measured": self.measured,
            "notes": list(self.notes),
            "files": [str(f) for f in self.files],
        }  # fmt: skip

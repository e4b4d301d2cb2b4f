"""What the single layers of a projected policy hold, for runtimes that are told layer by layer."""

from kvsearch.errors import KvsearchError
from kvsearch.exporters.capability import Capability, Format
from kvsearch.exporters.target import Job
from kvsearch.policy import ModelShape, layout


def format_per_layer(job: Job, can: Capability) -> list[Format | None]:
    """Format of every layer, None for 16 bits; a single one where all are alike.

    Raises:
        KvsearchError: layers differ, and the model has layers beside those of the policy.
    """
    p = job.policy
    if p.head_tiers is None:
        return [can.used(p, shape=job.shape)]
    which = [row if isinstance(row, int) else row[0] for row in p.head_tiers.of]
    require_no_others(job)
    return [can.used(p, p.every_tiers[i][0], job.shape) for i in which]


def bits_per_layer(job: Job, can: Capability) -> list[tuple[int, int]]:
    """Bits of keys and of values of every layer; a single pair where all are alike.

    Raises:
        KvsearchError: as `format_per_layer`.
    """
    found = format_per_layer(job, can)
    return [(16, 16) if f is None else (f.key_bits, f.value_bits) for f in found]


def slots_per_layer(job: Job) -> list[int]:
    """Slots of every layer of an evicting policy; a single number where all are alike.

    Raises:
        KvsearchError: layers differ, and the model's shape is not known, or has other layers too.
    """
    p = job.policy
    assert p.slots is not None
    if p.budgets.kind == "uniform":
        return [p.slots]
    if job.shape is None:
        raise KvsearchError(
            f"layers have slots of their own by budgets {p.budgets.kind!r}; name the model with "
            "--model"
        )
    found = [n or 0 for n in layout(p, job.shape).slots]
    if len({*found}) == 1:
        return found[:1]
    require_no_others(job)
    return found


def require_no_others(job: Job) -> None:
    """Refuse a model with layers that no policy governs.

    Raises:
        KvsearchError: there are some.
    """
    if job.shape is not None and job.shape.others:
        raise KvsearchError(
            f"{others_of(job.shape)}, which no policy governs, and the files for this runtime "
            "cannot leave them out; export to transformers"
        )


def others_of(shape: ModelShape) -> str:
    """How many layers no policy governs, for a sentence."""
    every = shape.layers + shape.others
    return f"{shape.others} of the model's {every} layers have a sliding window or linear attention"

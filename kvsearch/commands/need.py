"""Whether a KV cache has to be smaller at all: `kvsearch need`."""

from dataclasses import dataclass
from math import ceil
from typing import Any

from kvsearch.errors import KvsearchError
from kvsearch.models.load import LoadedModel, configured, max_context, require_context, to_stderr
from kvsearch.models.shape import policy_layers, shape_of, windowed_bytes
from kvsearch.options.budget import MOST
from kvsearch.options.function import takes
from kvsearch.options.other_commands import NeedConfig
from kvsearch.policy import ModelShape

RESERVE = 0.1  # of the memory, for activations: what vLLM leaves by default
SHARES = (1, 1 / 2, 1 / 4, 1 / 6, 1 / 8, 1 / 12, 1 / 16, 1 / 32)  # of the full cache in 16 bits
SEARCHED = 4096  # tokens of the longest window that a search is proposed for


@dataclass(frozen=True)
class Fit:
    """What fits into the memory with a cache of one size.

    Attributes:
        share: of the bytes of the full cache in 16 bits.
        bytes: of a request's cache.
        requests: at once, of the context asked for; None without a memory.
        context: tokens of the longest context of as many requests as were asked for; likewise.
    """

    share: float
    bytes: int
    requests: int | None
    context: int | None


@dataclass(frozen=True)
class Need:
    """What a model's cache takes, and whether it has to be smaller.

    Attributes:
        model: its name.
        shape: of its cached layers.
        context, at_once, memory: as asked for.
        weights: bytes of the weights.
        windowed: bytes of a request in layers with a sliding window, which no policy makes smaller.
        fits: by falling share; the first is the full cache.
        share: the largest of these with which all requests fit; None: none does, or no memory.
        verdict: in a sentence or two.
        command: to run next, or empty.
    """

    model: str
    shape: ModelShape
    context: int
    at_once: int
    memory: int | None
    weights: int
    windowed: int
    fits: tuple[Fit, ...]
    share: float | None
    verdict: str
    command: str

    def document(self) -> dict[str, Any]:
        """What `kvsearch need --json` prints."""
        return {
            **vars(self),
            "shape": self.shape.plain(),
            "fits": [vars(fit) for fit in self.fits],
        }


@takes(NeedConfig)
def need(config: NeedConfig) -> Need:
    """What a model's KV cache takes, how many requests fit, and whether it has to be smaller.

    Only the configuration of a model is read.

    Returns:
        Bytes and what fits by size of the cache, a verdict, and the command to run next.

    Raises:
        KvsearchError: the model cannot be found, has no cache that a policy could make smaller, or
            its positions end before the context.
    """
    given = config.model
    if isinstance(given, LoadedModel):
        name, found = given.name, given.model.config
        size = sum(p.nbytes for p in given.model.parameters())
    else:
        name = given
        found, size = configured(given, to_stderr if config.progress else lambda _: None)
    if config.context * config.requests > MOST:
        raise KvsearchError(f"--requests {config.requests} are more than there can be; give fewer")
    shape = shape_of(found)
    require_context(found, config.context)
    each, at_once = shape.budget_bytes(config.context), config.requests
    windowed = windowed_bytes(found, policy_layers(found), config.context)
    room = None if config.memory is None else int((1 - RESERVE) * config.memory) - size
    fits, most = list[Fit](), max_context(found)
    for part in SHARES:
        own = ceil(part * each) + windowed
        requests = None if room is None else max(0, room // own)
        reach = None if room is None else _reach(room / at_once - windowed, part, shape, most)
        fits.append(Fit(part, own, requests, reach))
    holding = (f.share for f in fits if f.requests is not None and f.requests >= at_once)
    share: float | None = next(holding, None)
    return Need(
        name, shape, config.context, at_once, config.memory, size, windowed, tuple(fits), share,
        _verdict(config, room, share, size, each), _command(config, room, share, name),
    )  # fmt: skip


def _reach(room: float, share: float, shape: ModelShape, most: int | None) -> int:
    """Tokens of a context whose cache of a share takes `room` bytes; at most so many."""
    found = max(0, int(room / (share * shape.budget_bytes(1))))
    return found if most is None else min(found, most)


def _verdict(
    config: NeedConfig, room: int | None, share: float | None, size: int, each: int
) -> str:
    wanted = f"{config.requests} request{'s' * (config.requests > 1)} of {config.context:,} tokens"
    if room is None:
        return "Give --memory to learn how many requests fit."
    if room <= 0:
        return (
            "The weights alone do not fit: a smaller cache cannot help; take a smaller model, or "
            "weights in fewer bits."
        )
    if share == 1:
        part = 100 * config.requests * each / (config.requests * each + size)
        return (
            f"You need no smaller cache: {wanted} can be held with all of it in 16 bits (it is "
            f"{part:.0f} % of cache and weights together). Compress only to serve more at once."
        )
    if share == 1 / 2:
        return (
            f"8 bits suffice for {wanted}: try the cache type that your runtime has (fp8 or int8) "
            "before anything else; it forgets nothing and keeps prefix caching."
        )
    if share is None:
        return (
            f"No cache of at least 1/{1 / SHARES[-1]:.0f} of the bytes holds {wanted}: take fewer "
            "at once, shorter contexts, or more memory."
        )
    return (
        f"{wanted[0].upper()}{wanted[1:]} need a cache of at most 1/{1 / share:.0f} of its bytes."
    )


def _command(config: NeedConfig, room: int | None, share: float | None, name: str) -> str:
    """What to run next: the search at this share, on windows that it can afford."""
    if room is None or share == 1 or share is None:
        return ""
    if share == 1 / 2:
        return f"kvsearch eval int8 --model {name}"
    context = min(config.context, SEARCHED)
    return f"kvsearch run --model {name} --context {context} --budget {int(share * context)}"

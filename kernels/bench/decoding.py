"""Decoded tokens and prompts of whole models under a policy, against two full caches.

The models have the shape of known ones and random weights: what a token costs does not depend on
them. Random weights give flat attention, so the choice of slots has no meaning here. The opponents
are transformers' full cache, eager, and its `StaticCache`, whose tokens are CUDA graphs: as
captured, and as compiled by torch. Both are filled with random keys and values, not by a prompt.
Policies read a real prompt, in calls of at most `CALL` tokens.
"""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from pool import Skipped, emit
from timing import clocks, device, free, peak, spent, spread, stands_in, wait
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from kvsearch.cache.cuda.graphs import Decoded, cuda_graphs
from kvsearch.cache.huggingface import PolicyCache, full_cache
from kvsearch.models.shape import shape_of
from kvsearch.policy import Policy, Quantizer, Tier, layout
from kvsearch.rules import Attention

BLOCKS, EAGER_BLOCKS = 7, 5  # timed; a block is an interval, so that each has one compaction
INTERVAL = 16
WARM = INTERVAL + 8  # tokens before the clock starts; by then graphs were compared with launches
CALL = 32768  # tokens of all sequences in one call of a prompt
PROMPTS = 3  # times that a prompt is read
_FOUR = (Tier(key_bits=4, value_bits=4),)
_ROTATED = Quantizer(levels="lloyd", rotate=True, fp16_sinks=True)
_SLOTS: dict[str, Any] = {"slots": 1024, "sinks": 4, "interval": INTERVAL}
_SCORED = _SLOTS | {"recent_window": 64, "rule": Attention(beta=1)}
POLICIES = {  # the second and third resemble what searches find
    "full, ours": Policy(),
    "window+rotated4": Policy(**_SLOTS, tiers=_FOUR, quantizer=_ROTATED),
    "scored+rotated4": Policy(**_SCORED, tiers=_FOUR, quantizer=_ROTATED),
    "scored": Policy(**_SCORED),
}
MODELS = {
    "llama2-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "mistral-7b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300,
    },
}  # fmt: skip
_held: dict[str, LlamaForCausalLM] = {}


def config(model: str) -> LlamaConfig:
    """Config of a Llama whose positions reach every context."""
    return LlamaConfig(**MODELS[model], max_position_embeddings=65536)


def weight_bytes(model: str) -> int:
    """Bytes of the weights in 16 bits."""
    s = MODELS[model]
    h, each = s["hidden_size"], s["num_key_value_heads"] / s["num_attention_heads"]
    layer = int((2 + 2 * each) * h * h) + 3 * h * s["intermediate_size"]
    return 2 * (s["num_hidden_layers"] * layer + 2 * h * s["vocab_size"])


def bytes_needed(model: str, context: int, batch: int, cache: str) -> int:
    """About the most memory that decoding takes: weights, cache, and activations of a prompt."""
    s = MODELS[model]
    policy = POLICIES.get(cache, Policy())
    held = batch * layout(policy, shape_of(config(model))).bytes_at(context)
    if cache in POLICIES:  # a copy of it computes what the first replays are compared with
        held *= 2
        held += 2 * min(CALL, batch * context) * (3 * s["intermediate_size"] + 6 * s["hidden_size"])
    return weight_bytes(model) + held + batch * 2**26


def require_room(model: str, needed: int) -> None:
    """Raise `Skipped` where a GPU has less memory than is needed."""
    left = free() + (weight_bytes(model) if model in _held else 0)
    if needed > left:
        raise Skipped(f"it needs about {needed / 1e9:.0f} GB, and {left / 1e9:.0f} GB are free")


def built(model: str) -> LlamaForCausalLM:
    """The model, in bf16 on a GPU; the process keeps the last one."""
    if model not in _held:
        _held.clear()
        emptied()
        require_room(model, weight_bytes(model) + 2**30)
        torch.manual_seed(0)
        dtype = torch.float32 if stands_in() else torch.bfloat16
        with device():
            _held[model] = LlamaForCausalLM._from_config(config(model), dtype=dtype).eval()
    return _held[model]


def emptied() -> None:
    """Give back memory that nothing holds."""
    gc.collect()
    if not stands_in():
        torch.cuda.empty_cache()


def policy_of(cache: str) -> Policy:
    """The policy of that name; a stand-in's has few slots."""
    policy = POLICIES[cache]
    if stands_in() and policy.slots is not None:
        return policy.model_copy(update={"slots": 32, "recent_window": 0})
    return policy


def tokens_of(model: LlamaForCausalLM, batch: int, context: int) -> Tensor:
    """Random ids `[batch, context]`."""
    return torch.randint(0, model.config.vocab_size, (batch, context), device=device())


def read(model: LlamaForCausalLM, ids: Tensor, cache: Any) -> None:
    """Let a cache take in a prompt, in as few calls as memory allows."""
    for part in ids.split(max(INTERVAL, CALL // ids.shape[0]), 1):
        # logits of the last token alone: those of a prompt would be larger than the cache
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)


def decode(model: str, context: int, batch: int, cache: str) -> None:
    """Time decoded tokens with one cache, each way that it can be decoded."""
    require_room(model, bytes_needed(model, context, batch, cache))
    loaded = built(model)
    shared = {"model": model, "context": context, "batch": batch, "cache": cache}
    ways = _policy if cache in POLICIES else {"full": _full, "static": _captured,
                                              "compiled": _compiled}[cache]  # fmt: skip
    try:
        for found in ways(loaded, context, batch, cache):
            emit(**shared, **found)
    except torch.OutOfMemoryError as error:
        raise Skipped("it does not fit into the memory of the device") from error
    finally:
        emptied()


def compile_ahead(cells: list[list[Any]]) -> None:
    """Let torch compile tokens of `StaticCache`, which it keeps on disk; nothing is timed."""
    for model, context, batch in cells:
        require_room(model, bytes_needed(model, context, batch, "compiled"))
        (found,) = _compiled(built(model), context, batch, "compiled", blocks=1)
        emit(compiled=[model, context, batch], seconds=found["ready_s"])
        emptied()


def _timed(step: Callable[[], Any], blocks: int, tokens: int = INTERVAL) -> dict[str, Any]:
    """Milliseconds a token of several blocks, and clocks just after them."""
    peak(reset=True)

    def block() -> None:
        for _ in range(tokens):
            step()

    blocks = 1 if stands_in() else blocks
    found = [spent(block) for _ in range(blocks)]
    at = clocks()
    return {
        "ms": spread([ms / tokens for ms, _ in found]),
        "host_ms": float(f"{median(host for _, host in found) / tokens:.4g}"),
        "blocks": blocks, "tokens": tokens, "peak_bytes": peak(), "clocks": at,
    }  # fmt: skip


def _ready(step: Callable[[], Any], tokens: int) -> float:
    """Seconds that the first tokens take, which compile and record."""
    return round(sum(spent(step)[0] for _ in range(tokens)) / 1e3, 2)


def _profiled(step: Callable[[], Any], tokens: int = INTERVAL) -> dict[str, Any]:
    """How long kernels run in a token, and how many there are, by torch's profiler."""
    if stands_in():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(tokens):
            step()
        wait()
    took, launches = Counter[str](), Counter[str]()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            took[event.name] += event.device_time
            launches[event.name] += 1
    most = {k[:80]: round(us / tokens, 1) for k, us in took.most_common(8)}
    return {"kernels_ms": round(took.total() / tokens / 1e3, 4),
            "launches": round(launches.total() / tokens, 1), "kernels_us": most}  # fmt: skip


@torch.inference_mode()
def _full(model: LlamaForCausalLM, context: int, batch: int, cache: str) -> Iterator[Any]:
    """Transformers' full cache, eager."""
    held, ids, heads = full_cache(model), tokens_of(model, batch, 1), shape_of(model.config)
    for layer in range(heads.layers):
        size = (batch, heads.kv_heads, context, heads.head_dim)
        pair = (torch.randn(size, device=device(), dtype=model.dtype) for _ in range(2))
        held.update(*pair, layer)

    def step() -> None:
        model(ids, past_key_values=held, use_cache=True, logits_to_keep=1)

    ready = _ready(step, WARM)
    yield {"way": "eager", "ready_s": ready} | _timed(step, EAGER_BLOCKS)
    yield {"way": "eager"} | _profiled(step)


def _filled(model: LlamaForCausalLM, context: int, batch: int) -> StaticCache:
    """A `StaticCache` with room for the tokens that are timed."""
    heads = shape_of(model.config)
    room = WARM + INTERVAL * (BLOCKS + 2)
    held = StaticCache(config=model.config, max_cache_len=context + room)
    held.early_initialization(batch, heads.kv_heads, heads.head_dim, model.dtype, device())
    for layer in held.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(context)
    return held


@torch.no_grad()
def _captured(model: LlamaForCausalLM, context: int, batch: int, cache: str) -> Iterator[Any]:
    """`StaticCache` eager, and with tokens as a CUDA graph."""
    held, ids = _filled(model, context, batch), tokens_of(model, batch, 1)

    def step() -> None:
        model(ids, past_key_values=held, use_cache=True, logits_to_keep=1)

    ready = _ready(step, 3)
    if stands_in():
        yield {"way": "graphs", "ready_s": ready} | _timed(step, BLOCKS)
        return
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    wait()
    with torch.cuda.graph(graph, stream=stream):
        step()
    yield {"way": "graphs", "ready_s": ready + _ready(graph.replay, 3)} | _timed(
        graph.replay, BLOCKS
    )


@torch.no_grad()
def _compiled(
    model: LlamaForCausalLM, context: int, batch: int, cache: str, blocks: int = BLOCKS
) -> Iterator[Any]:
    """`StaticCache` as torch compiles it, with CUDA graphs."""
    torch._dynamo.reset()
    held, ids = _filled(model, context, batch), tokens_of(model, batch, 1)
    how: dict[str, Any] = {"backend": "eager"} if stands_in() else {"mode": "reduce-overhead"}
    run = torch.compile(model.forward, fullgraph=True, dynamic=False, **how)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        run(ids, past_key_values=held, use_cache=True, logits_to_keep=1)

    ready = _ready(step, 4)
    yield {"way": "compiled", "ready_s": ready} | _timed(step, blocks)


@torch.inference_mode()
def _policy(model: LlamaForCausalLM, context: int, batch: int, cache: str) -> Iterator[Any]:
    """A policy's deployed cache, first with tokens as CUDA graphs, then eager."""
    held = PolicyCache(policy_of(cache), model, packed=True)
    ids = tokens_of(model, batch, context)
    prompt = round(spent(lambda: read(model, ids, held))[0] / 1e3, 3)  # compilation included

    def step() -> None:
        model(ids[:, :1], past_key_values=held, use_cache=True, logits_to_keep=1)

    for way, blocks in (("graphs", BLOCKS), ("eager", EAGER_BLOCKS)):
        with (
            warnings.catch_warnings(record=True) as said,
            cuda_graphs(model) if way == "graphs" else nullcontext(Decoded()) as decoded,
        ):
            warnings.simplefilter("always")
            ready = _ready(step, WARM)
            before = decoded.repeated
            found = _timed(step, blocks)
            found["replayed"] = round((decoded.repeated - before) / (found["blocks"] * INTERVAL), 3)
            notes = sorted({str(w.message) for w in said if w.category is RuntimeWarning})
            yield {
                "way": way, "ready_s": ready, "first_prompt_s": prompt, "notes": notes,
                "resident_bytes": held.bytes_resident, "impls": ran(held),
            } | found  # fmt: skip
            if batch == 1:
                yield {"way": way} | _profiled(step)


def ran(cache: PolicyCache) -> dict[str, str]:
    """Which implementation each op of a cache ran last."""
    return {op: impl for group in cache.groups for op, impl in group.impls.items()}


@torch.inference_mode()
def prompt(model: str, context: int, batch: int, cache: str) -> None:
    """Time a whole prompt, several times, each into an empty cache."""
    require_room(model, bytes_needed(model, context, batch, cache))
    loaded = built(model)
    ids = tokens_of(loaded, batch, context)

    def empty() -> Any:
        if cache == "full":
            return full_cache(loaded)
        return PolicyCache(policy_of(cache), loaded, packed=True)

    shared = {"model": model, "context": context, "batch": batch, "cache": cache}
    times, most = list[float](), 0
    try:
        # kernels are proved and compiled, and libraries loaded, before the clock
        first = spent(lambda: read(loaded, ids[:, : max(context // 16, 64)], empty()))[0]
        for _ in range(1 if stands_in() else PROMPTS):
            held = empty()
            peak(reset=True)
            times.append(spent(partial(read, loaded, ids, held))[0])
            most = max(most, peak())
            row = {"ms": spread(times), "times": len(times), "peak_bytes": most}
            emit(**shared, **row, ready_s=round(first / 1e3, 2), clocks=clocks(),
                 impls=ran(held) if cache != "full" else {})  # fmt: skip
            del held
    except torch.OutOfMemoryError as error:
        raise Skipped("it does not fit into the memory of the device") from error
    finally:
        emptied()

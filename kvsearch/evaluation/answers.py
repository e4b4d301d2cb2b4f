"""What answers lose under a policy: prompts replayed with the answers given (teacher forcing).

A context is taken in once, in one call. Every question continues from a copy of the cache, as a
server with a shared prefix would; a further turn of a chat continues from the turn before it. The
NLL of an answer's tokens is smooth and paired, and says what greedy decoding would have answered up
to its first deviation: the answer is exact if every token is the first choice, given those before.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.cache.huggingface import PolicyCache
from kvsearch.errors import OutOfMemory, PolicyError, lacks_memory
from kvsearch.evaluation.evaluator import Evaluator, check_finite
from kvsearch.evaluation.replay import deployed, finite
from kvsearch.models.disk_cache import remembered
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy
from kvsearch.results.measurement import Answered
from kvsearch.workloads.items import Ask, Ids, Item, Prompts, See, ids
from kvsearch.workloads.prompts.encode import Greedy

TOGETHER = 1 << 14  # tokens of copies of a context that are there at once
NEW_TOKENS = 32  # of an answer that the full cache gives
HELD = 1 << 26  # log-probabilities of the full cache that are kept, at most: 256 MiB
_Row = tuple[float, int, bool, NDArray[np.int64]]  # NLL, tokens, exactness and first choices


@dataclass(frozen=True, eq=False)
class Answers:
    """One policy on the asks of a workload, in their order; `N` asks.

    Attributes:
        nll: mean over an answer's tokens, nats per token `[N]`.
        tokens: of each answer `[N]`.
        exact: whether greedy decoding gives the answer `[N]`.
        first: most likely tokens, given the answer before each; a row of token ids an ask.
        kl: mean over an answer's tokens of the KL divergence from the full cache's next-token
            distribution, nats `[N]`; None where that was not given.
        log: log-probabilities at an answer's tokens `[tokens, vocabulary]`, fp32, an ask each;
            empty where they were not asked for.
        read: NLL of the tokens of every context `[T - 1]`, as of a window; empty where they were
            not asked for.
        bytes_prompt: resident bytes per sequence after the prompt that holds most.
        bytes_end: the same at the end of an answer.
        seconds: wall time.
        impls: which implementation of each op ran.
    """

    nll: NDArray[np.float64]
    tokens: NDArray[np.int64]
    exact: NDArray[np.bool_]
    first: tuple[NDArray[np.int64], ...]
    bytes_prompt: int
    bytes_end: int
    seconds: float
    impls: dict[str, str]
    kl: NDArray[np.float64] | None = None
    log: tuple[Tensor, ...] = ()
    read: tuple[NDArray[np.float32], ...] = ()


def fits(evaluator: Evaluator, asked: Prompts) -> bool:
    """Whether `Answers.log` of all asks may be kept."""
    tokens = sum(ask.answer.size for item in asked.items for ask in item.asks)
    return tokens * evaluator.head.vocabulary <= HELD


def answers(
    evaluator: Evaluator,
    policy: Policy,
    asked: Prompts,
    *,
    resident: bool = True,
    full: Sequence[Tensor] | None = None,
    keep: bool = False,
    read: bool = False,
    progress: Callable[[], None] = lambda: None,
    **options: Any,
) -> Answers:
    """Replay `policy` over prompts.

    Args:
        evaluator: of the model.
        policy: what to replay.
        asked: the prompts.
        resident: also pack the caches of the longest item and measure their bytes.
        full: `Answers.log` of the full cache, for divergences from it.
        keep: also return `Answers.log`.
        read: also return `Answers.read`, of contexts that are taken in before their questions.
        progress: called after every item.
        options: passed to `PolicyCache`.

    Raises:
        PolicyError: the policy inserts tokens into a text.
        KvsearchError: a loss is not finite.
        OutOfMemory: the device has no room for the cache and activations.
    """
    if policy.anchors is not None and policy.anchors.insert:
        raise PolicyError("field anchors.insert: inserted anchors are measured on texts only")
    start = time.perf_counter()
    rows: list[_Row] = []
    kl, log = list[float](), list[Tensor]()
    heaviest = max(asked.items, key=lambda item: item.longest)
    replay = _Replay(evaluator, policy, asked.see == "aware", options)
    replay.reads = read
    for item in asked.items:
        replay.weighs = resident and item is heaviest
        try:
            with torch.inference_mode(), finite(policy, f"prompts of {asked.name}"):
                for row, said in replay.of(item):
                    if full is not None:
                        there = full[len(rows)]
                        kl.append(float((there.exp() * (there - said)).sum(-1).double().mean()))
                    log += [said] if keep else []
                    rows.append(row)
        except (RuntimeError, MemoryError) as e:
            if not lacks_memory(e):
                raise
            raise OutOfMemory(
                f"out of memory with a prompt of {item.longest} tokens; shorten the prompts or "
                "take a smaller model"
            ) from e
        check_finite(
            policy,
            np.array([row[0] for row in rows[-len(item.asks) :]]),
            f"prompts of {asked.name}",
        )
        progress()
    return Answers(
        nll=np.array([row[0] for row in rows]),
        tokens=np.array([row[1] for row in rows]),
        exact=np.array([row[2] for row in rows]),
        first=tuple(row[3] for row in rows),
        bytes_prompt=replay.bytes_prompt,
        bytes_end=replay.bytes_end,
        seconds=time.perf_counter() - start,
        impls=replay.impls
        | ({"refit": f"not in {replay.unfitted} heads"} if replay.unfitted else {}),
        kl=None if full is None else np.array(kl),
        log=tuple(log),
        read=tuple(replay.read),
    )


def answered(
    asked: Prompts, found: Answers, of: Sequence[str] = (), weights: Sequence[float] = ()
) -> tuple[Answered, ...]:
    """The answers of each item of prompts.

    Args:
        asked: the items.
        found: what a policy made of them.
        of, weights: workloads of the items, where there are several, and their weights.
    """
    of, weights = of or [asked.name] * len(asked.items), weights or [1.0] * len(asked.items)
    return tuple(
        Answered(
            of=name,
            group=item.group,
            weight=weight,
            exact=found.exact[mine].tolist(),
            first=[x.tolist() for x in found.first[mine]],
            kl=None if found.kl is None else found.kl[mine].tolist(),
            needle=None if item.depth is None else (item.context.size, item.depth),
            nll=float(found.nll[mine].mean()),
        )
        for item, mine, name, weight in zip(asked.items, by_item(asked), of, weights, strict=True)
    )


def by_item(asked: Prompts) -> list[slice]:
    """Where the asks of each item are among all of them."""
    ends = accumulate((len(item.asks) for item in asked.items), initial=0)
    return [slice(first, end) for first, end in pairwise(ends)]


def greedy_of(loaded: LoadedModel, tokens: int = NEW_TOKENS) -> Greedy:
    """Greedy answers of so many tokens by the full cache, kept on disk by model and prompt.

    They are the first choices up to the end token, whatever else the model's generation
    configuration asks for: with a penalty of repetitions, say, the full cache would not give its
    own answer. Where a replay has another first choice, in a tie that rounding decides, the answer
    ends before.
    """

    def answer(given: Ids, most: int = tokens) -> Ids:
        def make() -> list[int]:
            evaluator, full = Evaluator(loaded), Policy(name="full")

            def item(said: Ids) -> Item:
                return Item("greedy", "greedy", given, (Ask(ids([]), said),))

            replay, stop = _Replay(evaluator, full, False, {}), _ends(loaded)
            with torch.inference_mode():
                (node,) = replay.asked(item(ids([])), 1)
                said = ids(_decoded(evaluator, replay, node, most, stop))
            first = answers(evaluator, full, Prompts("greedy", (item(said),)), resident=False).first
            same = int((first[0] == said).cumprod().sum())
            return (said[:same] if same else first[0][:1]).tolist()

        def read(data: Any) -> Ids:
            if not isinstance(data, list) or not data:
                raise ValueError("no answer")
            return ids(int(t) for t in data)

        words = f"first choices/{loaded.digest}/{loaded.dtype}/{most}"
        return remembered("answers", words, given.astype("<i4").tobytes(), read, make)

    return answer


def _ends(loaded: LoadedModel) -> set[int]:
    """The tokens that end what the model generates."""
    found = loaded.model.generation_config.eos_token_id
    return {found} if isinstance(found, int) else set(found or ())


def _decoded(
    evaluator: Evaluator, replay: "_Replay", node: "_Node", most: int, stop: set[int]
) -> list[int]:
    """The first choices after a node, so many or up to an end token, with it."""
    said = list[int]()
    while True:
        said.append(int(evaluator.head.logits(node.last)[0, -1].argmax()))
        if said[-1] in stop or len(said) == most:
            return said
        node = replay.fed(node, np.array(said[-1:]))


def spoken(
    evaluator: Evaluator, policy: Policy, item: Item, see: See, tokens: Sequence[int]
) -> list[NDArray[np.int64]]:
    """What greedy decoding says to asks of an item, so many tokens or up to an end token, without.

    Args:
        evaluator: of the model.
        policy: of the cache that decodes.
        item: a context with its asks.
        see: whether the question is seen before the context is compressed.
        tokens: at most, of each of the first asks, none of which follows on another.
    """
    stop = _ends(evaluator.loaded)
    replay, found = _Replay(evaluator, policy, see == "aware", {}), []
    with torch.inference_mode():
        for node, most in zip(replay.asked(item, len(tokens)), tokens, strict=True):
            said = _decoded(evaluator, replay, node, most, stop)
            found.append(ids(said[:-1] if said[-1] in stop else said))
    return found


@dataclass(frozen=True, eq=False)
class _Node:
    """A cache, and the hidden state of its newest token `[1, 1, hidden]`."""

    cache: PolicyCache
    last: Tensor


class _Replay:
    """Items under one policy.

    Attributes:
        bytes_prompt, bytes_end: the most that a cache held after a prompt, and after an answer, of
            the items for which `weighs` was set.
        unfitted: heads that kept their values where `refit` was asked for, over prompts.
        read: NLL of the tokens of every context `[T - 1]`, if `reads`.
        impls: which implementation of each op ran.
    """

    def __init__(
        self, evaluator: Evaluator, policy: Policy, aware: bool, options: dict[str, Any]
    ) -> None:
        self._loaded, self._head, self._policy = evaluator.loaded, evaluator.head, policy
        self._aware, self._options = aware, options
        self.weighs = self.reads = False
        self.read = list[NDArray[np.float32]]()
        self.bytes_prompt = self.bytes_end = self.unfitted = 0
        self.impls: dict[str, str] = {}

    def of(self, item: Item) -> Iterator[tuple[_Row, Tensor]]:
        """NLL, tokens, exactness and first choices of every ask, and its log-probabilities."""
        if not self._aware and not any(ask.follows for ask in item.asks):
            yield from self._apart(item)
            return
        context: _Node | None = None
        node: _Node | None = None
        for i, ask in enumerate(item.asks):
            later = item.asks[i + 1 :]
            if ask.follows:
                assert node is not None, "the first ask of an item follows on the context"
                node = self.fed(node, ask.question)
            elif self._aware:
                node = self._prompt(np.concatenate([item.context, ask.question]))
            else:
                context = context or self._prompt(item.context)
                last = all(a.follows for a in later)
                taken = context if last else _Node(context.cache.fork(), context.last)
                node = self.fed(taken, ask.question)
            row, log, node = self._scored(node, ask, bool(later) and later[0].follows)
            yield row, log

    def _apart(self, item: Item) -> Iterator[tuple[_Row, Tensor]]:
        """As `of`, where every ask follows on the context: those of one size share a batch.

        How a stream is cut into calls changes nothing, so a question comes with its answer.
        """
        context, rows = self._prompt(item.context), dict[int, tuple[_Row, Tensor]]()
        alone = self.weighs or self._policy.budgets.kind == "adakv"  # which serve one sequence
        together = 1 if alone else max(1, TOGETHER // max(1, item.context.size))
        batches = _alike(item.asks, together)
        for mine in batches:
            cache = context.cache if mine is batches[-1] else context.cache.fork()
            if len(mine) > 1:
                cache.batch_repeat_interleave(len(mine))
            asks = [item.asks[i] for i in mine]
            ids = np.stack([np.concatenate([x.question, x.answer[:-1]]) for x in asks])
            hidden = context.last.expand(len(mine), -1, -1)
            if ids.size:
                given = torch.from_numpy(ids).to(self._loaded.device)
                hidden = torch.cat([hidden, self._head.hidden(given, cache)], 1)
            for i, ask, row in zip(mine, asks, hidden[:, -asks[0].answer.size :], strict=True):
                log = self._head.logits(row[None])[0].log_softmax(-1)
                rows[i] = _row(log, ask.answer), log
            self._noted(cache)
        yield from (rows[i] for i in range(len(item.asks)))

    def asked(self, item: Item, count: int) -> Iterator[_Node]:
        """The caches before the answers of so many asks of an item."""
        context: _Node | None = None
        for i, ask in enumerate(item.asks[:count], 1):
            assert not ask.follows or i == 1, "a turn follows on an answer"
            if self._aware:
                yield self._prompt(np.concatenate([item.context, ask.question]))
                continue
            context = context or self._prompt(item.context)
            taken = context if i == count else _Node(context.cache.fork(), context.last)
            yield self.fed(taken, ask.question)

    def _prompt(self, ids: NDArray[np.int64]) -> _Node:
        cache = deployed(self._loaded, self._policy, packed=False, **self._options)
        hidden, node = self._run(cache, ids)
        self.unfitted += cache.unfitted
        if self.reads:
            own = torch.from_numpy(ids)[None].to(self._loaded.device)
            self.read.append(self._head.nll(hidden, own)[0].cpu().numpy())
        if self.weighs:
            self.bytes_prompt = max(self.bytes_prompt, _packed_bytes(cache))
        return node

    def fed(self, node: _Node, ids: NDArray[np.int64]) -> _Node:
        """A node that has taken in further tokens."""
        return self._run(node.cache, ids)[1] if ids.size else node

    def _run(self, cache: PolicyCache, ids: NDArray[np.int64]) -> tuple[Tensor, _Node]:
        given = torch.from_numpy(ids)[None].to(self._loaded.device)
        hidden = self._head.hidden(given, cache)
        return hidden, _Node(cache, hidden[:, -1:])

    def _scored(self, node: _Node, ask: Ask, goes_on: bool) -> tuple[_Row, Tensor, _Node]:
        """Row of an answer, and log-probabilities at its tokens `[tokens, vocabulary]`.

        Its last token is taken in only if a further turn follows.
        """
        fed, hidden = ask.answer if goes_on else ask.answer[:-1], node.last
        if fed.size:
            more, node = self._run(node.cache, fed)
            hidden = torch.cat([hidden, more], 1)[:, : ask.answer.size]
        log = self._head.logits(hidden)[0].log_softmax(-1)
        self._noted(node.cache)
        return _row(log, ask.answer), log, node

    def _noted(self, cache: PolicyCache) -> None:
        """Note what a cache holds after an answer, and how."""
        if self.weighs:
            self.bytes_end = max(self.bytes_end, _packed_bytes(cache))
        self.impls |= {k: v for layer in cache.held for k, v in layer.impls.items()}


def _row(log: Tensor, answer: NDArray[np.int64]) -> _Row:
    """NLL, tokens, exactness and first choices, of log-probabilities `[tokens, vocabulary]`."""
    target = torch.from_numpy(answer).to(log.device)
    lost = -log.gather(-1, target[:, None]).double().mean()
    first = log.argmax(-1)
    exact = bool((first == target).all())
    return float(lost), answer.size, exact, first.cpu().numpy()


def _alike(asks: Sequence[Ask], most: int) -> list[list[int]]:
    """Numbers of asks whose questions are of one length, and whose answers are, so many at most."""
    found = dict[tuple[int, int], list[int]]()
    for i, ask in enumerate(asks):
        found.setdefault((ask.question.size, ask.answer.size), []).append(i)
    return [x[i : i + most] for x in found.values() for i in range(0, len(x), most)]


def _packed_bytes(cache: PolicyCache) -> int:
    """Bytes per sequence of the packed cache, over the real tensors."""
    return sum(group.pack().nbytes for group in cache.groups)

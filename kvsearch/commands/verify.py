"""Whether a running server really has a policy: `kvsearch verify`.

The server's losses on a text are compared with those that our evaluator predicts, under the policy
and under the full cache: a server that has silently kept the full cache follows the latter. Where
the policy compacts after the prompt, the text is a prompt, and tokens that the server goes on with
are compared.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import KvsearchError, ModelError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import shape_named, tokenizer_named
from kvsearch.models.shared import policy_file
from kvsearch.options.function import takes
from kvsearch.options.model import ModelConfig
from kvsearch.options.other_commands import VerifyConfig
from kvsearch.policy import ModelShape, Policy, check, layout
from kvsearch.results.intervals import interval
from kvsearch.results.records import Interval
from kvsearch.serving.accepts import require_servable
from kvsearch.serving.account import waits
from kvsearch.serving.client import Server
from kvsearch.session import load
from kvsearch.session.progress import Shown
from kvsearch.workloads.text import tokenize
from kvsearch.workloads.text import windows as cut_windows

CONTEXT = 1024  # tokens by default
GENERATED = 0.25  # of them, where only what is generated tells: the policy waits for a prompt's end
LEAST = 16  # tokens before the policy changes anything, below which they do not say how alike it is
# How far the server may be off what it follows, in units of how far both predictions are apart.
# Other roundings, such as those of bf16, move a cache in 4 bits by almost as much as 4 bits do
# (studies/2026-11-verify).
NEAR, NEAR_QUANTISED = 0.5, 1.0
NOISE = 0.5  # the same off the full cache, before the policy changes anything
# A server that is so near to the policy, with differences that are mostly the policy's, has it:
# tokens before, which are few and the hardest to predict, do not outweigh all that follow.
CLEAR, MOSTLY = 0.75, 0.5


@dataclass(frozen=True)
class Verified:
    """What a server's losses follow. All differences are means of a token's, absolute, in nats.

    Attributes:
        policy: its name.
        server, model: the server's address, and the model's name there.
        text: its name.
        tokens: compared ones: those after the policy first changes something.
        nll_server, nll_policy, nll_full: mean losses.
        off_policy, off_full: how far the server is from either prediction.
        apart: how far the two predictions are from each other.
        off_before: how far the server is from the full cache before the policy changes anything,
            where they should agree; None for too few tokens.
        slope: of the server's differences to the full cache in those of the policy: 1 under the
            policy, 0 under the full cache; with its 95 % interval.
        follows: which of both; None: neither.
        verdict: in a sentence.
    """

    policy: str
    server: str
    model: str
    text: str
    tokens: int
    nll_server: float
    nll_policy: float
    nll_full: float
    off_policy: float
    off_full: float
    apart: float
    off_before: float | None
    slope: Interval
    follows: Literal["policy", "full"] | None
    verdict: str

    @property
    def active(self) -> bool:
        """Whether the server has the policy."""
        return self.follows == "policy"

    def document(self) -> dict[str, Any]:
        """What `kvsearch verify --json` prints."""
        return {**asdict(self), "active": self.active}


@takes(VerifyConfig)
def verify(config: VerifyConfig) -> Verified:
    """Say whether a running server has a policy, by its log-probabilities of a text.

    The server gets one request. The model is loaded after it has answered.

    Returns:
        Which prediction the server follows, the policy's or the full cache's, and how closely.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
    """
    shown, given = Shown(quiet=not config.progress), config.policy
    policy = given if isinstance(given, Policy) else Policy.from_json(policy_file(str(given)))
    require_servable(policy)
    if not (policy.compacts or policy.channels.active):
        raise KvsearchError("this policy is the full cache, and a server with it is like any other")
    load.require_files(config.text)
    asked, say = config.model, shown.say
    server = Server.find(config.server, asked if isinstance(asked, str | None) else asked.name)
    say(f"server {server.url}: model {server.model}")
    tokens = _tokens(config.context, server)
    model = server.source if asked is None else asked
    try:
        shape = shape_named(model, say) if isinstance(model, str) else model.shape
    except ModelError as e:
        if asked is not None:
            raise
        raise ModelError(f"{e}; {server.url} says that it serves this, so give --model") from e
    new = max(1, round(tokens * GENERATED)) if waits(policy) else 0
    prompt = tokens - new
    check(policy, shape, prompt=prompt if new else 0)
    start = _start(policy, shape, tokens, prompt if new else 0)
    tokenizer = tokenizer_named(model, say) if isinstance(model, str) else model.tokenizer
    source = load.source(config.text, None, say)
    ids = cut_windows(tokenize(tokenizer, source), count=1, length=prompt)
    words = tokenizer.batch_decode([[i] for i in ids[0]])
    there, drawn = server.nll(ids[0].tolist(), words, new)
    ids = np.concatenate([ids, np.array([drawn], dtype=ids.dtype)], 1)
    how = ModelConfig(model=model, dtype=config.dtype, device=config.device)
    evaluator = Evaluator(load.model(how, context=tokens, say=say))
    here = []
    with shown.step("losses", 2) as step:
        for p in (policy, Policy(name="full")):
            nll = evaluator.quality(p, ids, prompt=prompt, resident=False).nll[0]
            here.append(nll.astype(np.float64))
            step.advance()
    name = policy.name or (Path(str(given)).stem if given is not policy else "policy")
    about = name, server.url, server.model, source.name
    return compared(about, there, here[0], here[1], start, policy.quantizes)


def _tokens(asked: int | None, server: Server) -> int:
    """Tokens of the prompt, beside which the server has room for one."""
    room = CONTEXT if server.longest is None else server.longest - 1
    if asked is not None and server.longest is not None and asked > room:
        raise KvsearchError(
            f"{server.url} takes {room} tokens and one more, fewer than {asked}; lower --context, "
            "or start it with longer requests"
        )
    return min(CONTEXT, room) if asked is None else asked


def _start(policy: Policy, shape: ModelShape, tokens: int, prompt: int) -> int:
    """Tokens after which a policy first evicts or quantises.

    Raises:
        KvsearchError: they are over half of the text, or of what is generated.
    """
    found = 0 if policy.channels.active else min(changes(policy, shape, prompt), default=None)
    if found is not None and 2 * (found - prompt) <= tokens - prompt:
        return found
    if not prompt:
        assert found is not None, "a stream is compacted"
        raise KvsearchError(
            f"under this policy the cache is the full one until it has {found:,} tokens, so the "
            f"losses of {tokens:,} say too little; give --context {2 * found} or more"
        )
    raise KvsearchError(
        f"under this policy the cache is the full one for most of a prompt of {prompt:,} tokens "
        f"and {tokens - prompt:,} more, so that their losses say too little; raise --context"
    )


def changes(policy: Policy, shape: ModelShape, prompt: int = 0) -> Iterator[int]:
    """The same of each kind of layer: the first compaction that finds more than may stay."""
    for layer, _ in layout(policy, shape).after(prompt).distinct:
        own = layer.policy
        stays = [] if layer.target is None else [layer.target]
        if own.quantizes:
            stays.append(own.fp16_sinks + own.fp16_recent)
        if stays and (due := layer.clock.after(min(stays), prompt)) is not None:
            yield due


def compared(
    about: tuple[str, str, str, str],
    there: NDArray[np.float64],
    policy: NDArray[np.float64],
    full: NDArray[np.float64],
    start: int,
    quantizes: bool,
) -> Verified:
    """The verdict of losses `[T - 1]`; those from `start` on can differ."""
    before = float(np.abs(there - full)[:start].mean()) if start >= LEAST else None
    d, s = (policy - full)[start:], (there - full)[start:]
    off_policy, off_full, apart = (float(np.abs(x).mean()) for x in (s - d, s, d))
    square = float((d * d).mean())
    if square == 0:
        raise KvsearchError("this policy changes no loss of this text; raise --context")
    b = float((d * s).mean()) / square
    slope = interval(b + d * (s - b * d) / square)  # to first order: both means have errors
    near = NEAR_QUANTISED if quantizes else NEAR
    follows: Literal["policy", "full"] | None = None
    clear = off_policy < CLEAR * min(off_full, apart) and slope.lo > MOSTLY
    if before is not None and before > NOISE * apart and not clear:
        verdict = (
            "Neither can be told: where the policy changes nothing yet, the server is "
            f"{before:.4f} nats a token off, and all that the policy changes is {apart:.4f}; it "
            "may have another model or dtype (give --model and --dtype as there), or the policy "
            "changes too little."
        )
    elif off_policy < min(off_full, near * apart) and slope.lo > 0:
        follows = "policy"
        verdict = (
            f"The policy is active: the server is {off_policy:.4f} nats a token off what is "
            f"predicted under it, and {off_full:.4f} off the full cache."
        )
    elif off_full < min(off_policy, NEAR * apart) and slope.hi < 1:
        follows = "full"
        verdict = (
            "The server follows the full cache, or one nearly like it: it is "
            f"{off_full:.4f} nats a token off that, and {off_policy:.4f} off what is predicted "
            "under the policy; check that it was started with the policy, and that kvsearch is "
            "installed beside it."
        )
    else:
        verdict = (
            f"Neither: the server is {off_policy:.4f} nats a token off what is predicted under the "
            f"policy and {off_full:.4f} off the full cache, which are {apart:.4f} apart; it may "
            "run another policy or model, or more tokens (--context) may tell."
        )
    name, url, model, text = about
    return Verified(
        policy=name, server=url, model=model, text=text, tokens=d.size,
        nll_server=float(there[start:].mean()), nll_policy=float(policy[start:].mean()),
        nll_full=float(full[start:].mean()), off_policy=off_policy, off_full=off_full, apart=apart,
        off_before=before, slope=slope, follows=follows, verdict=verdict,
    )  # fmt: skip

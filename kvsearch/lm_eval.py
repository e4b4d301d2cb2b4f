"""The model `kvsearch` of lm-evaluation-harness: a Hugging Face model whose cache follows a policy.

lm-eval's own model `hf` scores log-likelihoods without a cache, so no cache policy changes them.
Here every request goes through a policy's cache: the context in one call, as a prompt; then the
continuation, which is replayed and equals a cache that is fed token by token
(`evaluation.answers`).
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

from huggingface_hub.utils.tqdm import tqdm
from torch import Tensor

from kvsearch.errors import SHORT, KvsearchError, PolicyError, quoted
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.evaluation.replay import deployed
from kvsearch.models.aliases import DEFAULT
from kvsearch.models.load import LoadedModel, folder_of
from kvsearch.models.shared import policy_file
from kvsearch.options.budget import BudgetConfig, bytes_of
from kvsearch.policy import Policy, check
from kvsearch.session.policies import check_names, is_method, method
from kvsearch.workloads.items import Ask, Item, Prompts, ids

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs
except ModuleNotFoundError as _error:
    raise KvsearchError("lm-eval is not installed: pip install 'kvsearch[lm-eval]'") from _error

__all__ = ["NAME", "KVSearchLM", "cli_evaluate"]

NAME = "kvsearch"  # for --model
ELSEWHERE = ("revision", "subfolder", "gguf_file")  # arguments with which lm-eval finds the files
CASTS = ("mixed_precision_dtype", "softmax_dtype")
logger = logging.getLogger(__name__)

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


@register_model(NAME)
class KVSearchLM(HFLM):
    """lm-eval's `HFLM` with a `PolicyCache` for every request.

    Importing this module registers it as `kvsearch`. Requests are computed one at a time; those
    with the same context, such as the choices of a question, share its prompt through a fork of the
    cache. Under the full cache, results are those of `hf` up to rounding: keys and values are kept
    in 16 bits, and log-probabilities are computed in fp32.

    Args:
        pretrained: alias, hub id, folder, `.gguf` file, or a model of transformers.
        policy: a policy, its file, a folder with one such as that of a run, or the name of a method
            (`kvsearch methods`). None is the full cache.
        budget: of a method, in fp16 slots per layer.
        budget_bytes: the same in bytes per sequence, or as `5MB`, instead.
        batch_size: 1.
        options: of `HFLM`, such as `dtype`, `device`, `peft` and `max_length`; a method is sized
            for sequences of `max_length` tokens, by default as many as the model has positions.

    Attributes:
        policy: what the caches hold.

    Raises:
        KvsearchError: an argument is wrong, in one sentence.
        ModelError: policies cannot be run on the model.
    """

    def __init__(
        self,
        pretrained: Any = DEFAULT,
        policy: Policy | str | None = None,
        budget: float | None = None,
        budget_bytes: int | str | None = None,
        batch_size: int | str = 1,
        **options: Any,
    ) -> None:
        if str(batch_size) != "1":
            raise KvsearchError(
                "policies are evaluated on one request at a time: leave batch_size at 1, got "
                f"{quoted(batch_size)}"
            )
        for name in CASTS:
            if options.get(name) is not None:
                raise KvsearchError(f"the model {NAME} does not take {name}; choose with dtype")
        size = _size(budget, budget_bytes)
        read = _read(policy, sized=size.sized)
        model, name = pretrained, "model"
        if isinstance(pretrained, str):
            name = pretrained
            if not any(options.get(option) for option in ELSEWHERE):
                model = str(folder_of(pretrained))
        super().__init__(pretrained=model, **options)
        self._loaded = LoadedModel.of(self.model, self.tokenizer, name)
        shape, longest = self._loaded.shape, self.max_length
        self.policy = read or method(str(policy), shape, size, context=longest, prompt=longest - 1)
        check(self.policy, shape, prompt=longest)
        if self.policy.anchors is not None and self.policy.anchors.insert:
            raise PolicyError("field anchors.insert: lm-eval's prompts have no inserted anchors")
        self._evaluator = Evaluator(self._loaded)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """As `_loglikelihood_tokens`, of texts."""
        for context, continuation in (request.args for request in requests):
            if not context:  # where lm-eval looks at the first token
                own = self.tok_encode(continuation, add_special_tokens=False)
                self._check((context, continuation), own)
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def _check(self, texts: tuple[str, str] | None, continuation: Sequence[int]) -> None:
        """Raise where `hf` stops at an assertion: there is nothing to score, or too much."""
        context, told = (quoted(text[-SHORT:]) for text in texts or ("", ""))
        if not continuation and texts is not None and texts[1]:
            raise KvsearchError(
                f"the continuation {told} has no token of its own behind the context {context}: "
                "one that begins there takes it in; let it begin with a space or another word, as "
                "with `target_delimiter: ' '` in the task"
            )
        if not continuation:
            raise KvsearchError(
                f"the continuation of {context} is empty; leave it out of the choices"
            )
        if len(continuation) > self.max_length:
            raise KvsearchError(
                f"the continuation {told} has {len(continuation)} tokens, and the model takes "
                f"{self.max_length}; leave it out of the task"
            )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation in nats, and whether it is the greedy one.

        Args:
            requests: texts (None of a window of a longer text), context and continuation.
            disable_tqdm: no progress.
            override_bs: without effect.

        Raises:
            KvsearchError: a continuation has no tokens of its own, or more than the model takes.
        """
        for texts, _, continuation in requests:
            self._check(texts, continuation)
        shared = dict[tuple[int, ...], list[int]]()  # requests by what of their context fits
        for i, (_, context, continuation) in enumerate(requests):
            most = self.max_length + 1 - len(continuation)  # the last token is not fed
            if len(context) > most:
                logger.warning(
                    "a context of %d tokens and a continuation of %d exceed the model's %d: only "
                    "the context's last %d are used",
                    len(context), len(continuation), self.max_length, most,
                )  # fmt: skip
            shared.setdefault(tuple(context[-most:]), []).append(i)
        found = [(0.0, False)] * len(requests)
        hidden = disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), disable=hidden, desc="log-likelihood requests") as bar:
            for context_ids in sorted(shared, key=len, reverse=True):
                mine = shared[context_ids]
                asks = tuple(Ask(ids(()), ids(requests[i][2])) for i in mine)
                item = Item("request", "request", ids(context_ids), asks)
                got = answers(
                    self._evaluator, self.policy, Prompts("lm-eval", (item,)), resident=False
                )
                for i, nll, tokens, exact in zip(mine, got.nll, got.tokens, got.exact, strict=True):
                    found[i], texts = (-float(nll) * int(tokens), bool(exact)), requests[i][0]
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, found[i])
                bar.update(len(mine))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As that of `hf`: what is generated after each prompt.

        Raises:
            KvsearchError: a prompt has no tokens, or the model takes no more than are generated.
        """
        for context, options in (request.args for request in requests):
            most = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if not 0 < most < self.max_length:
                raise KvsearchError(
                    f"{most} tokens are to be generated (max_gen_toks of the task), and the model "
                    f"takes {self.max_length} with those of the prompt: give from 1 to "
                    f"{self.max_length - 1}"
                )
            if not self.tok_batch_encode([context])[0].shape[1]:
                raise KvsearchError(
                    f"the prompt {quoted(context)} has no tokens, and nothing can be generated "
                    "after none; leave it out of the task"
                )
        found: list[str] = super().generate_until(requests, disable_tqdm)
        return found

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        """Tokens `[1, T]`: the prompt, and what `generate` makes of it with a cache of its own."""
        cache = deployed(self._loaded, self.policy)
        made: Tensor = super()._model_generate(
            context, max_length, stop, past_key_values=cache, **options
        )
        return made

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results: also the policy."""
        info: dict[str, Any] = super().get_model_info()
        return {**info, "policy": json.loads(self.policy.to_json())}


def _size(budget: Any, budget_bytes: Any) -> BudgetConfig:
    """A method's budget in slots or bytes; lm-eval's arguments are numbers or texts."""
    if budget is not None and not isinstance(budget, int | float):
        raise KvsearchError(f"budget must be a number of slots, got {quoted(budget)}")
    size = None if budget_bytes is None else bytes_of(budget_bytes)
    return BudgetConfig(budget_slots=budget, budget_bytes=size)


def _read(policy: Policy | str | None, *, sized: bool) -> Policy | None:
    """The policy that was given, or None of a method, which is sized for the model."""
    if isinstance(policy, str) and is_method(policy):
        check_names((policy,), sized=sized)
        return None
    if sized:
        raise KvsearchError(
            f"budget and budget_bytes size a method (`kvsearch methods`), got policy {_of(policy)}"
        )
    if policy is None:
        return Policy(name="full")
    return policy if isinstance(policy, Policy) else Policy.from_json(policy_file(policy))


def _of(policy: Policy | str | None) -> str:
    return quoted(policy.name if isinstance(policy, Policy) else policy)

"""What a running OpenAI-compatible server says: its model, and log-probabilities of a prompt.

A prompt goes there as token ids and comes back with `echo` and `logprobs`, which are of OpenAI's
completions and which vLLM has.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import ModelError, RunError, quoted, reason

KEY = "OPENAI_API_KEY"  # in the environment, where OpenAI's own client has it
LOOK, WORK = 10, 600  # seconds until it has to answer: at all, and for a prompt
SPACES = " \t\n▁Ġ"  # some servers write a token's space in these ways, or not at all


@dataclass(frozen=True)
class Server:
    """A server and its model.

    Attributes:
        url: where its `/v1` is.
        model: the name of its model in requests.
        source: the folder or hub id that it has the model from; the name where it does not say.
        longest: tokens of the longest request, if it says so.
    """

    url: str
    model: str
    source: str
    longest: int | None

    @classmethod
    def find(cls, url: str, named: str | None = None) -> "Server":
        """The server at `url`, and of its models the one that is `named`, or else the first.

        Raises:
            RunError: there is no server, or it has no models.
        """
        url = url.rstrip("/").removesuffix("/v1")
        found = _ask(url, "/v1/models", LOOK)
        models = found.get("data") if isinstance(found, dict) else None
        known = [m for m in models or () if isinstance(m, dict) and isinstance(m.get("id"), str)]
        if not known:
            raise RunError(f"{url}/v1/models names no model; {_SERVERS}")
        one = next((m for m in known if named in (m["id"], m.get("root"))), known[0])
        root, longest = one.get("root"), one.get("max_model_len")
        source = root if isinstance(root, str) else one["id"]
        return cls(url, one["id"], source, longest if isinstance(longest, int) else None)

    def nll(
        self, ids: Sequence[int], words: Sequence[str], more: int = 0
    ) -> tuple[NDArray[np.float64], list[int]]:
        """Losses of a prompt's tokens after the first, and of those that it goes on with, in nats.

        Args:
            ids: tokens of the prompt `[T]`.
            words: the text of each, by our tokenizer.
            more: tokens that it is to go on with, drawn as its model has them.

        Returns:
            The losses `[T - 1 + more]`, and the tokens that it went on with.

        Raises:
            RunError: it does not answer, or without log-probabilities of the prompt, or tokens.
            ModelError: its tokenizer is another one.
        """
        wanted: dict[str, Any] = {  # its model's own temperature may be another one
            "model": self.model, "prompt": [*ids], "max_tokens": more or 1, "temperature": 1,
            "echo": True, "logprobs": 1,
        }  # fmt: skip
        if more:
            # no seed: with one, vLLM 0.32 ends on a CPU when a prompt comes in pieces
            wanted |= {"ignore_eos": True, "return_token_ids": True}
        found = _ask(self.url, "/v1/completions", WORK, wanted)
        try:
            told = found["choices"][0]["logprobs"]
            logprobs, tokens = told["token_logprobs"], told.get("tokens") or ()
            nll = -np.array(logprobs[1 : len(ids) + more], dtype=np.float64)
        except (LookupError, TypeError, ValueError, AttributeError):
            logprobs, tokens, nll = (), (), np.empty(0)
        if not nll.size or not np.isfinite(nll).all():
            raise RunError(
                f"{self.url} gives no log-probabilities of a prompt (`echo` with `logprobs` in "
                "/v1/completions), so that nothing can be compared; vLLM gives them"
            )
        if len(logprobs) not in (len(ids) + more, len(ids) + max(1, more)):  # with what it drew
            raise ModelError(
                f"{self.url} gives {len(logprobs):,} log-probabilities for {len(ids):,} tokens: "
                f"{_ANOTHER}"
            )
        # no part of a character: what stands for one differs
        known = [
            (a, b, i) for a, b, i in zip(tokens, words, ids, strict=False) if "\ufffd" not in b
        ]
        alike = [f"token_id:{i}" == a or a.strip(SPACES) == b.strip(SPACES) for a, b, i in known]
        if 2 * sum(alike) < len(alike):
            a, b, i = known[alike.index(False)]
            raise ModelError(
                f"{self.url} reads token {i} as {quoted(a)}, and it is {quoted(b)} here: {_ANOTHER}"
            )
        drawn = found["choices"][0].get("token_ids") if more else []
        if not isinstance(drawn, list) or len(drawn) != more:
            raise RunError(
                f"{self.url} does not name the tokens that it generates (`return_token_ids`), and "
                "a policy that compacts after the prompt changes only those; vLLM names them"
            )
        return nll, drawn


_SERVERS = "--server is the address of an OpenAI-compatible server, such as http://localhost:8000"
_ANOTHER = "its tokenizer is another one; give --model the model that it serves"


def _ask(url: str, path: str, seconds: float, body: Any = None) -> Any:
    """The JSON that a server answers."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url + path, data, headers), timeout=seconds) as answer:
            return json.loads(answer.read())
    except HTTPError as e:
        told = _message(e)
        hint = f"set {KEY}" if e.code in (401, 403) else _SERVERS
        raise RunError(
            f"{url}{path} answered {e.code} {e.reason}{told and f' ({told})'}; {hint}"
        ) from e
    except (OSError, HTTPException) as e:
        why = e.reason if isinstance(e, URLError) else e
        told = reason(why) if isinstance(why, Exception) else str(why)
        raise RunError(f"{url} cannot be reached ({told}); {_SERVERS}") from e
    except ValueError as e:  # no JSON, or no address
        raise RunError(f"{url}{path} answered no JSON; {_SERVERS}") from e


def _message(error: HTTPError) -> str:
    """What a server says of its refusal, in OpenAI's form or as it is."""
    try:
        text = error.read().decode(errors="replace")
        found = json.loads(text)
        return quoted(found["error"]["message"], 200)
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return ""

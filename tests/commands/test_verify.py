"""Whether a server has a policy: a fake one answers as our evaluator does under some policy."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from kvsearch import LoadedModel, verify
from kvsearch.commands.verify import changes, compared
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.policy import Budgets, Policy, Quantizer, Tier
from kvsearch.rules import Attention, Reread
from tests.command import call

TOKENS, FIRST = 320, 40  # compared, and those after which the policy first evicts
ASKED = Policy(slots=40, interval=8, sinks=4, recent_window=8, rule=Attention())
FOUR = Tier(key_bits=4, value_bits=4)
SPARED = Quantizer(group=8, fp16_sinks=True, fp16_recent=True)
Answer = Callable[[list[int]], list[float]]  # log-probabilities of tokens after the first


class Fake(ThreadingHTTPServer):
    """A server on a port of its own; what it answers can be changed."""

    daemon_threads = True

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: Any = {"data": [{"id": "m", "root": str(folder), "max_model_len": TOKENS + 1}]}
        self.word = lambda i: tokenizer.decode([i])
        self.answer: Answer = lambda ids: [-1.0] * (len(ids) - 1)
        self.change: Callable[[dict[str, Any]], Any] = lambda told: told
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Models, and completions with log-probabilities of what was asked, as vLLM has them."""

    server: Fake

    def log_message(self, *_: Any) -> None: ...

    def _send(self, told: Any, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(told if isinstance(told, bytes) else json.dumps(told).encode())

    def do_GET(self) -> None:
        self._send(self.server.models if self.path == "/v1/models" else {}, 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        ids = body["prompt"]
        if body["model"] != "m" or len(ids) + body["max_tokens"] > TOKENS + 1 or not body["echo"]:
            self._send({"error": {"message": "unexpected\nrequest"}}, 400)
            return
        drawn = [(7 * i) % 250 for i in range(body["max_tokens"])]
        told = {"token_logprobs": [None, *self.server.answer([*ids, *drawn])],
                "tokens": [*map(self.server.word, ids), *"x" * len(drawn)]}  # fmt: skip
        named = {"token_ids": drawn} if body.get("return_token_ids") else {}
        found = self.server.change({"choices": [{"logprobs": told, **named}]})
        self._send(*found) if isinstance(found, tuple) else self._send(found)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), device="cpu")


@pytest.fixture
def server(tiny_folder: Path, tiny_tokenizer: Any) -> Iterator[Fake]:
    with Fake(tiny_folder, tiny_tokenizer) as fake:
        Thread(target=fake.serve_forever, args=(0.01,), daemon=True).start()
        yield fake
        fake.shutdown()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "asked.json").write_text(ASKED.to_json())
    return tmp_path / "asked.json"


def under(
    policy: Policy, model: LoadedModel, noise: float = 0.0, of: float = 1.0, prompt: int = 0
) -> Answer:
    """Answers of a server with a policy, and roundings of its own."""

    def answer(ids: list[int]) -> list[float]:
        asked = Evaluator(model).quality(policy, np.array([ids]), prompt=prompt, resident=False)
        nll = asked.nll[0]
        rough = np.random.default_rng(0).normal(0, noise, nll.size)
        return [-float(x) for x in of * nll + rough]

    return answer


@pytest.mark.parametrize(
    ("served", "noise", "code", "said"),
    [
        (ASKED, 0.0, 0, "The policy is active"),
        (ASKED, 0.1, 0, "The policy is active"),
        (Policy(), 0.0, 3, "The server follows the full cache"),
        (Policy(), 0.1, 3, "The server follows the full cache"),
        # the same budget, other tokens: it differs from the full cache likewise
        (ASKED.model_copy(update={"rule": None}), 0.0, 3, "Neither: "),
        (ASKED, 1.0, 3, "Neither can be told: where the policy changes nothing yet,"),
    ],
    ids=["policy", "policy rounded", "full", "full rounded", "another policy", "another model"],
)
def test_the_prediction_that_a_server_follows(
    served: Policy, noise: float, code: int, said: str, server: Fake, model: LoadedModel,
    file: Path, prose: Path, capsys: Any,
) -> None:  # fmt: skip
    """`noise` is in units of what the policy changes of a loss."""
    ids = np.arange(TOKENS)[None] % 250
    full, mine = (Evaluator(model).quality(p, ids).nll for p in (Policy(), ASKED))
    server.answer = under(served, model, noise * float(np.abs(full - mine)[0, FIRST:].mean()))
    argv = ["verify", str(file), "--server", server.url, "--text", str(prose), "--quiet"]
    ended, out, err = call(argv, capsys)
    assert (ended, err) == (code, "") and said in out
    (asked,) = server.asked
    assert len(asked["prompt"]) == TOKENS  # as many as the server takes
    ended, out, _ = call([*argv, "--json"], capsys)
    found = json.loads(out)
    assert ended == code and found["active"] == (code == 0) == (found["follows"] == "policy")
    assert found["tokens"] == TOKENS - 1 - FIRST and found["verdict"].startswith(said)
    if not noise:
        near = {"policy": "off_policy", "full": "off_full", None: "off_before"}[found["follows"]]
        assert found[near] < 1e-6 and found["apart"] > 1e-3
        assert found["follows"] is None or abs(found["slope"]["mean"] - (code == 0)) < 1e-3


def test_a_few_first_tokens_do_not_outweigh_all_that_follow() -> None:
    """A server in bf16 is further off on the first tokens than half of what a policy changes."""
    draw = np.random.default_rng(0)
    full, change = draw.uniform(1, 4, 300), draw.normal(0, 0.1, 300)
    change[:16] = 0
    noise = np.where(np.arange(300) < 16, 0.06, 0) + draw.normal(0, 0.04, 300)
    about = "asked", "http://a", "m", "t"
    for there, follows in ((full + change + noise, "policy"), (full + noise, None)):
        found = compared(about, there, full + change, full, 16, quantizes=False)
        assert found.follows == follows and found.off_before is not None
        assert found.off_before > found.apart / 2


@pytest.mark.parametrize("trigger", ["prompt", "prompt+stream", "generation"])
def test_a_policy_that_waits_for_the_prompt_is_told_by_what_is_generated(
    trigger: str, server: Fake, model: LoadedModel, file: Path, prose: Path, capsys: Any
) -> None:
    asked = Policy.build(ASKED.plain() | {"trigger": trigger, "slots": 24})
    file.write_text(asked.to_json())
    argv = ["verify", str(file), "--server", server.url, "--text", str(prose), "--quiet", "--json"]
    for served, code in ((asked, 0), (Policy(), 3)):
        server.answer = under(served, model, prompt=240)
        ended, out, err = call(argv, capsys)
        found = json.loads(out)
        assert (ended, err) == (code, "") and len(server.asked[-1]["prompt"]) == 240
        assert found["follows"] == ("full" if code else "policy") and found["off_before"] < 1e-6
    server.change = lambda told: {"choices": [{"logprobs": told["choices"][0]["logprobs"]}]}
    ended, out, err = call(argv, capsys)
    assert ended == 2 and "does not name the tokens that it generates" in err


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        (ASKED, FIRST),
        (Policy(slots=40, interval=1), 40),
        (Policy(slots=44, interval=8), 40),
        (Policy(interval=8, tiers=(FOUR,), quantizer=Quantizer(group=8)), 8),
        (Policy(interval=8, sinks=8, recent_window=16, tiers=(FOUR,), quantizer=SPARED), 32),
        (Policy(slots=64, interval=8, budgets=Budgets(kind="pyramid", beta=4)), 16),
    ],
)  # fmt: skip
def test_losses_differ_from_the_first_compaction_that_changes_anything(
    policy: Policy, first: int, model: LoadedModel
) -> None:
    """Where they do not differ yet, a server says how alike the models are."""
    ids = np.random.default_rng(0).integers(0, 250, (1, 96))
    mine, full = (Evaluator(model).quality(p, ids).nll[0] for p in (policy, Policy()))
    off = np.abs(mine - full)
    assert min(changes(policy, model.shape)) == first
    assert off[:first].max() < 1e-5 < off[first:].max()
    assert int(np.argmax(off > 1e-5)) == first


def more(told: dict[str, Any]) -> dict[str, Any]:
    told["choices"][0]["logprobs"]["token_logprobs"].append(-1.0)
    return told


def respelt(told: dict[str, Any]) -> dict[str, Any]:
    told["choices"][0]["logprobs"]["tokens"].reverse()
    return told


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: b"<html>", "answered no JSON"),
        (
            lambda _: ({"error": {"message": "too\nbusy"}}, 503),
            "answered 503 Service Unavailable ('too",
        ),
        (lambda _: ({}, 401), "set OPENAI_API_KEY"),
        (lambda _: {"choices": [{"text": "x", "logprobs": None}]}, "gives no log-probabilities"),
        (lambda _: {"choices": [{"logprobs": {"token_logprobs": [-1.0]}}]}, "no log-probabilities"),
        (more, "gives 322 log-probabilities for 320 tokens: its tokenizer is another"),
        (respelt, "its tokenizer is another one; give --model"),
    ],
    ids=[
        "no JSON",
        "busy",
        "key",
        "no log-probabilities",
        "no echo",
        "more tokens",
        "other tokens",
    ],
)
def test_an_answer_without_what_is_needed_is_one_sentence_before_a_model_is_loaded(
    change: Any, said: str, server: Fake, file: Path, prose: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvsearch.session.load.load_model", None)
    server.change = change
    argv = ["verify", str(file), "--server", server.url, "--text", str(prose), "--quiet"]
    code, out, err = call(argv, capsys)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("given", "policy", "said"),
    [
        (["--server", "http://127.0.0.1:1"], ASKED, "http://127.0.0.1:1 cannot be reached ("),
        (["--server", "localhost:8000"], ASKED, "--server must be an address such as http://"),
        (["--server", "http://["], ASKED, "--server"),
        (["--context", "400"], ASKED, "takes 320 tokens and one more, fewer than 400"),
        (["--context", "79"], ASKED, "the full one until it has 40 tokens"),
        (["--text", "no.txt"], ASKED, "there is no text file"),
        (["--model", "nowhere/"], ASKED, "there is no file or folder nowhere/"),
        ([], Policy(slots=400), "give --context 800 or more"),
        ([], Policy(), "this policy is the full cache"),
        ([], ASKED.model_copy(update={"trigger": "prompt", "slots": 400}), "raise --context"),
        ([], Policy(slots=40, rule=Reread(), trigger="prompt"), "reads a prompt twice"),
        ([], ASKED.model_copy(update={"sinks": 64}), "slots"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_before_the_server_gets_a_prompt(
    given: list[str], policy: Policy, said: str, server: Fake, file: Path, prose: Path,
    capsys: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvsearch.session.load.load_model", None)
    file.write_text(policy.to_json())
    argv = ["verify", str(file), "--server", server.url, "--text", str(prose), *given]
    code, out, err = call([*argv, "--quiet"], capsys)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1
    assert not server.asked


def test_the_model_is_the_one_that_is_named(
    server: Fake, model: LoadedModel, prose: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others, and under a name that leads nowhere here."""
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    server.models["data"].insert(0, {"id": "another"})
    server.models["data"][1]["root"] = model.name
    server.answer = under(ASKED, model)
    found = verify(ASKED, f"{server.url}/v1/", model=model, text=prose, context=160)
    assert found.active and (found.model, found.tokens) == ("m", 159 - FIRST)
    assert found.nll_server == pytest.approx(found.nll_policy, abs=1e-6)
    assert server.keys == ["Bearer sesame"]


def test_the_slope_is_that_of_least_squares_and_its_interval_holds() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(60):
        full, d = rng.exponential(3, 1023), rng.standard_t(3, 1023)
        there = full + 0.7 * d + rng.normal(0, 0.5, 1023)
        slope = compared(("", "", "", ""), there, full + d, full, 0, False).slope
        best, *_ = np.linalg.lstsq(d[:, None], there - full)
        assert slope.mean == pytest.approx(float(best[0]))
        assert slope.hi - slope.lo < 0.3
        held += slope.lo < 0.7 < slope.hi
    assert 50 <= held <= 60

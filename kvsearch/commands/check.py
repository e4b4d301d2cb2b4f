"""`kvsearch check`: what runs on this machine, and whether it computes what it should."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from kvsearch.cache.cuda.graphs import cuda_graphs
from kvsearch.cache.huggingface import PolicyCache
from kvsearch.models.load import device_named, dtype_named
from kvsearch.models.memory import free_memory
from kvsearch.models.read import brief, quiet
from kvsearch.policy import Policy, Quantizer, Tier
from kvsearch.rules import Attention
from kvsearch.session.progress import Shown
from kvsearch_kernels.ahead import compile_ahead, ops
from kvsearch_kernels.proofs import Proof, proofs

PACKAGES = ("kvsearch", "torch", "triton", "transformers", "numba", "flash-attn")
PROMPT, TOKENS = 120, 40  # of the model whose tokens are replayed
POLICY = Policy(
    slots=80, interval=8, sinks=4, recent_window=16, rule=Attention(beta=1),
    tiers=(Tier(key_bits=4, value_bits=4),), quantizer=Quantizer(group=64),
)  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """What was found.

    Attributes:
        device: where, in words.
        dtype: of keys and values.
        versions: of Python and packages; None of one that is not installed.
        ops: each op's probe.
        graphs: whether replayed tokens are those that are computed, in a sentence; None where there
            are no CUDA graphs.
        wrong: what is wrong, in sentences.
    """

    device: str
    dtype: str
    versions: dict[str, str | None]
    ops: tuple[Proof, ...]
    graphs: str | None
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        """A table for people."""
        had = (f"{name} {v}" for name, v in self.versions.items() if v is not None)
        lines = [f"{self.device}, {self.dtype}", ", ".join(had), ""]
        lines.append(f"{'op':<20}{'runs on (cases of its probe)':<34}{'s':>6}  result")
        for x in self.ops:
            took = ", ".join(f"{impl} {n}" for impl, n in x.took.items())
            lines.append(
                f"{x.op:<20}{took:<34}{x.seconds:>6.1f}  {'WRONG' if x.faults else 'right'}"
            )
        lines += ["", *([self.graphs] if self.graphs else []), *self.wrong]
        if not self.wrong:
            lines.append("nothing is wrong")
        return "\n".join(lines)


def check(shown: Shown, *, device: str, dtype: str) -> Checked:
    """Run every op's probe on a device, and on a GPU a small model's tokens as CUDA graphs.

    Raises:
        ModelError: there is no such device or dtype, or the GPU cannot be used.
    """
    where = device_named(device)
    kind = dtype_named(dtype, where)
    free_memory(where)  # refuses a GPU that cannot be used
    compile_ahead(where, kind, shown.say)
    words = _words(where)  # before anything that could leave the GPU unusable
    found = list[Proof]()
    with shown.step("ops", len(ops())) as step:
        for proof in proofs(where, kind):
            found.append(proof)
            step.advance(1, proof.op)
    wrong = [f"{proof.op}: {fault}" for proof in found for fault in proof.faults]
    graphs = None
    if where.type == "cuda":
        try:
            graphs, right = _graphs(where, kind)
            wrong += [] if right else [graphs]
        except Exception as error:  # such as CUDA's, of an op that has read where it must not
            wrong.append(f"graphs: {type(error).__name__}: {brief(error)}")
    return Checked(
        words, str(kind).removeprefix("torch."), dict(_versions()), tuple(found), graphs,
        tuple(wrong),
    )  # fmt: skip


def _versions() -> Iterator[tuple[str, str | None]]:
    yield "python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None


def _words(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
    about = torch.cuda.get_device_properties(device)
    return (
        f"{device} ({about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.0f} "
        f"GiB, CUDA {torch.version.cuda})"
    )


def _graphs(device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """How many tokens of a small model are replays, and how far they are from computed ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=2, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (1, PROMPT + TOKENS), generator=draw).to(device)
    torch.manual_seed(0)
    with quiet():
        model = LlamaForCausalLM(config).to(device, dtype).eval()

    def decode() -> torch.Tensor:
        cache = PolicyCache(POLICY, model)
        model(ids[:, :PROMPT], past_key_values=cache)
        outs = [model(x, past_key_values=cache).logits for x in ids[:, PROMPT:].split(1, 1)]
        return torch.cat(outs, 1).float()

    with torch.no_grad():
        want = decode()
        with cuda_graphs(model) as tokens:
            got = decode()
    off = float((got - want).abs().max() / want.abs().max())
    sentence = (
        f"{tokens.repeated} of {TOKENS} tokens of a small model were replays of a CUDA graph; "
        f"logits are off by {off:.1g} of the largest one at most"
    )
    return sentence, tokens.repeated > TOKENS // 2 and off < 1e-3

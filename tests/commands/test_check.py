"""`kvsearch check`: every op's probe, what is wrong, and what an exit code says of it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvsearch.cli import main
from kvsearch.commands import check
from kvsearch_kernels.ahead import ops
from kvsearch_kernels.evict_in_place import evict_in_place
from kvsearch_kernels.proofs import Proof, proofs
from tests.command import call

CPU = torch.device("cpu")


def test_every_op_is_right_here(capsys: Any) -> None:
    code, out, _ = call(["check", "--json", "--quiet"], capsys)
    found = json.loads(out)
    assert code == 0 and not found["wrong"] and found["graphs"] is None
    assert {op["op"] for op in found["ops"]} == set(ops())
    assert all(sum(op["took"].values()) > 0 for op in found["ops"])
    assert found["versions"]["torch"] == torch.__version__


def test_a_wrong_op_is_named_and_ends_with_1(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "proofs", lambda *where: proofs(*where))
    monkeypatch.setattr("kvsearch_kernels.proofs.ops", lambda: {"evict_in_place": evict_in_place})
    real = type(evict_in_place).record

    def record(op: Any, ran: Any, *args: Any, **kwargs: Any) -> Any:
        return real(op, ran, *args, **kwargs) + 1

    monkeypatch.setattr(type(evict_in_place), "record", record)
    code, out, _ = call(["check", "--quiet"], capsys)
    line = next(x for x in out.splitlines() if x.startswith("evict_in_place "))
    assert code == 1 and line.endswith("WRONG")
    assert any(x.startswith("evict_in_place: case 0: ") for x in out.splitlines())


def test_a_kernel_that_auto_passes_over_is_wrong_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference runs then, and is right: only a warning says it."""
    monkeypatch.setattr("kvsearch_kernels.proofs.ops", lambda: {"evict_in_place": evict_in_place})
    real = type(evict_in_place).pick

    def pick(op: Any, *args: Any, **kwargs: Any) -> str:
        import warnings

        warnings.warn(
            "auto passes over evict_in_place[triton] on cpu: it is off", RuntimeWarning, 1
        )
        return real(op, *args, **kwargs)

    monkeypatch.setattr(type(evict_in_place), "pick", pick)
    (proof,) = proofs(CPU, torch.float32)
    assert set(proof.took) == {"reference", "numba"}
    assert proof.faults and set(proof.faults) == {
        "auto passes over evict_in_place[triton] on cpu: it is off"
    }


def test_tokens_that_are_not_replayed_are_said() -> None:
    """Without a GPU none is, so the check of a GPU would fail; what is computed agrees."""
    sentence, right = check._graphs(CPU, torch.float32)
    assert sentence.startswith("0 of 40 tokens") and "off by 0 of" in sentence
    assert not right


def test_what_ends_the_graphs_does_not_hide_which_op_failed(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kernel that read where it must not, CUDA refuses whatever follows."""
    dead: list[bool] = []

    def refuse(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nIt may be late")

    def asked(*_: Any) -> str:
        assert not dead
        return "an H200"

    def tried(*_: Any) -> Iterator[Proof]:
        dead.append(True)
        yield Proof("evict_in_place", {}, ("case 0: AcceleratorError",), 0.1)

    monkeypatch.setattr(check, "device_named", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(check, "free_memory", lambda _: 1 << 40)
    monkeypatch.setattr(check, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(check, "_words", asked)
    monkeypatch.setattr(check, "proofs", tried)
    monkeypatch.setattr(check, "_graphs", refuse)
    code, out, _ = call(["check", "--quiet"], capsys)
    assert code == 1 and out.startswith("an H200, bfloat16")
    assert "evict_in_place: case 0: AcceleratorError" in out.splitlines()
    assert out.splitlines()[-1] == "graphs: AcceleratorError: CUDA error: an illegal memory access"


def test_a_device_that_is_not_there_is_named(capsys: Any) -> None:
    with pytest.raises(SystemExit) as done:
        main(["check", "--device", "cuda:9"])
    assert done.value.code == 2
    assert "device cuda:9 is not there" in capsys.readouterr().err

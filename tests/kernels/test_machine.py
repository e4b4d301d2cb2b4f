"""Kernels as Triton compiles them, carried out; and that the machine notices what is wrong."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from machine.driver import machine
from machine.proving import results
from test_references import OPS

F16, BF16 = torch.float16, torch.bfloat16
NAMED = {op.name: op for op in OPS}

# What takes a few seconds each; `python -m machine` runs all cases, types and targets.
SOME = [
    ("append_kv", BF16, 90, 0), ("choose_slots", F16, 90, 0), ("gather_rows", F16, 90, 2),
    ("copy_rows", F16, 90, 2), ("quantize_kv", F16, 90, 3), ("dequantize_kv", BF16, 90, 3),
    ("repack_kv", F16, 90, 3), ("settle_kv", F16, 90, 8), ("tally", F16, 90, 3),
    ("lifetime_attention", F16, 90, 3), ("lifetime_attention", BF16, 80, 3),
    ("decode_attention", F16, 90, 13), ("decode_attention", F16, 80, 5),
    ("decode_step", F16, 90, 6),
]  # fmt: skip


def one(name, dtype, case):
    *_, last = results(NAMED[name], dtype, case + 1, first=case)
    assert last.launches, f"{name}: nothing was launched"
    return last.reason


@pytest.mark.parametrize(("name", "dtype", "arch", "case"), SOME)
def test_what_was_compiled_computes_what_it_should(name, dtype, arch, case):
    with machine(arch):
        assert one(name, dtype, case) is None


def without(name):
    """Lines of this instruction do nothing."""
    return lambda ptx: re.sub(rf"^\s*(?:@\S+ )?{re.escape(name)}\b[^;]*;", "", ptx, flags=re.M)


def instead(old, new, count=0):
    """`old` is `new`, a regular expression's."""
    return lambda ptx: re.sub(old, new, ptx, count=count)


# Of attention with 8 warps: target, what is done to the text, and what the reason has to say.
WRONG = {
    "copies that nobody waits for": (80, without("cp.async.wait_group"), ""),
    "copies that are waited for too late": (
        80, instead(r"(cp\.async\.wait_group\s+)\d", r"\g<1>7"), "",
    ),
    "no barriers": (80, without("bar.sync"), "without a barrier|in no tensor"),
    "keys that are not turned": (80, instead(r"\.x4\.trans\.", ".x4."), ""),
    "a copy from far away": (
        80, instead(r"(cp\.async\.cg\S+ \[ %r\d+ \+ 0 \], \[ %rd\d+ \+) 0", r"\1 1073741824"),
        "is in no tensor",
    ),
    "an odd address": (
        80, instead(r"(cp\.async\.cg\S+ \[ %r\d+ \+ 0 \], \[ %rd\d+ \+) 0", r"\1 2"), "odd place",
    ),
    "a product that is not waited for": (90, without("wgmma.wait_group.sync.aligned"), ""),
    "an exponent to another base": (90, instead(r"ex2\.approx\.ftz", "tanh.approx"), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name):
    arch, edit, said = WRONG[name]
    changed = []

    def changing(ptx):
        changed.append(edit(ptx) != ptx)
        return edit(ptx)

    with machine(arch, changing):
        reason = one("lifetime_attention", F16, 3)
    assert any(changed)
    assert found(reason)
    assert re.search(said, reason), reason


def found(reason):
    """Whether the machine or the probe has found something, and neither has failed itself."""
    return reason is not None and not re.match(r"\w+(Error|Exception|Warning):", reason)


def test_wrong_asm_is_found():
    """What the interpreter cannot see: there the asm is other code."""
    edit = instead(r"prmt\.b32 (%r\d+), (\w+), (\w+), 0x6240", r"prmt.b32 \1, \2, \3, 0x6204")
    with machine(90, edit):
        assert found(one("decode_attention", F16, 13))

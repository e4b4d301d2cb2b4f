"""Compile kernels for a GPU that is not there, and read what the machine code costs."""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvsearch_kernels.launch import FUSED

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
BUDGETS = Path(__file__).parents[2] / "kernels/budgets.json"
SM90 = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True)
class Cost:
    """What one compiled kernel needs.

    Attributes:
        registers: per thread.
        stack: bytes of local memory per thread; above 0 is a spill.
        shared: bytes of shared memory per program.
        instructions: in the whole kernel.
        loop: in the longest innermost loop that uses tensor cores, or any, 0 if there is none.
        tensor, wide, spills: tensor-core instructions, 128-bit loads, loads and stores of spills.
        hasty: loads of that loop that it waits for soon after it has asked for them.
        detours: wide stores to shared memory in that loop, of what the tensor cores take next.
    """

    registers: int
    stack: int
    shared: int
    instructions: int
    loop: int
    tensor: int
    wide: int
    spills: int
    hasty: tuple[str, ...]
    detours: int


def compile_kernel(
    fn: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    warps: int,
    stages: int,
    target: GPUTarget = SM90,
) -> Cost:
    """Compile `fn` as a launch with aligned pointers and strides would, and count.

    `types` gives the Triton type of each argument by name; a name ending in `!` marks an integer
    as a multiple of 16.
    """
    plain = {n.rstrip("!"): t for n, t in types.items()}
    even = {n.rstrip("!") for n in types if n.endswith("!")}
    signature = {n: "constexpr" if n in constants else plain[n] for n in fn.arg_names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(fn.arg_names)
        if signature[n].startswith("*") or n in even
    }
    source = ASTSource(fn=fn, signature=signature, constexprs=dict(constants), attrs=attrs)
    built = triton.compile(
        source, target=target, options={**FUSED, "num_warps": warps, "num_stages": stages}
    )
    assert not (summed := torn_sums(built.asm["ttgir"])), summed
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        text = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Cost(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=built.metadata.shared,
        instructions=len(_code(text)),
        loop=len(loop := _loop(text)),
        tensor=_count(text, r"HGMMA|HMMA|IMMA|QGMMA"),
        wide=_count(text, r"LDG\.E\.\S*128|LDGSTS\S*128|UTMALDG"),
        spills=_count(text, r"LDL|STL"),
        hasty=_hasty(loop),
        detours=_count("\n".join(loop), r"STS\.(?:64|128)"),
    )


def torn_sums(ttgir: str) -> list[str]:
    """Layouts of sums that were wrong on an H200, with Triton 3.6.

    In these the warps that share an axis are not neighbours: those of another are in between.
    """
    warps = {
        name: json.loads(bases)
        for name, bases in re.findall(
            r"^(#\w+) = #ttg\.linear<\{.*?warp = (\[.*?\]), bl", ttgir, re.M
        )
    }
    torn = []
    for name in re.findall(
        r'"tt\.reduce"\([^)]*\) <\{axis[^:]*:.*?\}\) : \(.*?(#\w+)>', ttgir, re.S
    ):
        axes = [next((i for i, x in enumerate(basis) if x), -1) for basis in warps.get(name, [])]
        runs = [axis for i, axis in enumerate(axes) if i == 0 or axes[i - 1] != axis]
        if len(runs) != len({*runs}):
            torn.append(f"{name}: {warps[name]}")
    return torn


def types(
    fn: Any, pointers: Mapping[str, str], numbers: str = "", even: str = ""
) -> dict[str, str]:
    """Type of each argument of `fn`, the rest being 32-bit integers.

    Args:
        fn: the kernel.
        pointers: names, separated by spaces, to what they point to; later entries win.
        numbers: fp32 scalars.
        even: integers that are multiples of 16.
    """
    named = {n: f"*{kind}" for names, kind in pointers.items() for n in names.split()}
    named |= dict.fromkeys(numbers.split(), "fp32")
    named |= {f"{n}!": "i32" for n in even.split()}
    taken = {n.rstrip("!") for n in named}
    return named | {n: "i32" for n in fn.arg_names if n not in taken}


def _run(tool: str, *args: str) -> str:
    return subprocess.run(
        [str(TOOLS / tool), *args], capture_output=True, text=True, check=True
    ).stdout


def _count(text: str, pattern: str) -> int:
    return len(re.findall(rf"\b(?:{pattern})", text))


def _code(text: str) -> list[str]:
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*)$", text, re.M)


def _loop(text: str) -> list[str]:
    """The longest innermost loop, of those with tensor-core work if there are any."""
    labels: dict[str, int] = {}
    code: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*)$", line):
            code.append(found[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", found[1])
            if back and labels.get(back[1], len(code)) < len(code) - 1:
                loops.append((labels[back[1]], len(code)))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    heavy = [(a, b) for a, b in inner if re.search("HGMMA|HMMA", " ".join(code[a:b]))]
    return max((code[a:b] for a, b in heavy or inner), key=len, default=[])


def _hasty(loop: list[str]) -> tuple[str, ...]:
    """Loads whose result a loop needs within half a turn, and waits for all copies to arrive.

    A copy to shared memory is waited for by its number: `DEPBAR.LE SB0, 0x0` leaves none under way.
    """
    found = [line for line in loop if re.match(r"DEPBAR\.LE SB0, 0x0", line)]
    for i, line in enumerate(loop):
        if load := re.search(r"\bLDG\.\S+ (R\d+),", line):
            soon = loop[i + 1 : i + len(loop) // 2]
            reads = (x for x in soon if re.search(rf"[,\[!-]\s*\|?{load[1]}\b", x))
            found += [line for _ in [next(reads, None)] if _]
    return tuple(found)


def check(
    name: str, cost: Cost, *, elements: int, warps: int, tensor: bool, wide: bool = True
) -> None:
    """Assert that a kernel spills nothing, fits, and stays inside its budget.

    Args:
        name: key in `kernels/budgets.json`.
        cost: what was compiled.
        elements: what one turn of the loop (or the whole kernel, without a loop) gets done.
        warps: of a program.
        tensor: whether tensor-core instructions are expected.
        wide: whether 128-bit loads are.
    """
    assert cost.stack == 0, f"{name} spills: {cost}"
    assert cost.spills == 0, f"{name} spills: {cost}"
    assert cost.registers <= 255
    assert cost.shared <= SHARED_LIMIT, f"{name}: {cost}"
    assert cost.wide > 0 or not wide, f"{name} has no 128-bit load: {cost}"
    assert cost.tensor > 0 or not tensor, f"{name} has no tensor-core instruction: {cost}"
    per_element = round((cost.loop or cost.instructions) * warps / elements, 4)
    table = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {"kernels": {}}
    if os.environ.get("KVSEARCH_WRITE_BUDGETS") == "1":
        table["unit"] = "warp instructions per element of the main loop, as compiled x 1.03"
        table["triton"] = triton.__version__
        table["kernels"][name] = round(per_element * 1.03, 4)
        table["kernels"] = dict(sorted(table["kernels"].items()))
        BUDGETS.write_text(json.dumps(table, indent=2) + "\n")
        return
    assert name in table["kernels"], f"{name} has no budget; it needs {per_element}"
    if table["triton"].split(".")[:2] != triton.__version__.split(".")[:2]:
        pytest.skip(f"budgets are for triton {table['triton']}")
    budget = table["kernels"][name]
    assert per_element <= budget, f"{name}: {per_element} warp instructions an element > {budget}"

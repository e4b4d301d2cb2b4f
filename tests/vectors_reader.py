"""A reader of conformance kits in plain Python, written from `docs/vectors.md`.

It imports nothing but the standard library, and holds what it needs of a policy: eviction by age or
by sums of attention, positions of either kind, one tier with even levels, sinks in 16 bits.
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Vector = list[float]
CODES = {"F32": "f", "F16": "e", "I64": "q", "I32": "i", "U8": "B"}


def arrays(file: Path) -> dict[str, Any]:
    """Nested lists by name, of a safetensors file."""
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    out = {}
    for name, info in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + x for x in info["data_offsets"])
        code = CODES[info["dtype"]]
        flat = list(
            struct.unpack(f"<{(end - start) // struct.calcsize(code)}{code}", raw[start:end])
        )
        out[name] = _nested(flat, info["shape"])
    return out


def _nested(flat: list[Any], shape: list[int]) -> Any:
    if len(shape) < 2:
        return flat
    step = len(flat) // shape[0] if shape[0] else 0
    return [_nested(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def half(x: float) -> float:
    """Rounded to fp16."""
    value: float = struct.unpack("<e", struct.pack("<e", x))[0]
    return value


def turn(x: Vector, position: int, theta: float = 10000.0) -> Vector:
    """Rotary embedding: channel c with channel c + D/2."""
    n = len(x) // 2
    out = [0.0] * (2 * n)
    for c in range(n):
        angle = position * theta ** (-c / n)
        a, b, cos, sin = x[c], x[c + n], math.cos(angle), math.sin(angle)
        out[c], out[c + n] = a * cos - b * sin, b * cos + a * sin
    return out


# -- even levels -------------------------------------------------------------------------------


def encode(x: Vector, bits: int, group: int) -> tuple[list[int], Vector]:
    """Codes of every channel, and step and zero of every group."""
    codes, scales, top = [], [], 2**bits - 1
    for start in range(0, len(x), group):
        g = x[start : start + group]
        step, zero = half((max(g) - min(g)) / top), half(min(g))
        codes += [min(max(round((v - zero) / max(step, 1e-8)), 0), top) for v in g]
        scales += [step, zero]
    return codes, scales


def decode(codes: list[int], scales: Vector, group: int) -> Vector:
    return [c * scales[i // group * 2] + scales[i // group * 2 + 1] for i, c in enumerate(codes)]


def pack(codes: list[int], bits: int) -> list[int]:
    """Bytes in planes: byte i holds channels i, i + D/n, ... of n codes a byte."""
    if bits in (3, 5):
        low = bits - 1
        lower = pack([c & (2**low - 1) for c in codes], low)
        return lower + pack([c >> low for c in codes], 1)
    n = 8 // bits
    plane = len(codes) // n
    return [sum(codes[i + j * plane] << (bits * j) for j in range(n)) for i in range(plane)]


# -- a cache -----------------------------------------------------------------------------------


class Side:
    """A key or a value in a slot: in 16 bits at first."""

    def __init__(self, x: Vector) -> None:
        self.x: Vector = x
        self.packed: tuple[list[int], Vector] | None = None

    def store(self, bits: int, group: int) -> None:
        if self.packed is None and bits < 16:
            codes, scales = encode(self.x, bits, group)
            self.packed, self.x = (pack(codes, bits), scales), decode(codes, scales, group)


class Slot:
    def __init__(self, token: int, key: Vector, value: Vector) -> None:
        self.token, self.key, self.value, self.sum = token, Side(key), Side(value), 0.0
        self.tiered = False


class Part:
    """KV heads that are alike: each its slots, and where they vote together the same ones."""

    def __init__(self, kit: "Kit", number: int) -> None:
        self.kit, self.number, about = kit, number, kit.manifest["parts"][number]
        self.slots, self.tier = about["slots"], about["tiers"]
        self.heads: list[list[Slot]] = [[] for _ in about["heads"]]
        self.seen = 0
        self.gone: list[dict[str, Any]] = []

    def step(self, keys: list[Vector], values: list[Vector], queries: list[Vector]) -> list[Vector]:
        """One token: append, attend, and compact where it is due. Outputs of the query heads."""
        policy, out = self.kit.policy, []
        group = len(queries) // len(keys)
        for h, (slots, key, value) in enumerate(zip(self.heads, keys, values, strict=True)):
            slots.append(Slot(self.seen, [half(x) for x in key], [half(x) for x in value]))
            held = [s.key.x for s in slots]
            if policy["positions"] == "cache":
                held = [turn(k, i) for i, k in enumerate(held)]
            for q in queries[h * group : (h + 1) * group]:
                if policy["positions"] == "cache":
                    q = turn(q, len(slots) - 1)
                p = softmax([dot(q, k) / math.sqrt(len(q)) for k in held])
                out.append(
                    [sum(w * s.value.x[c] for w, s in zip(p, slots, strict=True))
                     for c in range(len(value))]
                )  # fmt: skip
                for w, slot in zip(p, slots, strict=True):
                    slot.sum += w / group * len(slots) ** policy["rule"]["alpha"]
        self.seen += 1
        if self.kit.due(self.seen):
            self.compact()
        return out

    def compact(self) -> None:
        policy, gone = self.kit.policy, []
        for slots, left in zip(self.heads, self.victims(), strict=True):
            gone.append(sorted(slots[i].token for i in left))
            slots[:] = [s for i, s in enumerate(slots) if i not in left]
            first = policy["sinks"] if policy["quantizer"]["fp16_sinks"] else 0
            for s in slots[first:]:
                ((kb, vb),) = self.tier
                s.tiered = True
                s.key.store(kb, policy["quantizer"]["group"])
                s.value.store(vb, policy["quantizer"]["group"])
        together = not self.kit.ranks or policy["rule"]["share"] == "layer"
        self.gone.append({"seen": self.seen, "gone": gone[:1] if together else gone})

    def victims(self) -> list[set[int]]:
        """Slots of each head that leave."""
        policy, n = self.kit.policy, len(self.heads[0])
        count = 0 if self.slots is None else max(0, n - (self.slots - policy["interval"]))
        first = policy["sinks"]
        if not self.kit.ranks:
            return [set(range(first, first + count)) for _ in self.heads]
        ranks = [
            [s.sum / (self.seen - s.token) ** policy["rule"]["beta"] for s in slots]
            for slots in self.heads
        ]
        if policy["rule"]["share"] == "layer":
            ranks = [[sum(r) / len(ranks) for r in zip(*ranks, strict=True)]] * len(ranks)
        found = range(first, n - policy["recent_window"])
        return [set(sorted(found, key=lambda i: (r[i], i))[:count]) for r in ranks]

    def check(self, given: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        """What is held, beside what the kit says is held: names, and whether they are equal."""
        about = self.kit.manifest["parts"][self.number]
        if self.seen not in about["states"] or not self.kit.due(self.seen):
            return
        prefix = f"part.{self.number}.after.{self.seen}"
        for v, kept in enumerate(given[f"{prefix}.kept"]):
            yield f"{prefix}.kept", kept == [s.token for s in self.heads[v]]
        for side in ("key", "value"):
            for tiered, name in ((True, "0"), (False, "native")):
                mine = [[getattr(s, side) for s in h if s.tiered == tiered] for h in self.heads]
                if not any(mine):
                    continue
                there = f"{prefix}.{name}.{side}"
                rows = [[s.packed[0] if s.packed else s.x for s in h] for h in mine]
                yield f"{there}.codes", given[f"{there}.codes"] == rows
                if mine[0][0].packed:
                    rows = [[s.packed[1] for s in h if s.packed] for h in mine]
                    yield f"{there}.scales", given[f"{there}.scales"] == rows


class Kit:
    """A folder with a kit."""

    def __init__(self, folder: Path) -> None:
        self.manifest = json.loads((folder / "vectors.json").read_text(encoding="utf-8"))
        self.arrays = arrays(folder / "arrays.safetensors")
        self.weights = arrays(folder / "model" / "model.safetensors")
        given = self.manifest["policy"]
        quantizer = {"fp16_sinks": False, "group": 64} | given.get("quantizer", {})
        rule = {"alpha": 0.0, "beta": 0.0, "share": "head"} | (given.get("rule") or {})
        first = {"interval": 1, "sinks": 0, "recent_window": 0, "positions": "original"}
        self.policy = first | {"trigger": "stream"} | given
        self.policy |= {"quantizer": quantizer, "rule": rule}
        self.ranks = given.get("rule") is not None

    def due(self, seen: int) -> bool:
        every, prompt = self.policy["interval"], self.manifest["prompt"]
        if self.policy["trigger"] == "stream":
            return seen % every == 0
        if self.policy["trigger"] == "prompt":
            return seen == prompt
        return seen >= prompt and (seen - prompt) % every == 0

    def parts(self) -> list[Part]:
        return [Part(self, i) for i in range(len(self.manifest["parts"]))]

    def replay_caches(self) -> Iterator[tuple[str, float]]:
        """Feed the given queries, keys and values; names, and how far off each thing is."""
        given, group = (
            self.arrays,
            self.manifest["model"]["heads"] // self.manifest["model"]["kv_heads"],
        )
        for part, about in zip(self.parts(), self.manifest["parts"], strict=True):
            layer, heads = about["layer"], about["heads"]
            mine = slice(heads[0] * group, (heads[-1] + 1) * group)
            keys, values = (given[f"part.{part.number}.{x}"] for x in ("key", "value"))
            for t in range(self.manifest["tokens"]):
                out = part.step(keys[t], values[t], given[f"layer.{layer}.query"][t][mine])
                said = given[f"layer.{layer}.output"][t][mine]
                yield f"output {layer}", far(out, said)
                yield from ((name, 0.0 if same else 1.0) for name, same in part.check(given))
            yield "compactions", float(part.gone != about["compactions"])

    def replay_model(self) -> Iterator[tuple[str, float]]:
        """Feed the tokens to the model; how far off the logits are, and what left."""
        w, m = self.weights, self.manifest["model"]
        group, D, parts = m["heads"] // m["kv_heads"], m["head_dim"], self.parts()
        for t, token in enumerate(self.arrays["ids"]):
            x = w["model.embed_tokens.weight"][token]
            for layer in range(m["layers"]):
                name = f"model.layers.{layer}."
                h = norm(x, w[name + "input_layernorm.weight"])
                q, k, v = (heads(times(w[f"{name}self_attn.{c}_proj.weight"], h), D) for c in "qkv")
                if self.policy["positions"] == "original":
                    q, k = [turn(y, t) for y in q], [turn(y, t) for y in k]
                out: list[Vector] = []
                for part, about in zip(parts, self.manifest["parts"], strict=True):
                    if about["layer"] == layer:
                        a, b = about["heads"][0], about["heads"][-1] + 1
                        out += part.step(k[a:b], v[a:b], q[a * group : b * group])
                flat = [y for head in out for y in head]
                x = plus(x, times(w[name + "self_attn.o_proj.weight"], flat))
                h = norm(x, w[name + "post_attention_layernorm.weight"])
                gate, up = (times(w[f"{name}mlp.{c}_proj.weight"], h) for c in ("gate", "up"))
                h = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
                x = plus(x, times(w[name + "mlp.down_proj.weight"], h))
            logits = times(w["lm_head.weight"], norm(x, w["model.norm.weight"]))
            yield "logits", far([logits], [self.arrays["logits"][t]])
        for part, about in zip(parts, self.manifest["parts"], strict=True):
            yield "compactions", float(part.gone != about["compactions"])


def dot(a: Vector, b: Vector) -> float:
    return sum(map(float.__mul__, a, b))


def times(matrix: list[Vector], x: Vector) -> Vector:
    return [dot(row, x) for row in matrix]


def plus(a: Vector, b: Vector) -> Vector:
    return [x + y for x, y in zip(a, b, strict=True)]


def norm(x: Vector, weight: Vector) -> Vector:
    size = math.sqrt(dot(x, x) / len(x) + 1e-6)
    return [w * v / size for w, v in zip(weight, x, strict=True)]


def softmax(x: Vector) -> Vector:
    top = max(x)
    e = [math.exp(v - top) for v in x]
    total = sum(e)
    return [v / total for v in e]


def heads(x: Vector, D: int) -> list[Vector]:
    return [x[i : i + D] for i in range(0, len(x), D)]


def far(a: list[Vector], b: list[Vector]) -> float:
    pairs = (p for r, s in zip(a, b, strict=True) for p in zip(r, s, strict=True))
    return max(abs(x - y) for x, y in pairs)

"""Implementations that are wrong in one thing each, which the probe of their op has to find."""

from dataclasses import replace

import torch

from kvsearch_kernels.decode_attention.reference import attend, slots_of
from kvsearch_kernels.quantize_kv import dequantize


def flipped(x):
    return x.flip(1).contiguous()


def without_lengths(parts):
    return [replace(p, lengths=None) for p in parts]


def plain(fmt):
    return replace(fmt, rotate=False)


def unblocked(fmt):
    """A format whose rotation mixes all channels."""
    return fmt and replace(fmt, block=None)


def without_blocks(side, parts):
    """Parts whose keys or values are read as if their rotations mixed all channels."""
    name = f"{side}_format"
    return [replace(p, **{name: unblocked(getattr(p, name))}) for p in parts]


def kept(stores):
    """Stores whose pools are copies."""
    return type(stores)([
        replace(h, parts=[*h.parts[:-1], replace(h.parts[-1], keys=h.parts[-1].keys.clone())])
        for h in stores.heads
    ])  # fmt: skip


def angles(stores, **new):
    """Stores whose keys are turned in another way."""
    return type(stores)([
        replace(h, turned=h.turned and replace(h.turned, **new)) for h in stores.heads
    ])  # fmt: skip


def rules(stores, **other):
    """Stores that add up by another rule."""
    return type(stores)([replace(h, sums=h.sums and replace(h.sums, **other))
                         for h in stores.heads])  # fmt: skip


def nudged(packed):
    codes = packed.codes.clone()
    codes[0, 0, 0, 0] ^= 1
    return replace(packed, codes=codes)


def flushed(held):
    """As on a device that takes subnormal numbers for zero: those are what codes are read as."""
    if isinstance(held, torch.Tensor):
        return held
    return replace(held, codes=torch.zeros_like(held.codes))


def underflowing(f, q, parts, **kwargs):
    """As if weights were taken times 8-bit steps in fp16, relative to the largest of a part.

    Next to an attention sink such a product is below what fp16 holds.
    """
    out, _, p = attend(q.float(), parts, kwargs["scale"], kwargs.get("softcap"))
    out, first = out.unflatten(1, p.shape[1:3]), 0
    for part in parts:
        n = slots_of(part)
        mine, first = p[..., first : first + n], first + n
        if part.value_format and part.value_format.bits == 8 and not part.value_format.rotate:
            step, zero = (
                x.float().repeat_interleave(part.value_format.group, -1)
                for x in part.values.scales.unbind(-1)
            )
            scale = mine.amax(-1, keepdim=True).clamp_min(1e-30)
            product = (mine / scale).unsqueeze(-1) * step.unsqueeze(2)
            lost = (product - product.half()) * scale.unsqueeze(-1)
            codes = (dequantize(part.values, part.value_format) - zero) / step.clamp_min(1e-8)
            out = out - (lost * codes.unsqueeze(2)).sum(-2)
    return out.flatten(1, 2).to(q.dtype), f(q, parts, **kwargs)[1]


def changed(one):
    """A mutant that mistakes each of the things that an op is asked at once."""
    return lambda f, every, **more: f([one(x) for x in every], **more)


def evicting(change):
    """Other evictions than those asked for."""
    return lambda f, *args: f(*args[:-1], change(args[-1]))


MUTANTS = {
    "lifetime_attention": {
        "no softcap": lambda f, *a, softcap=None, **k: f(*a, **k),
        "no anchors": lambda f, *a, anchors=None, **k: f(*a, **k),
        "a row late": lambda f, *a, first_query, **k: f(*a, first_query=first_query + 1, **k),
        "wrong heads": lambda f, q, k, *a, **kw: f(q, flipped(k), *a, **kw),
        "a key less": lambda f, q, k, v, b, d, **kw: f(q, k, v, b, d.where(d != d.max(), b), **kw),
        "log2 for log": lambda f, *a, **k: (f(*a, **k)[0], f(*a, **k)[1] * 1.4427),
        "16 bits for the log-sum-exp": lambda f, *a, **k: (
            f(*a, **k)[0], f(*a, **k)[1].half().float()),
        "NaN for blind rows": lambda f, *a, **k: (f(*a, **k)[0].where(
            ~f(*a, **k)[1].isinf().unsqueeze(-1), float("nan")), f(*a, **k)[1]),
    },
    "score_keys": {
        "no softcap": lambda f, *a, softcap=None, **k: f(*a, **k),
        "always sums": lambda f, *a, reduce="sum", **k: f(*a, **k),
        "wrong heads": lambda f, q, k, *a, **kw: f(q, flipped(k), *a, **kw),
        "no weights": lambda f, q, k, lse, w, *a, **kw: f(q, k, lse, torch.ones_like(w), *a, **kw),
        "a row early": lambda f, *a, first_query, **k: f(*a, first_query=first_query - 1, **k),
    },
    "scored_attention": {
        "no softcap": lambda f, *a, softcap=None, **k: f(*a, **k),
        "no weights": lambda f, q, k, v, w, **kw: f(q, k, v, torch.ones_like(w), **kw),
        "weights in 16 bits": lambda f, q, k, v, w, **kw: f(q, k, v, w.half().float(), **kw),
        "wrong heads": lambda f, q, k, v, *a, **kw: f(q, k, flipped(v), *a, **kw),
    },
    "quantize_kv": {
        "no rotation": lambda f, x, fmt, **k: f(x, plain(fmt), **k),
        "no blocks": lambda f, x, fmt, **k: f(x, unblocked(fmt), **k),
        "a bit flipped": lambda f, *a, **k: nudged(f(*a, **k)),
        "one list for all heads": lambda f, x, fmt, slots=None: f(
            x, fmt, slots=slots if slots is None or slots.dim() == 1 else slots[0, 0]),
        "a thousandth more": lambda f, x, fmt, **k: f(x.float() * 1.001, fmt, **k),
    },
    "dequantize_kv": {
        "no rotation": lambda f, p, fmt, **k: f(p, plain(fmt), **k),
        "no blocks": lambda f, p, fmt, **k: f(p, unblocked(fmt), **k),
        "a bit flipped": lambda f, p, fmt, **k: f(nudged(p), fmt, **k),
    },
    "gather_kv": {
        "other slots": lambda f, x, slots, **k: f(x, slots.flip(-1), **k),
        "turned back": lambda f, x, slots, by=None, inv_freq=None: f(
            x, slots, by=None if by is None else -by, inv_freq=inv_freq),
        "not turned": lambda f, x, slots, by=None, inv_freq=None: f(x, slots),
    },
    "gather_rows": {
        "other rows": changed(lambda x: replace(x, source=x.source.flip(-1))),
        "parts the other way": changed(lambda x: replace(x, parts=x.parts[::-1])),
        "one part": changed(lambda x: replace(
            x, parts=x.parts[:1], source=x.source % x.parts[0].shape[2])),
        "one list for all heads": changed(lambda x: replace(
            x, source=x.source if x.source.dim() == 1 else x.source[0, 0])),
        "wrong heads": changed(lambda x: replace(x, parts=[flipped(p) for p in x.parts])),
        "whole words only": lambda f, asked: [
            x if x.shape[-1] % 2 == 0 else torch.cat([x[..., :-1], x[..., -1:] * 0], -1)
            for x in f(asked)],
        "rows of the tensor before": lambda f, asked: f(asked[-1:] + asked[:-1]),
    },
    "time_order": {
        "the other way": lambda f, pools: pools.argsort(dim=-1, stable=True),
        "newest first": lambda f, pools: f(pools.flip(-1)).flip(-1),
    },
    "append_kv": {
        "one length for all heads": lambda f, k, v, n, *new: (
            *f(k, v, n[:1, :1].expand_as(n).clone(), *new)[:2], n.add_(new[0].shape[2])),
        "values for keys": lambda f, k, v, n, new_k, new_v: f(
            k, v, n, new_v[..., :1].expand_as(new_k), new_v),
        "lengths stay": lambda f, k, v, n, *new: (*f(k, v, n.clone(), *new)[:2], n),
        "a slot late": lambda f, k, v, n, *new: (*f(k, v, n + 1, *new)[:2], n.add_(
            new[0].shape[2])),
    },
    "decode_step": {
        "wrong groups": lambda f, q, *a, **k: f(q.flip(1), *a, **k),
        "no softcap": lambda f, *a, softcap=None, **k: f(*a, **k),
        "values for keys": lambda f, q, k, v, s, **m: f(q, v, v, s, **m),
        "nothing stored": lambda f, q, k, v, s, **m: f(q, k, v, kept(s), **m),
        "nothing counted": lambda f, q, k, v, s, **m: f(
            q, k, v, type(s)([replace(h, sums=None) for h in s.heads]), **m),
        "whole tiers": lambda f, q, k, v, s, **m: f(q, k, v, type(s)([replace(
            h, parts=[*without_lengths(h.parts[:-1]), h.parts[-1]]) for h in s.heads]), **m),
        "not in time": lambda f, q, k, v, s, **m: f(q, k, v, rules(s, order=None), **m),
        "no window": lambda f, q, k, v, s, **m: f(q, k, v, rules(s, horizon=None), **m),
        "no decay": lambda f, q, k, v, s, **m: f(q, k, v, rules(s, keep=1.0), **m),
        **{f"no blocks of {side}s": lambda f, q, k, v, s, side=side, **m: f(q, k, v, type(s)([
            replace(h, parts=without_blocks(side, h.parts)) for h in s.heads]), **m)
            for side in ("key", "value")},
        **{name: lambda f, q, k, v, s, new=new, **m: f(q, k, v, angles(s, **new), **m)
            for name, new in {"at the stream's index": {"dropped": 0}, "by the pool": {"held": 0},
                              "as slots lie": {"index": None}}.items()},
        "keys keep their angle": lambda f, q, k, v, s, **m: f(
            q, k, v, type(s)([replace(h, turned=None) for h in s.heads]), **m),
        "products of the head before": lambda f, q, k, v, s, **m: f(q, k, v, type(s)([replace(
            h, sums=h.sums and replace(h.sums, sums=h.sums.sums.roll(1, 1)))
            for h in s.heads]), **m),
    },
    "repack_kv": {
        "nothing moves": changed(lambda p: replace(p, own=None)),
        "other slots": changed(lambda p: replace(p, source=p.source.flip(-1))),
        "values for keys": changed(lambda p: p if p.formats[0] else replace(p, parts=[
            replace(x, keys=x.values, key_format=x.value_format) for x in p.parts])),
        "no rotation": changed(lambda p: replace(
            p, formats=tuple(x and plain(x) for x in p.formats))),
        "no blocks": changed(lambda p: replace(
            p, formats=tuple(map(unblocked, p.formats)))),
        "no blocks of what was": changed(lambda p: replace(
            p, parts=without_blocks("value", p.parts))),
        "nothing rounded in between": lambda f, *a, dtype, **k: f(*a, dtype=torch.float32, **k),
        "pools of the store before": lambda f, pools, **k: f(pools[-1:] + pools[:-1], **k),
    },
    "choose_slots": {
        "one more": changed(lambda a: replace(a, gone=a.gone + 1)),
        "sinks go": changed(lambda a: replace(a, sinks=0)),
        "recent ones go": changed(lambda a: replace(a, recent=0)),
        "the worst stay": changed(lambda a: replace(a, scores=-a.scores)),
        "newest of equals go": changed(lambda a: replace(
            a, scores=a.scores - torch.arange(a.scores.shape[-1]) * 1e-6)),
        "spoilt ones return": changed(lambda a: replace(a, pools=a.pools * 0)),
        "tiers of others": changed(lambda a: replace(a, counts=a.counts[::-1])),
        "all in tiers": changed(lambda a: replace(a, fp16_sinks=0)),
        "wrong voters": changed(lambda a: replace(a, scores=a.scores.flip(1))),
        "answers to the store before": lambda f, asks: f(asks[-1:] + asks[:-1]),
        "no ages": changed(lambda a: replace(a, held=a.held and replace(a.held, divisors=None))),
        "a token later": changed(lambda a: replace(a, held=a.held and replace(
            a.held, seen=a.held.seen + 1))),
        "nothing is forgotten": changed(lambda a: replace(a, held=a.held and replace(
            a.held, forgets=False))),
        "nothing moves along": changed(lambda a: replace(a, held=None)),
        "in order of time before": changed(lambda a: replace(a, places=None)),
        "in order of time after": changed(lambda a: replace(a, after=None)),
        "no room": changed(lambda a: replace(
            a, room=None if a.room is None else a.scores.shape[-1] - a.gone)),
    },
    "copy_rows": {
        "nothing is written": lambda f, copies: None,
        "all but the last": lambda f, copies: f(copies[:-1]),
        "the beginning of each": changed(lambda c: c if isinstance(c.of, int) else replace(
            c, to=c.to[..., :30], of=c.of[..., :30])),
        "no numbers": lambda f, copies: f([c for c in copies if not isinstance(c.of, int)]),
        "rows of the head before": changed(lambda c: c if isinstance(c.of, int) else replace(
            c, of=c.of.roll(1, 0))),
    },
    "evict_in_place": {
        "no softcap": evicting(lambda h: replace(h, softcap=None)),
        "no ages": evicting(lambda h: replace(h, divisors=None)),
        "sums do not fade": evicting(lambda h: replace(h, carry=1.0)),
        "nothing is forgotten": evicting(lambda h: replace(h, forgets=False)),
        "sinks go": evicting(lambda h: replace(h, first=0)),
        "new tokens go": evicting(lambda h: replace(h, last=10_000)),
        "recent tokens go": evicting(lambda h: replace(h, recent=0)),
        "a token later": evicting(lambda h: replace(h, seen=h.seen + 1)),
        "no weights": lambda f, *a: f(*a[:-2], torch.ones_like(a[-2]), a[-1]),
        "as they come": lambda f, *a: f(*a[:5], a[4], *a[6:]),
        "wrong heads": lambda f, *a: f(*a[:3], a[3].flip(1), *a[4:]),
        "only the first intervals": lambda f, *a: torch.cat(
            [f(*a[:3], *(x[:-1] for x in a[3:6]), *a[6:]), a[3][-1:]]),
    },
    "settle_kv": {
        "nothing is rounded": lambda f, k, v, b, a, t, **m: f(k, v, b, a, [(None, None)], **m),
        "what stays is rounded": lambda f, k, v, b, a, t, **m: f(k, v, b + 9, a, t, **m),
        "the tier before": lambda f, k, v, b, a, t, **m: f(k, v, b, a, [t[0], *t[:-1]], **m),
        "pools of other slots": lambda f, k, v, b, a, t, **m: f(k, v, b.flip(-1), a, t, **m),
        "other slots": lambda f, *x, keep=None, **m: f(
            *x, keep=None if keep is None else keep.flip(-1), **m),
        "values for keys": lambda f, k, v, *x, **m: f(v, k, *x, **m),
        "no rotation": lambda f, k, v, b, a, t, **m: f(
            k, v, b, a, [tuple(x and plain(x) for x in pair) for pair in t], **m),
        "no blocks": lambda f, k, v, b, a, t, **m: f(
            k, v, b, a, [tuple(map(unblocked, pair)) for pair in t], **m),
        "no room": lambda f, *x, room=0, **m: f(*x, **m),
    },
    "tally": {
        "no weight": lambda f, *a, alpha=0.0, **k: f(*a, **k),
        "no window": lambda f, *a, horizon=None, **k: f(*a, **k),
        "no decay": lambda f, *a, keep=1.0, **k: f(*a, **k),
        "a row late": lambda f, *a, end=0, **k: f(*a, end=end - 1, **k),
        "a row early": lambda f, *a, end=0, **k: f(*a, end=end + 1, **k),
        "not in time": lambda f, sums, r, order, n, **k: f(sums, r, None, n, **k),
        "wrong heads": lambda f, sums, r, order, n, **k: f(sums, flipped(r), order, n, **k),
        "the sum of heads": lambda f, sums, r, *a, **k: f(
            sums, r * (r.shape[1] if sums.shape[1] == 1 else 1), *a, **k),
    },
    "sum_queries": {
        "with their angle": lambda f, q, t, o, w, *a, **k: f(q, t, o, w * 0, *a, **k),
        "of the token after": lambda f, *a, **k: f(*a[:-1], a[-1] + 1, **k),
        "all of them": lambda f, *a, skip=0, **k: f(*a, **k),
        "one fewer": lambda f, *a, skip=0, **k: f(*a, skip=skip + 1 if skip else 0, **k),
        "wrong heads": lambda f, q, *a, **k: f(q.flip(1), *a, **k),
        "no products": lambda f, q, t, o, *a, **k: (f(q, t, None, *a, **k)[0], o),
        "the lower triangle": lambda f, q, t, o, *a, **k: (
            f(q, t, o, *a, **k)[0], o if o is None else o.flip(-1)),
        "squares twice": lambda f, q, t, o, *a, **k: (
            f(q, t, o, *a, **k)[0], o if o is None else o.add_(o - 1)),
    },
}  # fmt: skip
DECODES = {
    "no softcap": lambda f, *a, softcap=None, **k: f(*a, **k),
    "no lengths": lambda f, q, parts, **k: f(q, without_lengths(parts), **k),
    "wrong groups": lambda f, q, parts, **k: f(q.flip(1), parts, **k),
    "values of the next slot": lambda f, q, parts, **k: f(
        q, [p if p.value_format else replace(p, values=p.values.roll(1, 2)) for p in parts], **k),
    "keys flushed": lambda f, q, parts, **k: f(
        q, [replace(p, keys=flushed(p.keys)) for p in parts], **k),
    "values flushed": lambda f, q, parts, **k: f(
        q, [replace(p, values=flushed(p.values)) for p in parts], **k),
    "weights underflow": underflowing,
    **{f"no blocks of {side}s": lambda f, q, parts, side=side, **k: f(
        q, without_blocks(side, parts), **k) for side in ("key", "value")},
}  # fmt: skip
MUTANTS |= {"decode_attention": DECODES, "scored_decode": DECODES}

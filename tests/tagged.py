"""A device that is not there: CPU tensors that claim to be elsewhere.

Data are real, so results can be compared. What CUDA refuses is refused (an op whose tensors are on
two devices), what would wait for the device is counted, and so is every op that would be a launch.
"""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ELSEWHERE = torch.device("meta")  # the only other device that every build of torch knows
CPU = torch.device("cpu")
_aten = torch.ops.aten
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
COPIES = (_aten._to_copy.default, _aten.copy_.default)
WAITS = (
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.masked_select.default,
    _aten.unique_consecutive.default,
    _aten.repeat_interleave.Tensor,
)
FREE = ("aten::detach", "aten::lift_fresh", "aten::alias")  # nothing runs on the device


class Tagged(torch.Tensor):
    """A tensor of data `elem` on the CPU that says it is on a device of `ELSEWHERE`'s type."""

    elem: torch.Tensor

    @staticmethod
    def __new__(cls, elem: torch.Tensor, device: torch.device = ELSEWHERE) -> "Tagged":
        """Wrap `elem`, sharing its memory."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            device=device,
        )
        made.elem = elem
        return made

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """What a kernel asks before it takes a tensor."""
        return True

    def data_ptr(self) -> int:
        """Of the data."""
        return self.elem.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Outside of a `Device` there is no such device."""
        raise RuntimeError(f"{func} outside of the lane")


def tagged(x: torch.Tensor, device: torch.device = ELSEWHERE) -> torch.Tensor:
    """`x` on a device that is not there."""
    return Tagged(x, device)


def here(x: torch.Tensor) -> torch.Tensor:
    """The data of a tagged tensor, for tests to look at."""
    return x.elem if isinstance(x, Tagged) else x


class Device(TorchDispatchMode):
    """Runs ops over tagged tensors.

    Attributes:
        launches: ops that would run on the device, by name.
        waits: ops for whose result the host would wait, by name.
        counting: whether they are counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check, count, run on the CPU, and tag the result."""
        kwargs = dict(kwargs or {})
        if func.has_kernel_for_dispatch_key(COMPOSITE):  # in inference mode nobody takes it apart
            with self:
                return func.decompose(*args, **kwargs)
        target = kwargs.get("device")
        flat = [y for x in args for y in (x if isinstance(x, list | tuple) else (x,))]
        given = [x for x in (*flat, *kwargs.values()) if isinstance(x, torch.Tensor)]
        away = [x.device for x in given if isinstance(x, Tagged)]
        places = {x.device for x in given if isinstance(x, Tagged) or (away and x.dim())}
        if len(places) > 1 and func not in COPIES:
            raise RuntimeError(f"{func}: tensors on two devices")
        place = torch.device(target) if target is not None else next(iter(away), CPU)
        if func is _aten.copy_.default:
            place = args[0].device
        there = place.type == ELSEWHERE.type
        name = func._schema.name
        if self.counting and (away or there):
            self._count(func, name, there, _waits(func, args, kwargs))
        if target is not None:
            kwargs["device"] = CPU
        plain = [_unwrap(x) for x in args]
        result = func(*plain, **{k: _unwrap(v) for k, v in kwargs.items()})
        if not there or func in WAITS[:1]:
            return result
        if func._schema.is_mutable and isinstance(result, torch.Tensor):  # in place, or `out=`
            same = [x for x in given if isinstance(x, Tagged) and x.elem is result]
            if same:
                return same[0]
        return _wrap(result, place)

    def _count(self, func: Any, name: str, there: bool, waits: bool = False) -> None:
        # a result that comes back to the host, or numbers on the way from memory that may move
        if func in WAITS or waits or (not there and func not in COPIES):
            self.waits[name] += 1
        returns = func._schema.returns
        view = all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if name not in FREE and not (returns and view):
            self.launches[name] += 1


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a copy between host and device is one that the host waits for."""
    given = [isinstance(x, Tagged) for x in args if isinstance(x, torch.Tensor)]
    if func not in COPIES or kwargs.get("non_blocking") or not args[0].numel():
        return False
    if func is _aten.copy_.default:
        return given[0] != given[1] and not (len(args) > 2 and args[2])
    target = kwargs.get("device")
    return target is not None and given[0] != (torch.device(target).type == ELSEWHERE.type)


def _unwrap(x: Any) -> Any:
    if isinstance(x, Tagged):
        return x.elem
    if isinstance(x, list | tuple):
        return type(x)(_unwrap(y) for y in x)
    return x


def _wrap(x: Any, device: torch.device) -> Any:
    if isinstance(x, torch.Tensor):
        return Tagged(x, device)
    if isinstance(x, list | tuple):
        return type(x)(_wrap(y, device) for y in x)
    return x

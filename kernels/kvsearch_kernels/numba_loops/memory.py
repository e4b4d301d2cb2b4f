# mypy: ignore-errors
"""Memory at addresses, and numbers by their bits: what numba has no words for."""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def pointer(typingctx, address):
    """The memory at an address."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def from_half(typingctx, bits):
    """fp16 by its bits, in fp32."""

    def codegen(context, builder, signature, args):
        return builder.fpext(
            builder.bitcast(args[0], cgutils.ir.HalfType()), cgutils.ir.FloatType()
        )

    return types.float32(types.uint16), codegen


@intrinsic
def to_half(typingctx, x):
    """The bits of fp32 rounded to fp16."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(
            builder.fptrunc(args[0], cgutils.ir.HalfType()), cgutils.ir.IntType(16)
        )

    return types.uint16(types.float32), codegen


@intrinsic
def bits_of(typingctx, x):
    """The bits of fp32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], cgutils.ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def from_bits(typingctx, bits):
    """fp32 by its bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], cgutils.ir.FloatType())

    return types.float32(types.uint32), codegen

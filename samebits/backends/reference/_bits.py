"""LLVM operations that Python has no spelling for: bit casts, exact truncation and fused multiply-add."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_F32, _F64 = ir.FloatType(), ir.DoubleType()


def _bitcast(source: Any, target: Any, target_ir: ir.Type) -> Any:
    def cast(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], target_ir)

        return target(source), codegen

    return intrinsic(cast)


f64_to_bits = _bitcast(types.float64, types.int64, ir.IntType(64))
bits_to_f64 = _bitcast(types.int64, types.float64, _F64)
f32_to_bits = _bitcast(types.float32, types.uint32, ir.IntType(32))


@intrinsic
def trunc(typingctx: Any, x: Any) -> Any:
    """``x`` rounded toward zero to an integer, in float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.trunc", [_F64]), args)

    return types.float64(types.float64), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` in float32 with one IEEE 754 rounding to nearest even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen

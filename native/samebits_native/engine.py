"""``libsamebits`` in Python: products, attention and log-probabilities by raw pointers.

    engine = Engine("model.samebits")
    engine.matmul(x, w.T, out=y, stream=stream)

Arrays are objects with ``__cuda_array_interface__`` or ``__dlpack__`` (CuPy, JAX, numba, PyTorch), or an
:class:`Array`. A call runs on the stream that it is given, a ``CUstream`` as an integer. It does not wait for
the arrays to be ready: what writes them must be on that stream, or done. ``docs/native.md`` says how to make
the archive, which has the kernels. This module needs neither PyTorch nor samebits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

__all__ = ["Array", "Engine", "EngineError"]

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Names of dtypes, with the library's numbers."""

_ABI = 5
_Int, _Long, _Pointer, _Size = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t


class EngineError(ValueError):
    """A call of the library failed. The message is its sentence; `status` its number in ``samebits.h``."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Array(NamedTuple):
    """An array in a GPU's memory.

    Attributes:
        data: the address of its first element.
        dtype: ``float32``, ``bfloat16``, ``float16``, ``int32``, ``int64``, or of a workspace ``uint8``.
        shape, strides: in elements.
    """

    data: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, name: str = "array", *, written: bool = False) -> Array:
        """The array of an object with ``__cuda_array_interface__`` or ``__dlpack__``.

        Args:
            name: of the argument, for errors.
            written: one that says that it is read-only is refused.

        Raises:
            TypeError: it has neither, or is not in a GPU's memory, or has another dtype, or strides of no
                whole elements.
        """
        if isinstance(x, Array):
            return x
        found = _seen(name, x)
        if found.dtype not in _SIZES:
            raise _wrong(name, ", ".join(_SIZES), found.dtype)
        if written and found.read_only:
            raise _wrong(name, "an array that may be written", "a read-only one")
        return cls(found.data, found.dtype, found.shape, found.strides)

    @property
    def mT(self) -> Array:
        """The transposed matrix, or matrices."""
        shape, strides = self.shape, self.strides
        return Array(self.data, self.dtype, (*shape[:-2], *shape[:-3:-1]), (*strides[:-2], *strides[:-3:-1]))


class _Seen(NamedTuple):
    """What an object says of its array. `dtype` is a name of :data:`_SIZES`, or the object's own."""

    data: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_only: bool = False


_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "uint8": 1}
_LETTERS = {"f4": "float32", "f2": "float16", "i4": "int32", "i8": "int64", "u1": "uint8"}
_CODES = {
    (2, 32): "float32",
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
}


def _wrong(name: str, expected: str, got: object) -> TypeError:
    return TypeError(f"samebits_native: {name}: expected {expected}, got {got}")


def _seen(name: str, x: Any) -> _Seen:
    if isinstance(x, Array):
        if x.dtype not in _SIZES:
            raise _wrong(name, ", ".join(_SIZES), x.dtype)
        return _Seen(x.data, x.dtype, _SIZES[x.dtype], x.shape, x.strides)
    by_dlpack = hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")
    try:
        described = x.__cuda_array_interface__
    except (AttributeError, TypeError, RuntimeError):  # it may have no letter for bfloat16
        described = None
    if described is not None:
        found = _described(name, described)
        if found.dtype in _SIZES or not by_dlpack:
            return found
    if by_dlpack:
        return _from_dlpack(name, x)
    raise _wrong(name, "an array on a GPU", type(x).__name__)


def _described(name: str, of: dict[str, Any]) -> _Seen:
    """The array of a ``__cuda_array_interface__``."""
    shape, kind, steps = tuple(of["shape"]), of["typestr"], of.get("strides")
    size = int(kind[2:])
    if kind[0] not in "<|":
        raise _wrong(name, "little-endian numbers", kind)
    if steps is None:
        strides = _dense(shape)
    elif any(n > 1 and step % size for n, step in zip(shape, steps, strict=True)):
        raise _wrong(name, f"strides in whole elements of {size} bytes", f"{tuple(steps)} bytes")
    else:
        strides = tuple(step // size for step in steps)
    data, read_only = of["data"]
    return _Seen(data, _LETTERS.get(kind[1:], kind), size, shape, strides, read_only)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", _Pointer),
        ("device_type", _Int),
        ("device_id", _Int),
        ("ndim", _Int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(_Long)),
        ("strides", ctypes.POINTER(_Long)),
        ("byte_offset", ctypes.c_uint64),
    ]


_CUDA = (2, 13)  # DLPack's numbers of GPU memory and of managed memory
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = _Pointer, [ctypes.py_object, ctypes.c_char_p]


def _from_dlpack(name: str, x: Any) -> _Seen:
    try:
        device = int(x.__dlpack_device__()[0])
        capsule = x.__dlpack__(stream=-1) if device in _CUDA else None  # -1: no synchronization
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # whatever its library raises
        raise _wrong(name, "an array that DLPack gives", error) from error
    if capsule is None:
        raise _wrong(name, "an array on a GPU", f"DLPack's device {device}")
    t = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
    kind = _CODES.get((t.code, t.bits)) if t.lanes == 1 else None
    shape = tuple(t.shape[: t.ndim])
    strides = tuple(t.strides[: t.ndim]) if t.strides else _dense(shape)
    dtype = kind or f"DLPack's dtype {t.code, t.bits, t.lanes}"
    return _Seen((t.data or 0) + t.byte_offset, dtype, t.bits * t.lanes // 8, shape, strides)


class _Matrix(ctypes.Structure):
    _fields_ = [("data", _Pointer), ("row", _Long), ("column", _Long), ("batch", _Long)]


class _Product(ctypes.Structure):
    _fields_ = [
        ("dtype", _Int),
        ("out_dtype", _Int),
        *((name, _Long) for name in ("m", "n", "k", "batch")),
        *((name, _Matrix) for name in ("a", "b", "out")),
        ("bias", _Pointer),
        ("accumulate", _Int),
    ]


class _Sequences(ctypes.Structure):
    _fields_ = [("offsets", _Pointer), ("count", _Long), ("wide", _Int)]


class _Groups(ctypes.Structure):
    _fields_ = [("ends", _Pointer), ("count", _Long), ("bias", _Long)]


class _Logp(ctypes.Structure):
    _fields_ = [
        ("dtype", _Int),
        *((name, _Long) for name in ("tokens", "features", "vocabulary")),
        *(("hidden", _Pointer), ("hidden_row", _Long)),
        *(("weight", _Pointer), ("weight_row", _Long)),
        *(("bias", _Pointer), ("target", _Pointer)),
        *(("ignore_index", _Long), ("temperature", ctypes.c_double)),
        *(("logp", _Pointer), ("entropy", _Pointer)),
    ]


class _Vectors(ctypes.Structure):
    _fields_ = [("data", _Pointer), *((name, _Long) for name in ("batch", "token", "head"))]


_LISTS = ("cu_seqlens_q", "cu_seqlens_k", "key_start", "key_length", "block_table")


class _Attention(ctypes.Structure):
    _fields_ = [
        ("dtype", _Int),
        *((name, _Long) for name in ("batch", "queries", "keys", "heads", "kv_heads", "head", "values")),
        *((name, _Vectors) for name in ("q", "k", "v")),
        *(("out", _Pointer), ("lse", _Pointer)),
        *(("scale", ctypes.c_float), ("softcap", ctypes.c_float)),
        *(("left", _Long), ("right", _Long)),
        ("sinks", _Pointer),
        *((name, _Pointer) for name in _LISTS),
        *((name, _Long) for name in ("block_table_row", "page", "pages")),
    ]


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "sb_archive_open": (ctypes.c_char_p, _Pointer),
    "sb_context_create": (_Pointer, _Int, _Pointer),
    "sb_gemm": (_Pointer, _Pointer, _Pointer),
    "sb_bmm": (_Pointer, _Pointer, _Pointer),
    "sb_gemm_ragged": (_Pointer, _Pointer, _Pointer, _Pointer),
    "sb_gemm_grouped": (_Pointer, _Pointer, _Pointer, _Pointer),
    "sb_workspace_size": (_Pointer, _Pointer, _Pointer),
    "sb_linear_logp": (_Pointer, _Pointer, _Pointer, _Size, _Pointer),
    "sb_attention_workspace_size": (_Pointer, _Pointer, _Pointer),
    "sb_attention": (_Pointer, _Pointer, _Pointer, _Size, _Pointer),
}


def load_library(path: str | Path | None = None) -> ctypes.CDLL:
    """``libsamebits``, with the types of its functions.

    Args:
        path: of the library. None: the one that this package was built with.

    Raises:
        OSError: it does not load.
        EngineError: it has another ABI version.
    """
    built = importlib.util.find_spec("samebits_native._library")
    path = path or (built and built.origin) or "libsamebits.so"
    library = ctypes.CDLL(str(path))
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    library.sb_abi_version.restype = ctypes.c_uint32
    for name in ("sb_last_error", "sb_contract_digest", "sb_archive_version"):
        getattr(library, name).restype = ctypes.c_char_p
    library.sb_contract_digest.argtypes, library.sb_archive_version.argtypes = [_Pointer, _Int], [_Pointer]
    for name in ("sb_archive_close", "sb_context_destroy"):
        getattr(library, name).argtypes, getattr(library, name).restype = [_Pointer], None
    if library.sb_abi_version() != _ABI:
        raise EngineError(
            f"{path}: it has ABI version {library.sb_abi_version()}, samebits_native {_ABI}"
            " (see docs/troubleshooting.md#caches-tables-and-archives)",
            3,
        )
    return library


class Engine:
    """An archive's kernels on a GPU. Threads may share it. A ``with`` statement closes it.

    Args:
        archive: the file that ``samebits export`` wrote.
        device: ordinal of the GPU.
        library: path of ``libsamebits.so``. By default it is the one that this package was built with.

    Raises:
        OSError: the library does not load.
        EngineError: the archive is damaged, or for another GPU; or the driver is missing.
    """

    def __init__(self, archive: str | Path, *, device: int = 0, library: str | Path | None = None) -> None:
        self._archive, self._context = _Pointer(), _Pointer()
        self._library = load_library(library)
        self._check(self._library.sb_archive_open(os.fsencode(archive), ctypes.byref(self._archive)))
        try:
            self._check(self._library.sb_context_create(self._archive, device, ctypes.byref(self._context)))
        except Exception:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the kernels. No launch may be pending, and no graph may run again."""
        context, self._context = self._context, _Pointer()
        archive, self._archive = self._archive, _Pointer()
        self._library.sb_context_destroy(context)
        self._library.sb_archive_close(archive)

    @property
    def version(self) -> str | None:
        """The version of samebits that wrote the archive; None when closed."""
        version = self._library.sb_archive_version(self._archive)
        return None if version is None else version.decode()

    def contract_digest(self, dtype: str) -> str | None:
        """16 hex digits that name the bits of products of `dtype`; None if the archive has none of it."""
        digest = self._library.sb_contract_digest(self._archive, _number("dtype", dtype))
        return None if digest is None else digest.decode()

    def matmul(
        self, a: Any, b: Any, *, out: Any, bias: Any = None, accumulate: bool = False, stream: int
    ) -> None:
        """``out = a @ b (+ bias)``, or ``out += a @ b (+ bias)``, with the bits of ``samebits.matmul``.

        Args:
            a: ``[M, K]`` or ``[B, M, K]``; float32, bfloat16 or float16, any strides that are not negative.
            b: ``[K, N]`` or ``[B, K, N]``, of the same dtype. The batch of a or b may be missing, or 1.
            out: ``[M, N]`` or ``[B, M, N]``, of the same dtype or float32; with `accumulate` float32.
            bias: ``[N]``, contiguous, of the same dtype as a.
            accumulate: chains start from the values in `out`, not from +0.
            stream: a ``CUstream``; 0 is the default stream.

        Reduction order: one chain over ascending k for every element, as in ``docs/contract.md``.

        Raises:
            TypeError: an array is none, or of another dtype.
            EngineError: the arrays do not fit together, or the library refuses them.
        """
        product = _product(*_matrices(a, b, out), _bias(bias), accumulate)
        self._check(self._library.sb_bmm(self._context, ctypes.byref(product), stream))

    def matmul_sequences(
        self, a: Any, b: Any, cu_seqlens: Any = None, *, out: Any, accumulate: bool = False, stream: int
    ) -> None:
        """``out = a[M, K] @ b[K, N]`` over the tokens of packed sequences: a weight's gradient ``dy.mT @ x``.

        Args:
            a, b, out, accumulate, stream: as in :meth:`matmul`, without batches.
            cu_seqlens: int32 or int64 ``[sequences + 1]``, contiguous, from 0 to K; not checked. None: all of
                K is one sequence.

        Reduction order: as in :meth:`matmul`, and each sequence starts a new group of the chain.
        """
        product = _product(*_matrices(a, b, out), None, accumulate)
        sequences = _Sequences(None, 1, 0)
        if cu_seqlens is not None:
            offsets = _vector("cu_seqlens", cu_seqlens, ("int32", "int64"))
            sequences = _Sequences(offsets.data, offsets.shape[0] - 1, offsets.dtype == "int64")
        call = self._library.sb_gemm_ragged
        self._check(call(self._context, ctypes.byref(product), ctypes.byref(sequences), stream))

    def grouped_mm(self, a: Any, b: Any, offs: Any, *, out: Any, bias: Any = None, stream: int) -> None:
        """``out[t] = a[t] @ b[g] (+ bias[g])`` for the rows t of every group g: ``samebits.grouped_mm``.

        Group g has the rows from ``offs[g - 1]`` to ``offs[g] - 1``, the first one those from 0. Rows after
        the last group get +0. With ``b.mT`` this is the gradient of a, too; that of b is not in the library.

        Args:
            a: ``[T, K]``; float32, bfloat16 or float16, any strides that are not negative.
            b: ``[G, K, N]``, of the same dtype.
            offs: int32 ``[G]``, contiguous: the groups' ends, which never descend. Wrong ones end in an error
                of the device.
            out: ``[T, N]``, of the same dtype or float32.
            bias: ``[G, N]``, rows contiguous, of the same dtype as a.
            stream: as in :meth:`matmul`.

        Reduction order: as in :meth:`matmul`, whatever the group is.

        Raises:
            TypeError, EngineError: as :meth:`matmul`.
        """
        of, ends = _matrices(a, b, out), _vector("offs", offs, ("int32",))
        given = None if bias is None else Array.of(bias, "bias")
        if [len(x.shape) for x in of] != [2, 3, 2] or ends.shape != of[1].shape[:1]:
            shapes = [x.shape for x in (*of, ends)]
            raise EngineError(f"a, b, out, offs: expected [T, K], [G, K, N], [T, N], [G], got {shapes}", 1)
        product = _product(of[0], of[1]._replace(shape=(1, *of[1].shape[1:])), of[2], None, False)
        product.b.batch = of[1].strides[0]
        groups = _Groups(ends.data, ends.shape[0], 0)
        if given is not None:
            wanted = of[1].shape[0], of[1].shape[2]
            if (
                given.dtype != of[0].dtype
                or given.shape != wanted
                or (wanted[1] > 1 and given.strides[1] != 1)
            ):
                raise EngineError(f"bias: expected a's dtype and {wanted}, rows contiguous, got {given}", 1)
            product.bias, groups.bias = given.data, given.strides[0]
        call = self._library.sb_gemm_grouped
        self._check(call(self._context, ctypes.byref(product), ctypes.byref(groups), stream))

    def workspace_size(self, hidden: Any, weight: Any, *, entropy: bool = False) -> int:
        """Bytes of scratch that :meth:`linear_logp` wants for these arrays, or others as well aligned."""
        size = _Size()
        logp = _logp(Array.of(hidden, "hidden"), Array.of(weight, "weight"))
        logp.entropy = 4 if entropy else None
        self._check(self._library.sb_workspace_size(self._context, ctypes.byref(logp), ctypes.byref(size)))
        return size.value

    def linear_logp(
        self,
        hidden: Any,
        weight: Any,
        target: Any,
        *,
        out: Any,
        workspace: Any,
        stream: int,
        bias: Any = None,
        entropy: Any = None,
        ignore_index: int = -100,
        temperature: float = 1.0,
    ) -> None:
        """Log-probabilities of targets under ``softmax((hidden @ weight.T + bias) / temperature)``.

        Args:
            hidden: ``[tokens, D]``, rows contiguous; float32, bfloat16 or float16.
            weight: ``[V, D]``, rows contiguous, of the same dtype.
            target: int64 ``[tokens]``. One outside of [0, V) that is not `ignore_index` gives NaN.
            out: float32 ``[tokens]``.
            workspace: a contiguous array, of any dtype, of :meth:`workspace_size` bytes or more, at a
                multiple of 256.
            bias: ``[V]``, of the dtype of `hidden`.
            entropy: float32 ``[tokens]``, which gets the entropies.

        Reduction order: ``docs/contract.md``, "Log-probabilities".
        """
        logp = _logp(Array.of(hidden, "hidden"), Array.of(weight, "weight"))
        of = _vector("target", target, ("int64",)), _vector("out", out, ("float32",), written=True)
        kept = None if entropy is None else _vector("entropy", entropy, ("float32",), written=True)
        for name, x in (("target", of[0]), ("out", of[1]), ("entropy", kept)):
            if x is not None and x.shape != (logp.tokens,):
                raise EngineError(f"{name}: expected shape {(logp.tokens,)}, got {x.shape}", 1)
        (room, size), given = _room(workspace), _bias(bias)
        if given is not None and (given.shape != (logp.vocabulary,) or DTYPES[given.dtype] != logp.dtype):
            raise EngineError(f"bias: expected hidden's dtype and ({logp.vocabulary},), got {given}", 1)
        logp.target, logp.logp = of[0].data, of[1].data
        logp.entropy = None if kept is None else kept.data
        logp.bias = None if given is None else given.data
        logp.ignore_index, logp.temperature = ignore_index, temperature
        call = self._library.sb_linear_logp
        self._check(call(self._context, ctypes.byref(logp), room, size, stream))

    def attention_workspace_size(self, q: Any, k: Any, v: Any, **options: Any) -> int:
        """Bytes of scratch that :meth:`attention` wants for arrays like these, and the same `options`."""
        size, call = _Size(), _attention(q, k, v, **options)
        asked = self._library.sb_attention_workspace_size
        self._check(asked(self._context, ctypes.byref(call), ctypes.byref(size)))
        return size.value

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any,
        workspace: Any,
        stream: int,
        lse: Any = None,
        **options: Any,
    ) -> None:
        """Softmax attention with the bits of ``samebits.attention``: ``softmax(q k^T * scale) v``.

        Args:
            q: ``[B, Tq, H, D]``, or packed ``[tokens, H, D]``, vectors contiguous; float32, bfloat16 or
                float16.
            k: ``[B, Tk, Hk, D]``, packed ``[tokens, Hk, D]``, or pages ``[pages, page, Hk, D]``, of the same
                dtype.
            v: the same with its own last size.
            out: of q's shape with v's last size and of its dtype, contiguous, at a multiple of 16.
            workspace: a contiguous array, of any dtype, of :meth:`attention_workspace_size` bytes or more,
                at a multiple of 256.
            stream: as in :meth:`matmul`.
            lse: float32 ``[B, H, Tq]`` or ``[H, tokens]``, contiguous, which gets the log-sum-exps.
            options: ``causal``, ``window``, ``scale``, ``softcap``, ``sinks``, ``cu_seqlens_q``,
                ``cu_seqlens_k``, ``key_start``, ``key_length`` and ``block_table`` of ``samebits.attention``.
                Here the scale is positive, sinks are float32, and the lists int32 and contiguous. What is in
                them is not checked.

        Reduction order: ``docs/contract.md``, "Attention".

        Raises:
            TypeError, EngineError: as :meth:`matmul`. Masks and heads above 256 are not in the library.
        """
        call, (room, size) = _attention(q, k, v, **options), _room(workspace)
        shape = (*Array.of(q, "q").shape[:-1], call.values)
        for name, x, wanted, dtype in (
            ("out", out, shape, call.dtype),
            ("lse", lse, (*shape[:-3], shape[-2], shape[-3]), DTYPES["float32"]),
        ):
            if x is None and name == "lse":
                continue
            found = Array.of(x, name, written=True)
            if (found.shape, DTYPES.get(found.dtype)) != (wanted, dtype) or not _contiguous(found):
                raise EngineError(f"{name}: expected contiguous {wanted} of its dtype, got {found}", 1)
            setattr(call, name, found.data)
        run = self._library.sb_attention
        self._check(run(self._context, ctypes.byref(call), room, size, stream))

    def _check(self, status: int) -> None:
        if status:
            raise EngineError(f"samebits_native: {self._library.sb_last_error().decode()}", status)


def _number(name: str, dtype: str) -> int:
    if dtype not in DTYPES:
        raise TypeError(f"samebits_native: {name}: expected one of {', '.join(DTYPES)}, got {dtype}")
    return DTYPES[dtype]


def _matrices(a: Any, b: Any, out: Any) -> tuple[Array, Array, Array]:
    return Array.of(a, "a"), Array.of(b, "b"), Array.of(out, "out", written=True)


def _room(workspace: Any) -> tuple[int, int]:
    """The address and the bytes of an array of any dtype."""
    found = _seen("workspace", workspace)
    if found.read_only:
        raise _wrong("workspace", "an array that may be written", "a read-only one")
    if not _contiguous(found):
        got = f"shape {found.shape}, strides {found.strides}"
        raise EngineError(f"workspace: expected a contiguous array, got {got}", 1)
    return found.data, found.itemsize * math.prod(found.shape)


def _vector(name: str, x: Any, dtypes: tuple[str, ...], *, written: bool = False) -> Array:
    found = Array.of(x, name, written=written)
    if found.dtype not in dtypes:
        raise TypeError(f"samebits_native: {name}: expected {' or '.join(dtypes)}, got {found.dtype}")
    if len(found.shape) != 1 or (found.shape[0] > 1 and found.strides[0] != 1):
        raise EngineError(f"{name}: expected a contiguous vector, got {found}", 1)
    return found


def _bias(x: Any) -> Array | None:
    return None if x is None else _vector("bias", x, tuple(DTYPES))


def _matrix(x: Array) -> _Matrix:
    batch = x.strides[0] if len(x.shape) == 3 and x.shape[0] > 1 else 0
    return _Matrix(x.data, *x.strides[-2:], batch)


def _product(a: Array, b: Array, out: Array, bias: Array | None, accumulate: bool) -> _Product:
    dtype, out_dtype = _number("a", a.dtype), _number("out", out.dtype)
    batch = {x.shape[0] for x in (a, b) if len(x.shape) == 3} - {1} or {1}
    shapes = [x.shape for x in (a, b, out)]
    fits = (
        {len(shape) for shape in shapes} <= {2, 3}
        and len(batch) == 1
        and a.shape[-1] == b.shape[-2]
        and out.shape[-2:] == (a.shape[-2], b.shape[-1])
        and (out.shape[0] if len(out.shape) == 3 else 1) == max(batch)
    )
    if not fits:
        raise EngineError(f"a, b, out: expected matrices that fit together, got shapes {shapes}", 1)
    if b.dtype != a.dtype or (bias is not None and bias.dtype != a.dtype):
        raise EngineError(f"b, bias: expected a's dtype {a.dtype}, got {b.dtype, bias and bias.dtype}", 1)
    if bias is not None and bias.shape != out.shape[-1:]:
        raise EngineError(f"bias: expected shape {out.shape[-1:]}, got {bias.shape}", 1)
    sizes = a.shape[-2], b.shape[-1], a.shape[-1], max(batch)
    matrices = _matrix(a), _matrix(b), _matrix(out)
    return _Product(dtype, out_dtype, *sizes, *matrices, None if bias is None else bias.data, accumulate)


def _logp(hidden: Array, weight: Array) -> _Logp:
    if len(hidden.shape) != 2 or len(weight.shape) != 2 or hidden.shape[1] != weight.shape[1]:
        raise EngineError(
            f"hidden, weight: expected [tokens, D] and [V, D], got {hidden.shape} and {weight.shape}", 1
        )
    if weight.dtype != hidden.dtype:
        raise EngineError(f"weight: expected hidden's dtype {hidden.dtype}, got {weight.dtype}", 1)
    for name, x in (("hidden", hidden), ("weight", weight)):
        if x.shape[1] > 1 and x.strides[1] != 1:
            raise EngineError(f"{name}: expected contiguous rows, got strides {x.strides}", 1)
    sizes = *hidden.shape, weight.shape[0]
    rows = hidden.data, hidden.strides[0], weight.data, weight.strides[0]
    return _Logp(_number("hidden", hidden.dtype), *sizes, *rows)


def _contiguous(x: Array | _Seen) -> bool:
    wanted = _dense(x.shape)
    return all(n <= 1 or s == w for n, s, w in zip(x.shape, x.strides, wanted, strict=True))


def _vectors(x: Array) -> _Vectors:
    return _Vectors(x.data, 0 if len(x.shape) == 3 else x.strides[0], *x.strides[-3:-1])


def _attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    **lists: Any,
) -> _Attention:
    of = [Array.of(x, name) for name, x in (("q", q), ("k", k), ("v", v))]
    given = {name: None if lists.get(name) is None else Array.of(lists[name], name) for name in _LISTS}
    if unknown := lists.keys() - given.keys():
        raise TypeError(f"samebits_native: attention has no option {min(unknown)}")
    for name, x in given.items():
        if x is not None and x.dtype != "int32":
            raise TypeError(f"samebits_native: {name}: expected int32, got {x.dtype}")
    cu_q, cu_k, _, _, table = given.values()
    shapes = [x.shape for x in of]
    ranks = [3 if cu_q else 4, *[3 if cu_k else 4] * 2]
    if (
        [len(shape) for shape in shapes] != ranks
        or shapes[1][:-1] != shapes[2][:-1]
        or shapes[0][-1] != shapes[1][-1]
        or (cu_q is None and table is None and shapes[0][0] != shapes[1][0])
    ):
        raise EngineError(f"q, k, v: expected arrays that fit together, got shapes {shapes}", 1)
    batch = shapes[0][0] if cu_q is None else cu_q.shape[0] - 1
    if any(x.dtype != of[0].dtype for x in of):
        raise EngineError(f"k, v: expected q's dtype {of[0].dtype}, got {of[1].dtype, of[2].dtype}", 1)
    if any(x.shape[-1] > 1 and x.strides[-1] != 1 for x in of):
        raise EngineError(f"q, k, v: expected contiguous vectors, got {of}", 1)
    sizes = {"cu_seqlens_q": batch + 1, "cu_seqlens_k": batch + 1, "key_start": batch, "key_length": batch}
    for name, size in sizes.items():
        if given[name] is not None and _vector(name, given[name], ("int32",)).shape != (size,):
            raise EngineError(f"{name}: expected shape {(size,)}, got {given[name]}", 1)
    page, pages, columns = 0, 0, 0
    if table is not None:
        pages, page = shapes[1][:2]
        columns = table.shape[-1]
        if len(table.shape) != 2 or table.shape[0] != batch or (columns > 1 and table.strides[1] != 1):
            raise EngineError(f"block_table: expected {batch} contiguous rows, got {table}", 1)
    heads, head = shapes[0][-2:]
    capped = None if sinks is None else _vector("sinks", sinks, ("float32",))
    if capped is not None and capped.shape != (heads,):
        raise EngineError(f"sinks: expected shape {(heads,)}, got {capped.shape}", 1)
    if causal and window[1] > 0:
        raise EngineError(f"window: expected 0 or -1 to the right with causal, got {window[1]}", 1)
    call = _Attention(
        _number("q", of[0].dtype),
        *(batch, shapes[0][-3], shapes[1][-3] if table is None else columns * page),
        *(heads, shapes[1][-2], head, shapes[2][-1]),
        *map(_vectors, of),
    )
    call.scale = 1 / math.sqrt(head) if scale is None and head else scale or 0.0
    call.softcap, call.sinks = softcap, None if capped is None else capped.data
    call.left, call.right = window[0], 0 if causal else window[1]
    for name, x in given.items():
        setattr(call, name, None if x is None else x.data)
    call.block_table_row, call.page, call.pages = 0 if table is None else table.strides[0], page, pages
    return call

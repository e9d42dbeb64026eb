"""Binding of the C++ library. Arrays are numpy's, C-contiguous; the callers see to their shapes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

MODULE = "phloem.srt.kernels.cpu._native"
ISA_VARIABLE = "PHLOEM_ISA"
LIBRARY_VARIABLE = "PHLOEM_NATIVE_LIBRARY"
"""Path of a build to load instead of the installed one; `make check-native` uses it."""
KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3}
NOT_BUILT = "the CPU kernels are not built: no C++17 compiler was there when phloem was installed"


class KernelsUnavailable(Exception):
    """The kernels were not built, or this CPU cannot run those that were asked for."""


class KernelError(Exception):
    """The library refused or failed; the message is its own."""


class LayerSpec(ctypes.Structure):
    """`LayerSpec` of decoder.h."""

    _fields_: ClassVar[Any] = [
        (name, c_void_p)
        for name in (
            *("q", "k", "v", "o", "gate", "up", "down"),
            *("attention_norm", "mlp_norm", "q_norm", "k_norm"),
            *("q_bias", "k_bias", "v_bias", "o_bias"),
        )
    ]


class DecoderSpec(ctypes.Structure):
    """`DecoderSpec` of decoder.h."""

    _fields_: ClassVar[Any] = [
        *(
            (name, c_int32)
            for name in (
                *("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim"),
                *("vocab", "context", "slots", "kv_type", "window"),
            )
        ),
        ("eps", c_float),
        ("soft_cap", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("embedding", c_void_p),
        ("head", c_void_p),
        ("norm", c_void_p),
        ("layer", POINTER(LayerSpec)),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "phloem_error": (c_char_p, []),
    "phloem_isas": (c_char_p, []),
    "phloem_kernels": (c_void_p, [c_char_p]),
    "phloem_kernels_name": (c_char_p, [c_void_p]),
    "phloem_team_new": (c_void_p, [c_int]),
    "phloem_team_delete": (None, [c_void_p]),
    "phloem_row_bytes": (c_int64, [c_char_p, c_int]),
    "phloem_matrix_new": (c_void_p, [c_char_p, c_int, c_int, c_int]),
    "phloem_matrix_pack": (None, [c_void_p, c_char_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "phloem_matrix_delete": (None, [c_void_p]),
    "phloem_matrix_bytes": (c_int64, [c_void_p]),
    "phloem_matrix_row": (None, [c_void_p, c_int, c_void_p]),
    "phloem_multiply": (c_int, [c_void_p, c_void_p, c_void_p, c_int, c_void_p]),
    "phloem_attention_new": (
        c_void_p,
        [c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_float, c_int, c_int],
    ),
    "phloem_attention_delete": (None, [c_void_p]),
    "phloem_attention_write": (c_int, [c_void_p, c_int, c_void_p, c_void_p, c_void_p]),
    "phloem_attention_run": (
        c_int,
        [c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "phloem_decoder_new": (c_void_p, [POINTER(DecoderSpec), c_void_p, c_void_p]),
    "phloem_decoder_delete": (None, [c_void_p]),
    "phloem_decoder_step": (
        c_int,
        [c_void_p, c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "phloem_decoder_logits": (c_int, [c_void_p, c_int, c_void_p, c_void_p, c_void_p]),
    "phloem_decoder_kv_slot_bytes": (c_int64, [c_void_p]),
    "phloem_decoder_read_kv": (c_int, [c_void_p, c_int, c_void_p, c_void_p]),
    "phloem_decoder_write_kv": (c_int, [c_void_p, c_int, c_void_p, c_void_p]),
}


def library_path() -> str:
    """The library's file. Raises `KernelsUnavailable` where it was not built."""
    path = os.environ.get(LIBRARY_VARIABLE)
    if not path:
        spec = importlib.util.find_spec(MODULE)
        path = spec.origin if spec is not None else None
    if path is None:
        raise KernelsUnavailable(NOT_BUILT)
    return path


@cache
def library() -> Any:
    """The loaded library. Raises `KernelsUnavailable` where it was not built."""
    loaded = ctypes.CDLL(library_path())
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def last_error() -> str:
    """Why the library's last call on this thread failed."""
    text: bytes = library().phloem_error()
    return text.decode()


def runnable_isas() -> list[str]:
    """Names of the kernels that this CPU can run, best first."""
    names: bytes = library().phloem_isas()
    return names.decode().split()


def address(array: NDArray[Any]) -> int:
    """Where `array`'s first element is: what a pointer argument takes."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous")
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def pointers(arrays: Sequence[NDArray[Any] | None]) -> Any:
    """A C array of their addresses, null for None."""
    return (c_void_p * len(arrays))(
        *(None if array is None else address(array) for array in arrays)
    )


def _check(failed: int) -> None:
    """Raise `KernelError` unless a call returned 0."""
    if failed:
        raise KernelError(last_error())


class _Owned:
    """An object of the library that ends with this one; `_delete` is the function that ends it."""

    _delete: ClassVar[str]
    handle: int | None = None

    def _own(self, handle: int | None, what: str) -> None:
        """Raises `KernelError`, naming `what` could not be had, for null."""
        if handle is None:
            raise KernelError(f"{what}: {last_error()}")
        self.handle = handle

    def __del__(self) -> None:
        if self.handle is not None and library is not None:  # None at exit
            getattr(library(), self._delete)(self.handle)
            self.handle = None


class Kernels:
    """The kernels called `isa`; by default what `PHLOEM_ISA` names, else the best there are.

    Raises `KernelsUnavailable`.
    """

    def __init__(self, isa: str | None = None) -> None:
        wanted = isa if isa is not None else os.environ.get(ISA_VARIABLE, "")
        self.handle: int | None = library().phloem_kernels(wanted.encode())
        if self.handle is None:
            raise KernelsUnavailable(f"{last_error()}; there are: {', '.join(runnable_isas())}")
        self.isa: str = library().phloem_kernels_name(self.handle).decode()


class Team(_Owned):
    """`size` threads, the calling one included. They sleep between calls."""

    _delete = "phloem_team_delete"

    def __init__(self, size: int) -> None:
        self.size = size
        self._own(library().phloem_team_new(size), f"{size} threads")


class Matrix(_Owned):
    """A weight matrix [rows, columns] in the library's layout.

    `data` holds stored rows of `format` (a GGUF type's name; "int8" or "int4" quantises float32
    rows); row i of the matrix is stored row `order[i]`, or zero where that is -1. Raises
    `KernelError` for a format that the library does not have.
    """

    _delete = "phloem_matrix_delete"

    def __init__(
        self,
        format: str,
        data: NDArray[np.uint8],
        columns: int,
        order: NDArray[np.int32],
        team: Team,
        *,
        nibbles: bool = False,
    ) -> None:
        self.format = format
        self.shape = (len(order), columns)
        row_bytes: int = library().phloem_row_bytes(format.encode(), columns)
        if row_bytes < 0:
            raise KernelError(f"no kernel for rows of {columns} in {format}")
        if data.ndim != 2 or data.shape[1] != row_bytes:
            raise ValueError(f"rows of {data.shape} bytes, {format} has {row_bytes}")
        order = np.ascontiguousarray(order, np.int32)
        if len(order) and not -1 <= order.min() <= order.max() < len(data):
            raise ValueError(f"order names rows outside the {len(data)} there are")
        created = library().phloem_matrix_new(format.encode(), nibbles, *self.shape)
        self._own(created, f"a matrix of {self.shape}")
        library().phloem_matrix_pack(
            self.handle, format.encode(), address(data), row_bytes, address(order), team.handle
        )

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        count: int = library().phloem_matrix_bytes(self.handle)
        return count

    def row(self, index: int) -> NDArray[np.float32]:
        """Values of one row, [columns]."""
        out = np.empty(self.shape[1], np.float32)
        library().phloem_matrix_row(self.handle, index, address(out))
        return out

    def multiply(self, kernels: Kernels, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """x [n, columns] times the transpose → [n, rows]."""
        rows, columns = self.shape
        if x.ndim != 2 or x.shape[1] != columns:
            raise ValueError(f"x has shape {x.shape}, the matrix {self.shape}")
        out = np.empty((len(x), -(-rows // 16) * 16), np.float32)
        _check(
            library().phloem_multiply(kernels.handle, self.handle, address(x), len(x), address(out))
        )
        return out[:, :rows]


class Attention(_Owned):
    """Attention of one layer, alone, with its KV pool: what the tests hold against a reference. A
    model's is inside its decoder.

    `window` tokens are seen by a query, itself included (0: all); `soft_cap` · tanh(score /
    `soft_cap`) takes the place of a score (0: none). Raises `KernelError`.
    """

    _delete = "phloem_attention_delete"

    def __init__(
        self,
        kernels: Kernels,
        team: Team,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        kv_dtype: str = "float32",
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> None:
        self._team = team  # outlives it
        self._q_shape = (heads, head_dim)
        self._kv_shape = (kv_heads, head_dim)
        created = library().phloem_attention_new(
            kernels.handle,
            team.handle,
            *(heads, kv_heads, head_dim, window, soft_cap, KV_TYPES[kv_dtype], slots),
        )
        self._own(created, f"a KV pool of {slots} slots")

    def write(
        self, slots: NDArray[np.int32], k: NDArray[np.float32], v: NDArray[np.float32]
    ) -> None:
        """Keep k and v [n, kv_heads, head_dim] in `slots` [n]."""
        for array in (k, v):
            if array.shape != (len(slots), *self._kv_shape):
                raise ValueError(f"{len(slots)} slots for keys or values of shape {array.shape}")
        _check(
            library().phloem_attention_write(
                self.handle, len(slots), address(slots), address(k), address(v)
            )
        )

    def run(
        self,
        query_lens: Sequence[int],
        kv_slots: Sequence[NDArray[np.int32]],
        q: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """Attend with the last `query_lens[i]` tokens of each row of `kv_slots`: q, and the result,
        [n, heads, head_dim]. Scores are scaled by 1 / √head_dim."""
        if q.shape != (sum(query_lens), *self._q_shape):
            raise ValueError(f"q has shape {q.shape}, the rows have {sum(query_lens)} queries")
        out = np.empty_like(q)
        counts, lengths = _row_sizes(query_lens, kv_slots)
        _check(
            library().phloem_attention_run(
                self.handle,
                len(kv_slots),
                address(counts),
                address(lengths),
                pointers(kv_slots),
                address(q),
                address(out),
            )
        )
        return out


class Decoder(_Owned):
    """A model of the Llama family with its KV pool. `pointed_to` holds all that `spec` points to:
    it outlives the decoder, as `kernels` and `team` do, because a thread that came late to the last
    step may still be looking at it. Raises `KernelError`."""

    _delete = "phloem_decoder_delete"

    def __init__(self, spec: DecoderSpec, pointed_to: object, kernels: Kernels, team: Team) -> None:
        self._outlive = (pointed_to, kernels, team)
        created = library().phloem_decoder_new(ctypes.byref(spec), kernels.handle, team.handle)
        self._own(created, f"a KV pool of {spec.slots} slots")

    def step(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        query_lens: Sequence[int],
        kv_slots: Sequence[NDArray[np.int32]],
        hidden: NDArray[np.float32],
    ) -> None:
        """Compute `token_ids` at `positions` [n], of all rows one after another, into `hidden`
        [n, hidden]."""
        counts, lengths = _row_sizes(query_lens, kv_slots)
        _check(
            library().phloem_decoder_step(
                self.handle,
                len(token_ids),
                address(token_ids),
                address(positions),
                len(kv_slots),
                address(counts),
                address(lengths),
                pointers(kv_slots),
                address(hidden),
            )
        )

    def logits(
        self,
        hidden: NDArray[np.float32],
        masks: Sequence[NDArray[np.int32] | None] | None,
        out: NDArray[np.float32],
    ) -> None:
        """Logits of `hidden` [m, hidden] into `out` [m, vocab]; what a mask forbids may be -inf."""
        _check(
            library().phloem_decoder_logits(
                self.handle,
                len(hidden),
                address(hidden),
                None if masks is None else pointers(masks),
                address(out),
            )
        )

    @property
    def kv_slot_bytes(self) -> int:
        """Bytes of a slot's keys and values over all layers, as they are kept."""
        count: int = library().phloem_decoder_kv_slot_bytes(self.handle)
        return count

    def read_kv(self, slots: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        """Copy the KV of `slots` [n] to `out` [n · kv_slot_bytes], beside whatever is computed with
        other slots."""
        _check(
            library().phloem_decoder_read_kv(self.handle, len(slots), address(slots), address(out))
        )

    def write_kv(self, slots: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Copy to `slots` what `read_kv` gave."""
        _check(
            library().phloem_decoder_write_kv(
                self.handle, len(slots), address(slots), address(data)
            )
        )


def _row_sizes(
    query_lens: Sequence[int], kv_slots: Sequence[NDArray[np.int32]]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Of each row, how many tokens are new and how long it is."""
    lengths = [len(slots) for slots in kv_slots]
    return np.array(query_lens, np.int32), np.array(lengths, np.int32)

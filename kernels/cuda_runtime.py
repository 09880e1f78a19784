"""Compile a CUDA source with NVRTC and launch its kernels through the driver, with what a torch installation already carries.

No toolkit, no host compiler and no torch extension is needed: NVRTC is a dependency of torch's CUDA wheels and libcuda comes
with the driver. Kernels run on torch's current stream with attributes for clusters and programmatic dependent launch.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch


class CompileError(RuntimeError):
    """NVRTC refused a source; the message carries its log."""


def _candidates() -> list[str]:
    major = (torch.version.cuda or "0").split(".")[0]
    names = [f"libnvrtc.so.{major}"]
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        names += sorted(glob.glob(os.path.join(root, "**", f"libnvrtc.so.{major}*"), recursive=True))
    return [*names, f"/usr/local/cuda/lib64/libnvrtc.so.{major}", "libnvrtc.so"]


@functools.cache
def nvrtc() -> ctypes.CDLL | None:
    """The NVRTC library that fits torch's CUDA, or None where there is none."""
    for name in _candidates():
        try:
            for builtins in glob.glob(os.path.join(os.path.dirname(name), "libnvrtc-builtins.so*")) if "/" in name else ():
                ctypes.CDLL(builtins)  # NVRTC opens it by name, outside of its own folder's reach
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def compile_cubin(source: Path, *, headers: Sequence[Path] = (), architecture: str, defines: Sequence[str]) -> bytes:
    """Machine code of `source` for `architecture` (such as "sm_90a"). Raises `CompileError` with the compiler's log.

    headers: files that `source` includes by their names.
    What was compiled before is taken from `cache_folder`, by a digest of everything that it depends on.
    """
    lib = nvrtc()
    if lib is None:
        raise CompileError(
            f"no NVRTC library for CUDA {torch.version.cuda}; install the nvidia-cuda-nvrtc package of that CUDA"
        )
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "--device-as-default-execution-space",
        *(f"-D{d}" for d in defines),
    ]
    digest = hashlib.sha256(f"{major.value}.{minor.value} {options}".encode())
    for path in (source, *headers):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    kept = cache_folder() / f"{source.stem}-{digest.hexdigest()}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        cubin = _compile(lib, source, headers, architecture, options)
    try:  # whole or not at all, whoever else does the same; and a server without a home still serves
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, kept)
    except OSError:
        pass
    return cubin


def cache_folder() -> Path:
    """Where compiled kernels are kept between processes: `VLLM_TILEQUANT_CACHE`, or a folder of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("VLLM_TILEQUANT_CACHE") or os.path.join(cache, "vllm_tilequant"))


def _compile(lib: ctypes.CDLL, source: Path, headers: Sequence[Path], architecture: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(h.read_bytes() for h in headers))
    names = (ctypes.c_char_p * len(headers))(*(h.name.encode() for h in headers))
    code = lib.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names)
    if code:
        raise CompileError(f"nvrtcCreateProgram failed with {code}")
    try:
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        if lib.nvrtcCompileProgram(program, len(options), array):
            size = ctypes.c_size_t()
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            raise CompileError(f"{source.name} for {architecture}:\n{log.value.decode(errors='replace')}")
        size = ctypes.c_size_t()
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: CUDA error {code} ({(text.value or b'unknown').decode()})")


@functools.lru_cache(maxsize=1 << 14)
def tensor_map(data: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int) -> bytes:
    """What a kernel needs to copy boxes of `box_rows` rows in one instruction, of 32, 64 or 128 bytes each, swizzled by as
    many: a `CUtensorMap` of the device memory [rows, row_bytes] that begins at address `data`."""
    room = (ctypes.c_ubyte * 192)()
    at = -(-ctypes.addressof(room) // 64) * 64
    code = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _UINT8,
        2,
        ctypes.c_void_p(data),
        (ctypes.c_uint64 * 2)(row_bytes, rows),
        (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(box_bytes, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        *(_NO_INTERLEAVE, _SWIZZLES[box_bytes], _PROMOTE_256_BYTES, _ZEROS_OUTSIDE),
    )
    check(code, f"tensor map of {rows} rows of {row_bytes} bytes")
    return ctypes.string_at(at, 128)


_UINT8, _NO_INTERLEAVE, _PROMOTE_256_BYTES, _ZEROS_OUTSIDE = 0, 0, 3, 0
_SWIZZLES = {32: 1, 64: 2, 128: 3}


class _Value(ctypes.Union):
    _fields_ = [("bytes", ctypes.c_char * 64), ("dim", ctypes.c_uint * 3), ("flag", ctypes.c_int)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _Value)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_Parameters = ctypes.c_void_p * 1
_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6
_MAX_DYNAMIC_SHARED, _SHARED_CARVEOUT, _NON_PORTABLE_CLUSTER = 8, 9, 14
_STATIC_SHARED, _LOCAL_BYTES, _NUM_REGS = 1, 3, 4


class _Request:
    """What the driver is asked for a launch, of which only the stream and the arguments' address change."""

    def __init__(self, grid: int, threads: int, cluster: int, shared_bytes: int, overlap: bool) -> None:
        attributes = (_Attribute * 2)()
        attributes[0].id = _CLUSTER_DIMENSION
        attributes[0].value.dim[:] = (cluster, 1, 1)
        attributes[1].id = _PROGRAMMATIC_SERIALIZATION
        attributes[1].value.flag = 1
        self.config = _Config((grid, 1, 1), (threads, 1, 1), shared_bytes, None, attributes, 2 if overlap else 1)
        self.pointer = ctypes.byref(self.config)
        self.parameters = _Parameters()


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one CTA may have on a device."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def current_stream(device: torch.device) -> int:
    """Handle of torch's current stream on a device with a number.

    Asked for as Inductor's graphs do it, without making an object, which took a tenth of a call's time on the host.
    """
    return torch._C._cuda_getCurrentRawStream(device.index)  # type: ignore[attr-defined]


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, columns] of a GPU, whatever lies there. Asked for as Inductor's graphs do it: a third of `torch.empty`'s time."""
    if _allocate is None or torch._C._cuda_getDevice() != device.index:  # type: ignore[attr-defined]
        return torch.empty((rows, columns), dtype=dtype, device=device)
    return _allocate((rows, columns), (columns, 1), dtype)


def zeros_kept(kept: dict[torch.device, torch.Tensor], device: torch.device, words: int) -> torch.Tensor:
    """At least so many int32 of a device, which launches find zero and leave zero: the process's own, grown where they are too
    few. Ask for all of them at load: a memory profile then counts them, and a captured graph knows their address."""
    found = kept.get(device)
    if found is None or found.numel() < words:
        kept.pop(device, None)
        del found  # before the larger one is allocated
        found = kept[device] = torch.zeros(words, dtype=torch.int32, device=device)
    return found


_allocate = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # type: ignore[attr-defined]


class Kernel:
    """One kernel of a loaded module, allowed all of a multiprocessor's shared memory and clusters of up to 16."""

    def __init__(self, handle: ctypes.c_void_p, name: str, shared_limit: int) -> None:
        self.handle, self.name = handle, name
        self._requests: dict[tuple[int, int, int, int, bool], list[_Request]] = {}
        free = shared_limit - self.attribute(_STATIC_SHARED)
        check(driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, free), f"shared memory limit of {name}")
        check(driver().cuFuncSetAttribute(handle, _NON_PORTABLE_CLUSTER, 1), f"cluster limit of {name}")

    def prefer_shared(self) -> None:
        """All of a multiprocessor's memory that may be either shall be shared memory rather than cache."""
        check(driver().cuFuncSetAttribute(self.handle, _SHARED_CARVEOUT, 100), f"shared memory carve-out of {self.name}")

    def attribute(self, which: int) -> int:
        value = ctypes.c_int()
        check(driver().cuFuncGetAttribute(ctypes.byref(value), which, self.handle), f"attribute of {self.name}")
        return value.value

    def clusters_at_once(self, *, threads: int, cluster: int, shared_bytes: int) -> int:
        """How many clusters of so many CTAs the device runs at a time. Asked of the driver, because multiprocessors that are
        switched off differ from chip to chip."""
        request, found = _Request(cluster, threads, cluster, shared_bytes, False), ctypes.c_int()
        code = driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), self.handle, request.pointer)
        check(code, f"clusters of {cluster} CTAs of {self.name}")
        return found.value

    def launch(
        self, args: ctypes.Structure, *, grid: int, threads: int, cluster: int, shared_bytes: int, stream: int, overlap: bool
    ) -> None:
        """Run on `stream`; `overlap` lets it start while the kernel before it ends (the kernel waits where it must)."""
        free = self._requests.get((grid, threads, cluster, shared_bytes, overlap))
        if free is None:
            free = self._requests.setdefault((grid, threads, cluster, shared_bytes, overlap), [])
        try:
            request = free.pop()  # nobody else's meanwhile: another thread may launch too
        except IndexError:
            request = _Request(grid, threads, cluster, shared_bytes, overlap)
        request.config.stream = stream
        request.parameters[0] = ctypes.addressof(args)
        code = driver().cuLaunchKernelEx(request.pointer, self.handle, request.parameters, None)
        free.append(request)
        if code:
            check(code, f"launch of {self.name}, grid {grid} x {threads} threads, cluster {cluster}, {shared_bytes} B shared")


class Module:
    """A compiled source on one device; kernels are looked up by name."""

    def __init__(self, cubin: bytes, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the primary context exist and current
            torch.zeros(1, device=device)
            self._module = ctypes.c_void_p()
            check(driver().cuModuleLoadData(ctypes.byref(self._module), cubin), "loading a compiled kernel")
            self.shared_limit = shared_limit(device)
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            handle = ctypes.c_void_p()
            with torch.cuda.device(self.device):
                check(driver().cuModuleGetFunction(ctypes.byref(handle), self._module, name.encode()), f"kernel {name}")
                self._kernels[name] = Kernel(handle, name, self.shared_limit)
        return self._kernels[name]

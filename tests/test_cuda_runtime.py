"""Compiled kernels are kept between processes, by everything that their machine code depends on. No GPU, no NVRTC."""

import ctypes
import types

import pytest
import torch

from vllm_tilequant.kernels import cuda_runtime


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A stand-in for NVRTC: `version` may be set, `compiled` counts."""
    state = types.SimpleNamespace(version=(13, 0), compiled=0)

    def version(major, minor):
        major._obj.value, minor._obj.value = state.version

    def compile(lib, source, headers, architecture, options):
        state.compiled += 1
        return f"{state.compiled} {architecture} {options}".encode()

    monkeypatch.setattr(cuda_runtime, "nvrtc", lambda: types.SimpleNamespace(nvrtcVersion=version))
    monkeypatch.setattr(cuda_runtime, "_compile", compile)
    monkeypatch.setenv("VLLM_TILEQUANT_CACHE", str(tmp_path / "cache"))
    state.source, state.header = tmp_path / "a.cu", tmp_path / "b.cu"
    state.source.write_text("source")
    state.header.write_text("header")
    state.get = lambda architecture="sm_90a", defines=("A=1",): cuda_runtime.compile_cubin(
        state.source, headers=[state.header], architecture=architecture, defines=defines
    )
    return state


def test_what_was_compiled_is_compiled_once(compiler):
    assert compiler.get() == compiler.get()
    assert compiler.compiled == 1
    assert len(list(cuda_runtime.cache_folder().iterdir())) == 1  # nothing half written stays


def test_everything_that_matters_is_in_the_name(compiler):
    found = {compiler.get(), compiler.get(architecture="sm_100"), compiler.get(defines=("A=2",)), compiler.get(defines=())}
    compiler.version = (13, 1)
    found.add(compiler.get())
    compiler.header.write_text("another header")
    found.add(compiler.get())
    compiler.source.write_text("another source")
    found.add(compiler.get())
    assert compiler.compiled == len(found) == 7


def test_a_folder_that_cannot_be_written_is_no_fault(compiler, monkeypatch):
    monkeypatch.setenv("VLLM_TILEQUANT_CACHE", str(compiler.source / "below a file"))
    assert compiler.get() != compiler.get()


def test_where_the_cache_lies(monkeypatch):
    monkeypatch.delenv("VLLM_TILEQUANT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cuda_runtime.cache_folder()) == "/x/vllm_tilequant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cuda_runtime.cache_folder().parts[-2:] == (".cache", "vllm_tilequant")


def test_the_current_stream_is_asked_for_by_device(monkeypatch):
    """Where torch has CUDA, this name is what Inductor's own code calls."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
    assert cuda_runtime.current_stream(torch.device("cuda", 3)) == 1003


def test_what_a_launch_asks_for_is_kept_and_nobody_else_s(monkeypatch):
    seen = []

    def launch(pointer, handle, parameters, extra):
        config = pointer._obj
        if config.stream == 1:  # as another thread would
            kernel.launch(args[2], grid=7, threads=32, cluster=2, shared_bytes=100, stream=2, overlap=False)
        seen.append((list(config.grid), list(config.block), config.shared_bytes, config.stream, config.count, parameters[0]))
        seen[-1] += ([config.attributes[i].id for i in range(config.count)], config.attributes[0].value.dim[0], pointer)
        return 0

    names = ("cuFuncGetAttribute", "cuFuncSetAttribute")
    stand_in = types.SimpleNamespace(cuLaunchKernelEx=launch, **dict.fromkeys(names, lambda *a: 0))
    monkeypatch.setattr(cuda_runtime, "driver", lambda: stand_in)
    kernel = cuda_runtime.Kernel(ctypes.c_void_p(5), "k", 1000)
    args = [ctypes.c_int(i) for i in range(3)]
    for i in (0, 1):
        kernel.launch(args[i], grid=7, threads=32, cluster=2, shared_bytes=100, stream=i, overlap=False)
    where = [ctypes.addressof(a) for a in args]
    shape = ([7, 1, 1], [32, 1, 1], 100)
    assert [s[:-1] for s in seen] == [(*shape, stream or None, 1, where[stream], [4], 2) for stream in (0, 2, 1)]
    assert seen[0][-1] is seen[2][-1] is not seen[1][-1]
    kernel.launch(args[0], grid=9, threads=32, cluster=1, shared_bytes=100, stream=0, overlap=True)
    assert seen[3][:-1] == ([9, 1, 1], [32, 1, 1], 100, None, 2, where[0], [4, 6], 1)


@pytest.mark.gpu
def test_memory_is_on_the_device_that_was_asked_for():
    for device in {torch.device("cuda", i) for i in (0, torch.cuda.device_count() - 1)}:
        got = cuda_runtime.empty_rows(3, 5, torch.float16, device)
        assert got.shape == (3, 5) and got.is_contiguous() and (got.dtype, got.device) == (torch.float16, device)


@pytest.mark.gpu
def test_the_current_stream_is_torch_s():
    device = torch.zeros(1, device="cuda").device
    with torch.cuda.stream(torch.cuda.Stream(device)):
        assert cuda_runtime.current_stream(device) == torch.cuda.current_stream(device).cuda_stream != 0

"""The CUDA runtime: compiling and caching need no GPU; loading and launching do."""

import multiprocessing
import subprocess
import sys
import types
import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("cuda.core")

from samebits.backends import UnavailableError, cache
from samebits.backends.cuda import (
    assert_spans,
    compiler,
    devices,
    driver,
    losses,
    runtime,
    tensor_maps,
    vector_norm,
)
from samebits.backends.cuda.compiler import KernelSpec
from tests.support.cubins import resources
from tests.support.devices import ARCH
from tests.support.threads import in_threads

SOURCE = """
#include "value.cuh"
struct Params { float* x; long long n; int add; };
extern "C" __global__ void fill(const __grid_constant__ Params p)
{
    extern __shared__ float shared[];
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += gridDim.x * blockDim.x) {
        shared[threadIdx.x] = p.add + VALUE + HEADER_VALUE;
        p.x[i] = shared[threadIdx.x];
    }
}
"""


def spec(value=1, params="Pqi", smem=256, **changes):
    return KernelSpec("fill.cu", "fill", params, (("VALUE", value),), block=64, smem=smem, **changes)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A folder of kernels and an empty cache of our own."""
    include = tmp_path / "kernels" / "include"
    include.mkdir(parents=True)
    (tmp_path / "kernels" / "fill.cu").write_text(SOURCE)
    (include / "value.cuh").write_text("#define HEADER_VALUE 0\n")
    monkeypatch.setattr(compiler, "KERNELS", include.parent)
    monkeypatch.setattr(compiler, "INCLUDE", include)
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(runtime, "_kernels", {})
    return include.parent


@pytest.fixture
def compiled(monkeypatch):
    """The specs that were really compiled, in order."""
    calls = []
    real = compiler.compile

    def counting(spec, arch):
        calls.append(spec)
        return real(spec, arch)

    monkeypatch.setattr(compiler, "compile", counting)
    return calls


def entries(kernels):
    return sorted((kernels.parent / "cache").iterdir())


@pytest.mark.long
def test_import_needs_no_cuda():
    code = "import sys, samebits.backends.cuda.precompile; sys.exit('cuda.core' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compile_reports_resources(kernels):
    cubin = compiler.compile(spec(), "sm_90a")
    assert cubin.code[:4] == b"\x7fELF"
    assert cubin.registers > 0
    assert cubin.spill_bytes == cubin.local_bytes == 0

    (kernels / "fill.cu").write_text(
        "struct Params { float* x; long long n; int add; };\n"
        'extern "C" __global__ void fill(const __grid_constant__ Params p)\n'
        "{ float v[64]; for (int i = 0; i < 64; i++) v[(i * p.add) % 64] = p.x[i]; p.x[0] = v[p.n]; }\n"
    )
    assert compiler.compile(spec(), "sm_90a").local_bytes >= 256


def test_compile_error_carries_the_log(kernels):
    (kernels / "fill.cu").write_text("not C++")
    with pytest.raises(
        compiler.CompileError, match=r"fill.cu for sm_80 with .*VALUE(.|\n)*fill.cu\(1\): error"
    ):
        compiler.compile(spec(), "sm_80")


def test_nvrtc_version_is_full():
    assert len(compiler.nvrtc_version().split(".")) == 3


def test_cache_hit(kernels, compiled):
    assert compiler.cached_cubin(spec(), "sm_90a") == compiler.cached_cubin(spec(), "sm_90a")
    assert len(compiled) == 1


def test_cache_key_covers_what_changes_code(kernels, compiled, monkeypatch):
    base = compiler.cached_cubin(spec(), "sm_90a")
    assert compiler.cached_cubin(spec(value=2), "sm_90a") != base
    assert compiler.cached_cubin(spec(), "sm_80") != base
    (kernels / "include" / "value.cuh").write_text("#define HEADER_VALUE 5\n")
    assert compiler.cached_cubin(spec(), "sm_90a") != base
    (kernels / "fill.cu").write_text(SOURCE + "\n// another source\n")
    compiler.cached_cubin(spec(), "sm_90a")
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.9.99")
    compiler.cached_cubin(spec(), "sm_90a")
    monkeypatch.setattr(compiler, "_FLOAT_OPTIONS", compiler._FLOAT_OPTIONS | {"fma": True})
    compiler.cached_cubin(spec(), "sm_90a")
    assert len(compiled) == 7
    assert len(entries(kernels)) == 7


def test_damaged_entry_is_compiled_again(kernels, compiled):
    code = compiler.cached_cubin(spec(), "sm_90a")
    (entry,) = entries(kernels)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1])
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert compiler.cached_cubin(spec(), "sm_90a") == code
    assert entry.read_bytes() == whole
    assert len(compiled) == 2


def test_unwritable_cache_warns_once(kernels, compiled, monkeypatch):
    blocked = kernels.parent / "file"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(blocked))
    with pytest.warns(RuntimeWarning, match="SAMEBITS_CACHE_DIR"):
        compiler.cached_cubin(spec(), "sm_90a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiler.cached_cubin(spec(), "sm_90a")
    assert len(compiled) == 2


def _compile_in_child(folder, results):
    compiler.KERNELS, compiler.INCLUDE = folder, folder / "include"
    results.put(compiler.cached_cubin(spec(), "sm_90a"))


@pytest.mark.long
def test_processes_share_one_cache(kernels):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=_compile_in_child, args=(kernels, results)) for _ in range(2)]
    for child in children:
        child.start()
    codes = {results.get(timeout=120) for _ in children}
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert len(codes) == 1
    assert len(entries(kernels)) == 1


def test_status_says_why_and_what_to_do(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = devices.status()
    assert not found.available
    assert found.reason
    assert found.remedy

    def missing(_):
        raise ModuleNotFoundError("cuda")

    monkeypatch.setattr(compiler.importlib.util, "find_spec", missing)
    with pytest.raises(
        UnavailableError, match=r"cuda-core — install the extra cuda: pip install '.\[cuda\]'"
    ):
        runtime.load(spec(), 0)
    assert "cuda-core" not in devices.status().reason, "without a GPU, no package helps"


def test_old_gpu_is_refused():
    info = devices.DeviceInfo(0, "Tesla V100", (7, 0), 80, 98304, 6 << 20)
    with pytest.raises(UnavailableError, match=r"Tesla V100 is sm_70.*fill.cu needs sm_80"):
        devices._require_capability(info, spec().oldest, "fill.cu needs")


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")]
)
def test_arch(capability, arch):
    assert devices.DeviceInfo(0, "", capability, 1, 1, 1).arch.target == arch


@pytest.mark.parametrize(("clock", "width", "code", "rate"), [(2_619_000, 5120, 0, 3.352e6), (1, 1, 1, 0)])
def test_memory_rate(monkeypatch, clock, width, code, rate):
    def attribute(found, which, device):
        found._obj.value = {36: clock, 37: width}[which]
        return code

    library = types.SimpleNamespace(cuDeviceGetAttribute=attribute)
    monkeypatch.setattr(driver, "library", lambda: library)
    assert driver.memory_rate(0) == pytest.approx(rate, rel=1e-3)


# Below: on a GPU.


def fill(kernel, x, add, grid=(2, 1, 1)):
    kernel.launch(grid, x.data_ptr(), x.numel(), add)


@pytest.fixture
def loaded(kernels):
    return runtime.load(spec(), 0)


@pytest.mark.gpu
def test_launch(loaded):
    x = torch.full((1000,), float("nan"), device="cuda")
    fill(loaded, x, 41)
    assert (x == 42).all()
    assert runtime.load(spec(), 0) is loaded


@pytest.mark.gpu
def test_launch_follows_the_current_stream(loaded):
    x = torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.fill_(7)
        fill(loaded, x, 1)
        y = x.clone()
    side.synchronize()
    assert (y == 2).all()


@pytest.mark.gpu
def test_launch_from_a_fresh_thread(loaded):
    x = torch.zeros(1000, device="cuda")

    def work():
        for _ in range(200):
            fill(loaded, x, 1)

    in_threads(*[work] * 4)
    assert (x == 2).all()


@pytest.mark.gpu
def test_capture_needs_a_loaded_kernel(loaded):
    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(loaded, x, 9)
        with pytest.raises(RuntimeError, match=r"samebits.prepare"):
            runtime.load(spec(value=77), 0)
    x.zero_()
    graph.replay()
    assert (x == 10).all()


@pytest.mark.gpu
def test_launch_errors_surface(loaded):
    x = torch.zeros(10, device="cuda")
    with pytest.raises(driver.LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        fill(loaded, x, 1, grid=(0, 1, 1))
    fill(loaded, x, 1)
    assert (x == 2).all()


@pytest.mark.gpu
def test_what_cannot_run_is_refused_at_load(kernels):
    with pytest.raises(driver.LaunchError, match=r"takes parameters of 24 bytes.*packs 16"):
        runtime.load(spec(params="Pq"), 0)
    with pytest.raises(driver.LaunchError, match="needs 1000000 bytes of shared memory"):
        runtime.load(spec(smem=1_000_000), 0)


@pytest.mark.gpu
def test_cluster_and_programmatic_launch(kernels):
    if not ARCH.copies_tiles:
        pytest.skip("clusters need sm_90")
    kernel = runtime.load(spec(value=5, cluster=(2, 1, 1), programmatic=True), 0)
    x = torch.zeros(1000, device="cuda")
    fill(kernel, x, 1)
    assert (x == 6).all()
    with pytest.raises(driver.LaunchError, match="CUDA_ERROR"):
        fill(kernel, x, 1, grid=(3, 1, 1))


@pytest.mark.gpu
def test_tensor_map():
    if not ARCH.copies_tiles:
        pytest.skip("tensor maps need sm_90")
    x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    encoded = tensor_maps.tensor_map(x.data_ptr(), x.dtype, (64, 64), (128,), (64, 32))
    assert len(encoded) == 128
    assert any(encoded)
    assert tensor_maps.tensor_map(x.data_ptr(), x.dtype, (64, 64), (128,), (64, 32)) is encoded
    with pytest.raises(driver.LaunchError, match=r"cuTensorMapEncodeTiled.*CUDA_ERROR_INVALID_VALUE"):
        tensor_maps.tensor_map(x.data_ptr() + 2, x.dtype, (64, 64), (128,), (64, 32))


@pytest.mark.gpu
def test_second_device(kernels):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernel = runtime.load(spec(value=6), 1)
    x = torch.zeros(1000, device="cuda:1")
    fill(kernel, x, 1)
    assert (x == 7).all()
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_status_on_a_gpu():
    found = devices.status()
    assert found.available, found
    assert found.devices[0].sm_count > 0
    assert found.devices[0].max_smem >= 64 << 10


class Allocations(TorchFunctionMode):
    """A mode that gives CPU tensors in place of new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func is torch.empty
        self.shapes.append(args[0])
        return torch.ones(args[0])


def test_a_function_mode_sees_what_kernels_write() -> None:
    """``samebits verify`` puts NaN around it so."""
    with Allocations() as mode:
        out = runtime.empty((2, 3), torch.float32, 0)
    assert out.sum() == 6
    assert mode.shapes == [(2, 3)]


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_assertion_on_offsets_compiles(arch: str, dtype: torch.dtype) -> None:
    assert resources(assert_spans.spec(dtype), arch).local_bytes == 0


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_steps_of_cross_entropy_compile(arch: str, dtype: torch.dtype) -> None:
    pick, *others = (losses.kernel_spec(entry, dtype) for entry in ("pick", "mean_of_losses", "spread"))
    for spec in others:
        assert (spec.source, spec.constants) == (pick.source, pick.constants)  # compiled together
    assert resources(pick, arch).local_bytes == 0


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_gradient_of_norms_compiles(arch: str, dtype: torch.dtype) -> None:
    assert resources(vector_norm.kernel_spec(dtype), arch).local_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", ["[1, 8]", "[0, 7]", "[0, 9, 8]", "[0, -1, 8]", "[0, 3, 8, 8]"])
def test_bad_offsets_end_in_a_device_assert(offsets: str) -> None:
    """In a process of its own, since an assertion on the GPU ends that."""
    program = f"""
import torch, samebits
x, weight = (torch.ones(n, 16, device="cuda", dtype=torch.bfloat16) for n in (8, 24))
ends = torch.tensor({offsets}, device="cuda")[:]
samebits.linear(x, weight.requires_grad_(), cu_seqlens=ends).backward(x.new_ones(8, 24))
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    good = offsets == "[0, 3, 8, 8]"
    assert (done.returncode == 0) == good, done.stderr
    assert good or "cu_seqlens rises from 0" in done.stderr + done.stdout
    assert good or "device-side assert" in done.stderr

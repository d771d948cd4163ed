"""Every kind of tensor has its numbers or a named reason, and nothing of the program's changes."""

from __future__ import annotations

import gc
import os
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from cirron_otel import semconv
from cirron_otel.weights import reductions_kernel, reductions_torch
from cirron_otel.weights.statistics import Skipped, TensorStats, buffer_stats, tensor_stats
from helpers import RunProgram
from weights.statistics_by_hand import WAYS, Way, bytes_of, check

BOTH = pytest.mark.parametrize("way", [WAYS[name] for name in ("avx2", "torch", "device")])


def _layouts() -> dict[str, torch.Tensor]:
    base = torch.randn(8, 6, 10, 12)
    return {
        "transposed": base.transpose(1, 3),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "slice": base[:, ::2, 1:7],
        "expanded": torch.randn(5, 1).expand(5, 7000),
        "large_slice": torch.randn(600, 300)[:, 3:],
        "reversed": base.flip(0)[2:],
        "offset": base.reshape(-1)[17:],
        "negative": torch.imag(torch.randn(300, dtype=torch.complex64).conj()),
        "with_gradient": torch.randn(40, requires_grad=True) * 2,
        "one_wide": torch.randn(4, 1, 5).transpose(0, 1),
        "overlapping": torch.arange(12.0).as_strided((5, 4), (2, 1)),
    }


@BOTH
@pytest.mark.parametrize("layout", _layouts())
def test_any_layout(layout: str, way: Way) -> None:
    """Views, slices, expanded and permuted tensors: every element once, as often as it is seen."""
    tensor = _layouts()[layout]
    check(way(tensor), tensor.detach().clone())


def _kinds() -> dict[str, Callable[[], object]]:
    return {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.empty(3, device="meta"),
        "complex": lambda: torch.zeros(3, dtype=torch.complex64),
        "uninitialized": lambda: nn.LazyLinear(3).weight,
        "not_a_tensor": lambda: [1.0, 2.0],
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "dtype": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "no_storage": _freed,
        "fake": _fake,
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    }


def _freed() -> torch.Tensor:
    tensor = torch.randn(100)[10:]
    tensor.untyped_storage().resize_(0)
    return tensor


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(4)


@pytest.mark.parametrize("reason", _kinds())
def test_what_cannot_be_described_has_a_named_reason(reason: str) -> None:
    """A tensor without describable values gives its reason, and its neighbours their numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of these kinds deprecated
        odd = _kinds()[reason]()
        first, found, last = tensor_stats([torch.ones(3), odd, torch.ones(2)])  # type: ignore[list-item]
    assert isinstance(found, Skipped)
    assert found.reason == reason
    assert isinstance(first, TensorStats)
    assert isinstance(last, TensorStats)
    assert (first.norm, last.mean) == (pytest.approx(3**0.5), 1.0)


def test_a_subclass_that_raises_is_one_error() -> None:
    """A tensor subclass whose every operation fails does not keep the others from their numbers."""

    class Broken(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: object, **__: object) -> object:
            raise RuntimeError("not today")

    found = tensor_stats([torch.ones(3).as_subclass(Broken), torch.ones(3)])
    assert isinstance(found[0], Skipped)
    assert found[0].reason == "error"
    assert "not today" in found[0].detail
    assert isinstance(found[1], TensorStats)


def test_a_subclass_with_values_of_its_own_is_read_through_them() -> None:
    """A wrapper whose memory is not its values is read by its operations, never at its address."""

    class Double(torch.Tensor):
        inner: torch.Tensor

        @classmethod
        def __torch_dispatch__(
            cls,
            func: Callable[..., object],
            types: object,
            args: Sequence[object] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            plain = [one.inner * 2 if isinstance(one, Double) else one for one in args]
            return func(*plain, **(kwargs or {}))

    inner = torch.randn(500)
    double = torch.Tensor._make_wrapper_subclass(Double, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
    double.inner = inner
    (found,) = tensor_stats([double])
    assert isinstance(found, TensorStats)
    check(found, inner * 2)


def test_of_a_sharded_tensor_the_local_part_is_described(tmp_path: Path) -> None:
    """A DTensor gives the numbers of its shard; its placement and whole shape are told."""
    from torch import distributed  # noqa: PLC0415 - not in every build
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        whole = torch.randn(6, 4)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        (found,) = tensor_stats([nn.Parameter(sharded)])
    finally:
        distributed.destroy_process_group()
    assert isinstance(found, TensorStats)
    check(found, whole)
    assert found.attrs[semconv.TENSOR_GLOBAL_SHAPE] == [6, 4]
    assert found.attrs[semconv.TENSOR_MESH_SHAPE] == [1]
    assert len(found.attrs[semconv.TENSOR_PLACEMENTS]) == 1


def test_many_tensors_come_back_in_their_order() -> None:
    """Small and large, described and skipped, of many dtypes, in one call."""
    sizes = [3, 200_000, 0, 1, 70_000, 5, 300_000, 2]
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.float64]
    tensors = [
        (torch.arange(size) % 100 - number).to(dtypes[number % 4])
        for number, size in enumerate(sizes)
    ]
    tensors.insert(4, torch.empty(2, device="meta"))
    found = tensor_stats(tensors)
    assert isinstance(found[4], Skipped)
    for one, tensor in zip(found, tensors, strict=True):
        if isinstance(one, TensorStats):
            check(one, tensor)
    assert sum(isinstance(one, TensorStats) for one in found) == len(sizes)


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    """To the last bit: chunks are merged in their order, whoever did them."""
    tensors = [torch.randn(1_000_003), torch.randn(700_000).half(), torch.randn(20)]
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(tensor_stats(tensors))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_no_histogram_where_none_is_wanted() -> None:
    """``histogram=False`` leaves it out and changes no other number."""
    tensor = torch.randn(5000)
    tensor[7] = torch.inf
    for one in (tensor, tensor[8:], torch.empty(0)):
        (full,), (bare,) = tensor_stats([one]), tensor_stats([one], histogram=False)
        assert isinstance(full, TensorStats)
        assert isinstance(bare, TensorStats)
        assert bare.histogram is None
        assert (bare.min, bare.norm, bare.nonfinite_count) == (
            full.min, full.norm, full.nonfinite_count,
        )  # fmt: skip
        assert bare.finite is None or bare.finite.histogram is None


@BOTH
def test_nothing_of_the_program_changes(way: Way) -> None:
    """Random streams, gradient mode, flags, gradients and the values stay as they were."""
    parameter = nn.Parameter(torch.randn(3, 5000))
    parameter.grad = torch.randn(3, 5000)
    value, random = parameter.detach().clone(), torch.get_rng_state()
    version = parameter._version
    torch.use_deterministic_algorithms(mode=True)
    torch.set_flush_denormal(True)
    try:
        with torch.device("meta"):  # a default device of the program's is not for us
            found = way(parameter)
        flushed = torch.tensor([1e-38]) * 1e-3
        assert torch.is_grad_enabled()
    finally:
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(mode=False)
    check(found, value)
    assert flushed.view(torch.int32).item() == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(parameter, value)
    assert parameter._version == version
    (parameter * 2).sum().backward()  # its graph still works


def test_flushed_subnormals_are_described_all_the_same() -> None:
    """A program that makes its own arithmetic flush subnormals does not change the numbers."""
    tensor = torch.full((100,), 1e-42)
    tensor[0] = 2e-42
    if not reductions_kernel.COMPILED:
        pytest.skip("torch's own operations flush them")
    torch.set_flush_denormal(True)
    try:
        (found,) = tensor_stats([tensor])
    finally:
        torch.set_flush_denormal(False)
    assert isinstance(found, TensorStats)
    check(found, tensor)


def test_no_reference_to_a_tensor_is_kept() -> None:
    """After the call a tensor goes when the program lets it go."""
    tensor = torch.randn(100)
    count = sys.getrefcount(tensor)
    (found,) = tensor_stats([tensor])
    gc.collect()
    assert isinstance(found, TensorStats)
    assert sys.getrefcount(tensor) == count


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of Linux")
def test_little_memory_is_needed_beside_the_tensor() -> None:
    """Neither way needs more than 4 MB beside 64 MB: of torch's way its pieces tell."""
    tensor = torch.randn(1 << 24)
    tracemalloc.start()
    try:
        (found,) = tensor_stats([tensor])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found, TensorStats)
    assert peak < 1 << 20
    sizes = [piece.numel() for piece in reductions_torch.pieces(tensor, reductions_torch.PIECE)]
    assert sum(sizes) == tensor.numel()
    # In double precision, with a mask, the distances and the places in the histogram beside it.
    assert max(sizes) * (8 + 8 + 8 + 4 + 1) < 4 << 20


def test_calls_from_several_threads_at_once() -> None:
    """The kernel keeps nothing between calls: they do not meet."""
    tensors = [torch.randn(300_000) + number for number in range(4)]
    found: dict[int, TensorStats | Skipped] = {}

    def describe(number: int) -> None:
        for _ in range(5):
            (found[number],) = tensor_stats([tensors[number]])

    threads = [threading.Thread(target=describe, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, tensor in enumerate(tensors):
        one = found[number]
        assert isinstance(one, TensorStats)
        check(one, tensor)


def test_no_thread_stays() -> None:
    """The threads of a call have ended when it returns: a later fork has nothing to fear."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("reads the threads of Linux")
    tensor = torch.randn(2_000_000)
    tensor.sum()  # torch's own threads are there after this
    before = len(list(tasks.iterdir()))
    tensor_stats([tensor])
    assert len(list(tasks.iterdir())) == before
    if (child := os.fork()) == 0:
        (found,) = tensor_stats([tensor])
        os._exit(0 if isinstance(found, TensorStats) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_bytes_of_a_file_are_described_without_torch() -> None:
    """``buffer_stats`` takes memory at any offset, in torch's and safetensors' words."""
    tensor = torch.randn(3000).bfloat16()
    data = bytes_of(tensor)
    for offset in range(4):
        view = memoryview(b"x" * offset + data)[offset:]
        for name in ("bfloat16", "BF16", "torch.bfloat16"):
            found = buffer_stats(view, name, (3, 1000))
            assert isinstance(found, TensorStats)
            assert found.shape == (3, 1000)
            check(found, tensor.reshape(3, 1000))
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int16):
        tensor = torch.arange(5000).to(dtype)
        view = memoryview(b"x" + bytes_of(tensor))[1:]
        found = buffer_stats(view, str(dtype), (5000,))
        assert isinstance(found, TensorStats)
        check(found, tensor)


def test_bytes_that_are_no_tensor() -> None:
    """A wrong size is an error that says both; unknown types and complex numbers have a reason."""
    with pytest.raises(ValueError, match=r"12 bytes, this buffer has 11"):
        buffer_stats(b"x" * 11, "float32", (3,))
    for name, reason in (("F4", "dtype"), ("C64", "complex"), ("string", "dtype")):
        found = buffer_stats(b"", name, (0,))
        assert isinstance(found, Skipped)
        assert found.reason == reason
    empty = buffer_stats(b"", "F32", (0, 3))
    assert isinstance(empty, TensorStats)
    assert empty.norm == 0


def test_the_pure_way_can_be_asked_for(run_program: RunProgram) -> None:
    """``CIRRON_OTEL_PURE=1`` leaves the kernel aside, and the numbers are the same."""
    program = (
        "import torch\n"
        "from cirron_otel.weights import reductions_kernel, statistics\n"
        "assert not reductions_kernel.COMPILED\n"
        "print(statistics.tensor_stats([torch.arange(5.0)])[0].histogram.counts)"
    )
    done = run_program(program, {"CIRRON_OTEL_PURE": "1"})
    (found,) = tensor_stats([torch.arange(5.0)])
    assert isinstance(found, TensorStats)
    assert found.histogram is not None
    assert done.stdout.strip() == str(found.histogram.counts)


def test_the_kernel_refuses_what_it_cannot_read() -> None:
    """A wrong item is an exception, never a read beyond the memory."""
    if not reductions_kernel.COMPILED:
        pytest.skip("the kernel was not built")
    reduce = reductions_kernel.kernel.reduce
    for item, error in (
        ((b"1234", 2, 0, None), ValueError),
        ((0, 2, 0, None), ValueError),
        ((b"1234", 1, 99, None), ValueError),
        ((b"1234", 0, 0, None), ValueError),
        ((b"1234", 4, 10, b"short"), ValueError),
        ((b"1234", 4, 10, None), ValueError),
        (("text", 1, 0, None), TypeError),
        ((b"1234", 1, 0), TypeError),
        (7, TypeError),
    ):
        with pytest.raises(error):
            reduce([(b"12345678", 2, 0, None), item], 2, True)  # noqa: FBT003 - a C function

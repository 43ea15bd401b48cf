"""What we ask of the CUDA driver, with a driver that computes on the host: the calls, their order, and what arrives."""

import ctypes

import numpy as np
import onnx
import pytest

from onnxamp.errors import RuntimeMissingError
from onnxamp.ort import cuda, doctor
from onnxamp.ort.binding import Binding
from onnxamp.ort.session import SessionConfig, open_session
from onnxamp.ort.values import Buffer, element_type


class Host:
    """libcuda, whose device is the host: one GPU of capability 7.5, copies that are done at once."""

    def __init__(self, failing=""):
        self.calls, self.failing, self.handles, self.memory = [], failing, 0, []

    def __getattr__(self, name):
        if name.startswith("on_"):
            return lambda *_: None

        def call(*arguments):
            self.calls.append(name)
            if name == self.failing:
                return 100
            getattr(self, f"on_{name}")(*arguments)
            return 0

        return call

    def on_cuDriverGetVersion(self, number):
        number._obj.value = 13010

    def on_cuDeviceGetCount(self, number):
        number._obj.value = 1

    def on_cuDeviceGetName(self, name, size, device):
        name.value = b"Host"

    def on_cuDeviceTotalMem_v2(self, number, device):
        number._obj.value = 1 << 30

    def on_cuDeviceGetAttribute(self, number, attribute, device):
        number._obj.value = {75: 7, 76: 5}[attribute]

    def on_cuMemGetInfo_v2(self, free, total):
        free._obj.value, total._obj.value = 1, 2

    def on_cuStreamCreate(self, handle, flags):
        self.handles += 1
        handle._obj.value = self.handles

    on_cuEventCreate = on_cuStreamCreate

    def on_cuMemHostAlloc(self, pointer, size, flags):
        self.memory.append(np.zeros(size.value, np.uint8))
        pointer._obj.value = self.memory[-1].ctypes.data

    def on_cuMemcpyHtoDAsync_v2(self, target, source, size, stream):
        ctypes.memmove(target.value, source.value, size.value)

    def on_cuMemcpyHtoD_v2(self, target, source, size):
        ctypes.memmove(target.value, source.value, size.value)

    def on_cuMemcpyDtoH_v2(self, target, source, size):
        ctypes.memmove(target.value, source.value, size.value)


class HostStream(cuda.Stream):
    device = "cpu"


@pytest.fixture
def driver():
    return cuda.Driver(Host())


def test_facts_of_the_driver(driver):
    assert driver.version == "13.1"
    assert driver.gpus() == [cuda.Gpu("Host", (7, 5), 1 << 30)]
    assert driver.memory() == (1, 2)


def test_a_failing_call_names_itself():
    with pytest.raises(RuntimeMissingError, match="failed in cuInit with code 100"):
        cuda.Driver(Host("cuInit"))


def test_without_a_driver_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(cuda, "_LIBRARY", "libcuda-that-is-not-there.so")
    with pytest.raises(RuntimeMissingError, match="No NVIDIA driver"):
        cuda.Driver()


def test_ranges_of_device_memory_are_copied_alone(driver, monkeypatch):
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    buffer = Buffer(64)
    buffer.device = "cuda"  # from here on it is reached through the driver alone
    buffer.write(8, np.arange(4, dtype=np.uint8))
    np.testing.assert_array_equal(buffer.read(7, 6), [0, 0, 1, 2, 3, 0])
    assert driver._library.calls[-2:] == ["cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"]


def test_batches_take_turns_in_pinned_memory(driver):
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[n] x) => (float[n] y) { y = Add(x, x) }'
    session = open_session(onnx.parser.parse_model(text), SessionConfig("cpu"))
    binding = Binding(session, HostStream(0, driver))
    calls, results = driver._library.calls, []
    for size in (4, 4, 3, 4, 9):
        values = np.arange(size, dtype=np.float32) + size
        result = Buffer(4 * size).view(0, (size,), element_type(np.dtype(np.float32)))
        binding.output("y", result)
        binding.feed("x", values)
        values[:] = -1  # what was fed is on its way already
        binding.run()
        results.append(result.read())
    for size, result in zip((4, 4, 3, 4, 9), results, strict=True):
        np.testing.assert_array_equal(result, 2 * (np.arange(size, dtype=np.float32) + size))
    assert calls.count("cuMemHostAlloc") == 3  # two slots, and a larger one in the end
    turn = ["cuEventSynchronize", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent", "cuEventRecord"]
    assert calls[-5:] == turn


@pytest.mark.parametrize(
    ("capability", "dtype", "says"),
    [
        ((6, 1), "fp16", "no gain in speed from fp16"),
        ((7, 0), "fp16", None),
        ((7, 5), "bf16", "use --dtype fp16"),
        ((8, 0), "bf16", None),
        ((12, 0), "fp16", None),
    ],
)
def test_what_to_expect_of_old_devices(capability, dtype, says):
    text = cuda.expectation(capability, dtype)
    assert text is None if says is None else says in text


def test_the_doctor_tells_driver_devices_and_libraries(driver, monkeypatch):
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    findings = []
    facts = doctor._cuda(findings)
    assert not findings
    assert facts["driver"] == "runs CUDA up to 13.1"
    assert "Host, compute capability 7.5, 1 GiB; compute capability 7.5 has no bf16 units" in facts["gpu 0"]
    assert facts["cuDNN"].startswith("built for")

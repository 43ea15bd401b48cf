"""What we ask of the CUDA driver, with a driver that computes on the host: the calls, their order, and what arrives."""

import ctypes
import gc
import math

import numpy as np
import pytest

from onnxamp.errors import AmpError, RuntimeMissingError
from onnxamp.ort import binding, cuda, doctor
from onnxamp.ort.binding import Binding
from onnxamp.ort.values import Buffer, element_type


class Host:
    """libcuda, whose device is the host: one GPU of capability 7.5. What is put on a stream is done as late as is allowed: when an
    event behind it is waited for."""

    def __init__(self, failing=""):
        self.calls, self.failing, self.handles, self.queue, self.pinned, self.events = [], failing, 0, [], {}, set()

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

    def on_cuEventCreate(self, handle, flags):
        self.on_cuStreamCreate(handle, flags)
        self.events.add(handle._obj.value)

    def on_cuEventDestroy_v2(self, event):
        self.events.remove(event.value)

    def on_cuMemHostAlloc(self, pointer, size, flags):
        memory = np.zeros(size.value, np.uint8)
        pointer._obj.value = memory.ctypes.data
        self.pinned[memory.ctypes.data] = memory

    def on_cuMemFreeHost(self, pointer):
        self.pinned.pop(pointer.value)[:] = 255

    def on_cuMemcpyHtoDAsync_v2(self, target, source, size, stream):
        self.queue.append(lambda: ctypes.memmove(target.value, source.value, size.value))

    def on_cuEventRecord(self, event, stream):
        assert event.value in self.events
        self.queue.append(event.value)

    def on_cuEventSynchronize(self, event):
        while event.value in self.queue:
            self.advance()

    def on_cuStreamSynchronize(self, stream):
        while self.queue:
            self.advance()

    def advance(self):
        if callable(work := self.queue.pop(0)):
            work()

    def on_cuMemcpyHtoD_v2(self, target, source, size):
        ctypes.memmove(target.value, source.value, size.value)

    def on_cuMemcpyDtoH_v2(self, target, source, size):
        ctypes.memmove(target.value, source.value, size.value)


class HostStream(cuda.Stream):
    device = "cpu"


class Sum:
    """A session and its binding: y = a + b in float32, computed when the device comes to it."""

    def __init__(self, host):
        self.host, self.places = host, {}

    def io_binding(self):
        return self

    def bind_input(self, name, device, device_id, kind, shape, pointer):
        self.places[name] = (ctypes.c_float * math.prod(shape)).from_address(pointer)

    bind_output = bind_input

    def run_with_iobinding(self, binding, options):
        a, b, y = (np.ctypeslib.as_array(self.places[name]) for name in "aby")
        self.host.queue.append(lambda: np.add(a, b, out=y))


class Freed(Buffer):
    """Memory that holds NaN once it is given back."""

    def __del__(self):
        self.host[:] = 255


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


def test_batches_take_turns_in_pinned_memory(driver, monkeypatch):
    """Batches that grow, one input after the other, while the device lags behind; nothing is freed that it still reads."""
    monkeypatch.setattr(binding, "Buffer", Freed)
    host = driver._library
    stream = HostStream(0, driver)
    bound = Binding(Sum(host), stream)
    results, expected = [], []
    sizes = (4, 4, 3, 4, 9, 9, 2, 30)
    for size in sizes:
        batch = {name: np.arange(size, dtype=np.float32) + size + shift for name, shift in (("a", 0), ("b", 0.5))}
        result = Buffer(4 * size).view(0, (size,), element_type(np.dtype(np.float32)))
        bound.output("y", result)
        expected.append(batch["a"] + batch["b"])
        for name, values in batch.items():
            bound.feed(name, values)
            values[:] = -1  # what was fed is on its way already
        bound.run()
        results.append(result)
    assert host.queue  # it does lag behind
    turn = ["cuEventSynchronize", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent"]
    assert host.calls[-6:] == [*turn, "cuEventRecord", "cuEventRecord"]
    assert host.calls.count("cuMemHostAlloc") == 10  # for each input two slots, and larger ones in their place
    assert len(host.pinned) == 4
    assert len(host.events) == 8
    del bound
    gc.collect()
    assert not host.pinned
    assert not host.events
    for result, values in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.read(), values)


def test_a_failing_run_still_holds_its_batch(driver):
    class Failing(Sum):
        def run_with_iobinding(self, binding, options):
            raise ValueError("no kernel")

    bound = Binding(Failing(driver._library), HostStream(0, driver))
    bound.feed("a", np.zeros(3, np.float32))
    with pytest.raises(AmpError):
        bound.run()
    assert driver._library.calls[-1] == "cuEventRecord"


def test_streams_are_used_again(driver):
    first, second = HostStream(0, driver), HostStream(0, driver)
    pair = (first.pointer, first.copies)
    assert len({*pair, second.pointer, second.copies}) == 4
    del first
    third = HostStream(0, driver)
    assert (third.pointer, third.copies) == pair
    assert driver._library.calls.count("cuStreamCreate") == 4
    assert driver._library.calls.count("cuDevicePrimaryCtxRetain") == 1


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

"""Which device a process takes, and which provider options are not the user's."""

import pytest

from onnxamp.errors import RuntimeMissingError, UsageError
from onnxamp.ort import cuda
from onnxamp.trainer import device
from onnxamp.trainer.device import Device, find_device


class Stream:
    pointer = 7


class Driver:
    def gpus(self):
        return [cuda.Gpu("first", (8, 0), 1), cuda.Gpu("second", (8, 0), 1)]


def test_a_process_without_a_gpu_is_told_how_many_there_are(monkeypatch):
    monkeypatch.setattr(cuda, "driver", Driver)
    monkeypatch.setattr(device, "provider_list", lambda name: ["CUDAExecutionProvider"])
    assert find_device("cuda", 1) == Device("cuda", "cuda", True, 1)
    says = "no GPU for local rank 2: this machine shows 2 .* --nproc-per-node 2"
    with pytest.raises(RuntimeMissingError, match=says):
        find_device("cuda", 2)


@pytest.mark.parametrize("name", ["device_id", "user_compute_stream"])
def test_the_place_of_the_state_is_the_trainers_own(name):
    on_gpu = Device("cuda", "cuda", True, 1)
    assert on_gpu.options(Stream(), {"use_tf32": "1"}) == {
        "device_id": "1",
        "user_compute_stream": "7",
        "use_tf32": "1",
    }
    with pytest.raises(UsageError, match=f"The provider option {name} is the trainer's own .* CUDA_VISIBLE_DEVICES"):
        on_gpu.options(Stream(), {name: "0"})


def test_a_provider_without_memory_of_its_own_takes_a_device():
    assert Device("directml", "cpu", False).options(None, {"device_id": "1"}) == {"device_id": "1"}

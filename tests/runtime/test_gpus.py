"""Which GPU is meant: by the environment, by NVML and by JAX."""

import types

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.gpus import Gpus, jax_gpus, list_gpus, only_gpu

NAMES = ["11111111-aaaa-4000-8000-000000000000", "22222222-aaaa-4000-8000-000000000000",
         "22223333-aaaa-4000-8000-000000000000"]  # fmt: skip
FIRST, SECOND, THIRD = (f"GPU-{name}" for name in NAMES)
INSTANCES = ["MIG-77777777-aaaa-4000-8000-000000000000", "MIG-88888888-aaaa-4000-8000-000000000000"]


class FakeNvml:
    """Three GPUs by PCI bus; the third is divided into two instances, whose handles are tuples."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def __init__(self, lost=()):
        self.lost = lost

    def nvmlInit(self):
        pass

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.lost or index > 2:
            raise RuntimeError("GPU is lost")
        return "abc"[index]

    def nvmlDeviceGetHandleByUUID(self, name):
        return {FIRST: "a", SECOND: "b", THIRD: "c"}.get(name) or ("c", INSTANCES.index(name))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        if not isinstance(handle, tuple):
            raise RuntimeError("Invalid Argument")
        return handle[0]

    def nvmlDeviceGetUUID(self, handle):
        return INSTANCES[handle[1]] if isinstance(handle, tuple) else (FIRST, SECOND, THIRD)["abc".index(handle)]

    def nvmlDeviceGetName(self, handle):
        return {"a": "NVIDIA T4", "b": "NVIDIA GeForce RTX 4090", "c": "NVIDIA A100"}[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        gib = 10 if isinstance(handle, tuple) else {"a": 16, "b": 24, "c": 40}[handle]
        return types.SimpleNamespace(used=2**30, total=gib * 2**30)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return {"a": 50, "b": 60, "c": 70}[handle]  # instances have none


@pytest.mark.parametrize(
    "visible, expected",
    [
        (None, [FIRST, SECOND, THIRD]),
        ("2, 0", [THIRD, FIRST]),
        (f"{THIRD},0", [THIRD, FIRST]),
        (INSTANCES[1], [INSTANCES[1]]),
        ("1,7", [SECOND]),
        ("-1", []),
        ("", []),
    ],
)
def test_the_visible_gpus_are_those_of_the_list_in_its_order(visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Gpus(FakeNvml(), environment).uuids == expected


def test_an_instance_has_its_own_memory_and_the_temperature_of_its_gpu():
    gpus = Gpus(FakeNvml(), {"CUDA_VISIBLE_DEVICES": INSTANCES[0]})
    (read,) = gpus.read()
    assert read["memory_total_gb"] == 10 and read["temperature_c"] == 70 and read["utilization"] is None
    assert gpus.first_card()[:2] == ("NVIDIA A100", 10 * 2**30)


def test_a_lost_gpu_is_not_there():
    assert Gpus(FakeNvml(lost=(1,)), {}).uuids == [FIRST, THIRD]


def test_one_gpu_keeps_the_name_that_the_environment_gives_it_or_is_named_by_its_uuid():
    def only(index, **environment):
        return only_gpu(index, environment, FakeNvml())

    assert only(0) == {"CUDA_VISIBLE_DEVICES": FIRST}  # without a list: as nvidia-smi counts
    assert only(1, CUDA_VISIBLE_DEVICES="2,0") == {"CUDA_VISIBLE_DEVICES": "0"}  # in whatever order CUDA counts
    assert only(1, CUDA_VISIBLE_DEVICES="GPU-1111,GPU-22223") == {"CUDA_VISIBLE_DEVICES": "GPU-22223"}
    with pytest.raises(UserError, match="--gpu_index = 3: there are 3 GPUs, numbered from 0"):
        only(3)
    with pytest.raises(UserError, match="--gpu_index = 2: CUDA_VISIBLE_DEVICES = 2,1 leaves 2 GPUs"):
        only(2, CUDA_VISIBLE_DEVICES="2,1")
    assert list_gpus({}, FakeNvml()) == [FIRST, SECOND, THIRD]


def test_readings_follow_the_devices_of_jax(monkeypatch):
    def device(place):
        return types.SimpleNamespace(platform="gpu", local_hardware_id=place)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert jax_gpus([device(0), device(1)], FakeNvml()).uuids == [THIRD, FIRST]
    assert jax_gpus([device(1)], FakeNvml()).uuids == [FIRST]  # another process has the other one

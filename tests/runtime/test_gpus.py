"""Which GPU is meant: CUDA's rules for numbers, UUIDs, prefixes and MIG, in any order, and what CUDA itself says."""

import ctypes
import types
import uuid

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.runtime import gpus as gpus_module
from jepa_jax.runtime.gpus import Gpus, cuda_uuids, jax_gpus, list_gpus, only_gpu

NAMES = ["11111111-aaaa-4000-8000-000000000000", "22222222-aaaa-4000-8000-000000000000",
         "22223333-aaaa-4000-8000-000000000000"]  # fmt: skip
FIRST, SECOND, THIRD = (f"GPU-{name}" for name in NAMES)
INSTANCES = ["MIG-77777777-aaaa-4000-8000-000000000000", "MIG-88888888-aaaa-4000-8000-000000000000"]


class FakeNvml:
    """Three GPUs by PCI bus, of which the second is the fastest; with `mig` the third is divided into two instances."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self, mig=False, lost=()):
        self.mig, self.lost = mig, lost

    def nvmlInit(self):
        pass

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.lost:
            raise RuntimeError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle):
        return INSTANCES[handle[1]] if isinstance(handle, tuple) else (FIRST, SECOND, THIRD)[handle]

    def nvmlDeviceGetName(self, handle):
        return ("NVIDIA T4", "NVIDIA GeForce RTX 4090", "NVIDIA A100")[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        gib = 10 if isinstance(handle, tuple) else (16, 24, 40)[handle]
        return types.SimpleNamespace(used=2**30, total=gib * 2**30)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return (50, 60, 70)[handle]  # instances have none: a tuple is an error

    def nvmlDeviceGetNumGpuCores(self, handle):
        return (2560, 16384, 6912)[handle]

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return (1590, 2520, 1410)[handle]

    def nvmlDeviceGetMigMode(self, handle):
        if handle == 0:
            raise RuntimeError("Not Supported")
        return (int(self.mig and handle == 2), 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index > 1:
            raise RuntimeError("Not Found")
        return (handle, index)


def seen(visible=None, order=None, **machine):
    environment = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    return Gpus(FakeNvml(**machine), {key: value for key, value in environment.items() if value is not None}).uuids


@pytest.mark.parametrize(
    "visible, order, expected",
    [
        (None, "PCI_BUS_ID", [FIRST, SECOND, THIRD]),
        (None, None, [SECOND, THIRD, FIRST]),  # CUDA counts the fastest first
        ("0", "PCI_BUS_ID", [FIRST]),
        ("0,2", None, [SECOND, FIRST]),
        ("2, 0", "PCI_BUS_ID", [THIRD, FIRST]),
        ("GPU-1111", None, [FIRST]),  # a prefix
        (f"{THIRD},GPU-2222222,0", "PCI_BUS_ID", [THIRD, SECOND, FIRST]),
        ("GPU-2222", None, []),  # of two GPUs: CUDA sees none
        ("1,7,0", "PCI_BUS_ID", [SECOND]),  # what follows an invalid entry is not seen
        ("1,-1,0", "PCI_BUS_ID", [SECOND]),
        ("1,GPU-none,0", "PCI_BUS_ID", [SECOND]),
        ("first", None, []),
        ("", None, []),
    ],
)  # fmt: skip
def test_the_visible_gpus_are_those_that_cuda_shows_in_its_order(visible, order, expected):
    assert seen(visible, order) == expected


@pytest.mark.parametrize(
    "visible, expected",
    [
        (None, [FIRST, SECOND]),  # whole GPUs before instances
        (INSTANCES[1], [INSTANCES[1]]),
        ("MIG-8888", [INSTANCES[1]]),
        ("2", [INSTANCES[0]]),
        (THIRD, [INSTANCES[0]]),
        ("MIG-none", []),
    ],
)
def test_a_mig_instance_stands_for_the_gpu_that_it_is_a_part_of(visible, expected):
    assert seen(visible, "PCI_BUS_ID", mig=True) == expected


def test_an_instance_has_its_own_memory_and_the_temperature_of_its_gpu():
    gpus = Gpus(FakeNvml(mig=True), {"CUDA_VISIBLE_DEVICES": INSTANCES[0]})
    (read,) = gpus.read()
    assert read["memory_total_gb"] == 10 and read["temperature_c"] == 70 and read["utilization"] is None
    assert gpus.first_name_and_memory() == ("NVIDIA A100", 10 * 2**30)


def test_a_lost_gpu_is_not_there():
    assert seen(None, "PCI_BUS_ID", lost=(1,)) == [FIRST, THIRD]


def test_one_gpu_is_named_by_its_uuid_whatever_the_order():
    def only(index, **environment):
        return only_gpu(index, environment, FakeNvml())["CUDA_VISIBLE_DEVICES"]

    assert only(0) == FIRST  # without a list: as nvidia-smi counts
    assert only(0, CUDA_VISIBLE_DEVICES="0") == SECOND  # the fastest
    assert only(1, CUDA_VISIBLE_DEVICES="GPU-1111,GPU-22223") == THIRD
    with pytest.raises(UserError, match="--gpu_index = 3: there are 3 GPUs, numbered from 0"):
        only(3)
    with pytest.raises(UserError, match="--gpu_index = 1: CUDA_VISIBLE_DEVICES = 2,9,1 leaves 1 GPUs"):
        only(1, CUDA_VISIBLE_DEVICES="2,9,1")
    assert list_gpus({}, FakeNvml()) == [FIRST, SECOND, THIRD]


class FakeCuda:
    """The driver's library in a process that sees the third GPU and then the first."""

    def __init__(self, names=(NAMES[2], NAMES[0])):
        self.names = names

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.names)
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = 10 + index
        return 0

    def cuDeviceGetUuid_v2(self, raw, device):
        ctypes.memmove(raw._obj, uuid.UUID(self.names[device.value - 10]).bytes, 16)
        return 0


def test_cuda_tells_what_it_shows_this_process():
    assert cuda_uuids(FakeCuda()) == [NAMES[2], NAMES[0]]
    broken = FakeCuda()
    broken.cuInit = lambda flags: 100  # no device
    assert cuda_uuids(broken) is None


def test_readings_follow_the_devices_of_jax(monkeypatch):
    def device(place):
        return types.SimpleNamespace(platform="gpu", local_hardware_id=place)

    monkeypatch.setattr(gpus_module, "cuda_uuids", lambda: cuda_uuids(FakeCuda()))
    monkeypatch.setattr(gpus_module.importlib, "import_module", lambda name: FakeNvml())
    assert jax_gpus([device(0), device(1)]).uuids == [THIRD, FIRST]
    assert jax_gpus([device(1)]).uuids == [FIRST]  # another process has the other one
    monkeypatch.setattr(gpus_module, "cuda_uuids", lambda: ["9" * 8, NAMES[1]])
    first, second = jax_gpus([device(0), device(1)]).read()  # one that NVML does not know keeps its place
    assert first["memory_total_gb"] is None and second["memory_total_gb"] == 24

"""The GPU table: figures of the data sheets, names, files of the user's, and what the compiler is told."""

import types

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.gpus import Gpus
from jepa_jax.runtime.hardware import TABLE_FILE, find_gpus, gpu_here, gpu_of_device, gpu_of_driver, load_table

TABLE = load_table()
REFERENCE = {  # memory in GB as sold, bf16 TFLOP/s, GB/s, multiprocessors, compute capability
    "rtx3090": (24, 71, 936, 82, (8, 6)),
    "a6000": (48, 154.8, 768, 84, (8, 6)),
    "rtx4090": (24, 165, 1008, 128, (8, 9)),
    "a100-40": (40, 312, 1555, 108, (8, 0)),
    "a100-80": (80, 312, 2039, 108, (8, 0)),
    "h100": (80, 989, 3352, 132, (9, 0)),
    "t4": (16, 8.1, 320, 40, (7, 5)),
    "rtx5090": (32, 209.5, 1792, 170, (12, 0)),
    "rtxpro6000": (96, 503.8, 1792, 188, (12, 0)),
    "h100-pcie": (80, 756, 2000, 114, (9, 0)),
    "b200": (180, 2250, 7672, 148, (10, 0)),
}


@pytest.mark.parametrize("key", REFERENCE)
def test_the_table_has_the_figures_of_the_data_sheets(key):
    gpu = TABLE[key]
    memory, tflops, bandwidth, cores, capability = REFERENCE[key]
    assert (gpu.bf16_tflops, gpu.bandwidth_gb_per_second, gpu.cores) == (tflops, bandwidth, cores)
    assert gpu.compute_capability == capability
    assert 0.9 * memory * 2**30 < gpu.memory_bytes <= memory * 2**30  # the driver keeps a little


def test_float32_products_run_at_half_the_rate_of_bfloat16():
    for gpu in TABLE.values():
        units = 2 if gpu.compute_capability >= (8, 0) else 1  # older cards have none for either
        assert gpu.tflops("float32") == pytest.approx(gpu.tflops("bfloat16") / units, rel=0.03)


def test_every_gpu_names_the_source_of_its_figures():
    assert all(gpu.source for gpu in TABLE.values())
    wanted = "t4 v100-16 rtx3060 rtx4070 rtx4080 rtx5090 rtxpro6000 b200 a10 l4 l40s h200 a100-pcie-80 h100-pcie"
    assert set(wanted.split()) <= set(TABLE)


def test_names_are_joined_by_commas_and_unknown_ones_list_the_known():
    assert [gpu.key for gpu in find_gpus(["rtx4090,h100", "a6000"], TABLE)] == ["rtx4090", "h100", "a6000"]
    with pytest.raises(UserError, match=r"--gpu=rtx4009: unknown; did you mean rtx4090\? known are t4, .*h100"):
        find_gpus(["rtx4009"], TABLE)


def test_a_file_of_the_users_adds_and_replaces(tmp_path):
    entry = TABLE_FILE.read_text().split("[rtx4080]")[1].split("\n\n")[0]
    (tmp_path / "mine.toml").write_text(f"[lab-card]{entry}\n[h100]{entry}\n")
    table = load_table(tmp_path / "mine.toml")
    assert table["lab-card"].cores == 76 and table["h100"].name == TABLE["rtx4080"].name
    assert table["a6000"] == TABLE["a6000"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("[x]\ncores = 3", r"x: a GPU is a table \[x\] with bandwidth_gb_per_second, .*see hardware.toml"),
        ("x = 3", r"x: a GPU is a table"),
        ("[x", r"not TOML"),
    ],
)
def test_a_malformed_file_is_named_with_the_fix(tmp_path, text, message):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_table(tmp_path / "mine.toml")


def test_a_capability_that_nothing_is_known_of_is_refused(tmp_path):
    text = TABLE_FILE.read_text().split("[rtx4080]")[1].split("\n\n")[0].replace("[8, 9]", "[6, 1]")
    (tmp_path / "mine.toml").write_text(f"[old]{text}")
    with pytest.raises(UserError, match=r"compute_capability = \[6, 1\]: not one of \[7, 0\]"):
        load_table(tmp_path / "mine.toml")
    with pytest.raises(UserError, match="cannot be read"):
        load_table(tmp_path / "absent.toml")


def test_devices_are_found_by_what_jax_calls_them():
    assert gpu_of_device("NVIDIA GeForce RTX 4090", None, TABLE).key == "rtx4090"
    assert gpu_of_device("NVIDIA A100-SXM4-40GB", 40 * 10**9, TABLE).key == "a100-40"
    assert gpu_of_device("cpu", None, TABLE) is None


class OneCard:
    """NVML's answers on a machine with one card of the GPUs that drivers call by these names."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    # memory in MiB, compute capability, units, clocks of multiprocessors and memory in MHz, bits of the bus
    CARDS = {
        "NVIDIA GeForce RTX 4090": (24564, (8, 9), 16384, 3105, 10501, 384),
        "NVIDIA GeForce RTX 3090": (24576, (8, 6), 10496, 2100, 9751, 384),
        "NVIDIA A100-SXM4-80GB": (81920, (8, 0), 6912, 1410, 1593, 5120),
        "Tesla T4": (15360, (7, 5), 2560, 1590, 5001, 256),
        "NVIDIA GeForce RTX 4060": (8188, (8, 9), 3072, 3105, 8501, 128),
        "NVIDIA Newer": (8188, (13, 0), 3072, 3105, 8501, 128),
        "NVIDIA Silent": (8188, (8, 9), None, 3105, 8501, 128),
    }

    def __init__(self, name):
        self.name, card = name, self.CARDS[name]
        self.memory, self.capability, self.units, self.clock, self.memory_clock, self.bits = card

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return self.name

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(total=self.memory * 2**20)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return list(self.capability)

    def nvmlDeviceGetNumGpuCores(self, handle):
        if self.units is None:
            raise RuntimeError("Not Supported")
        return self.units

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return self.memory_clock if kind == self.NVML_CLOCK_MEM else self.clock

    def nvmlDeviceGetMemoryBusWidth(self, handle):
        return self.bits


def visible(name):
    return Gpus(OneCard(name), {})


def test_here_is_the_card_of_this_machine():
    assert gpu_here(TABLE, visible("NVIDIA GeForce RTX 4090")).key == "rtx4090"
    with pytest.raises(UserError, match="NVIDIA Newer is not in the table, nor known by its driver; --gpu_table=FILE"):
        gpu_here(TABLE, visible("NVIDIA Newer"))
    with pytest.raises(UserError, match="NVIDIA Silent is not in the table"):
        gpu_here(TABLE, visible("NVIDIA Silent"))
    with pytest.raises(UserError, match="--gpu=here: this machine shows no GPU"):
        gpu_here(TABLE, Gpus(OneCard("NVIDIA Newer"), {"CUDA_VISIBLE_DEVICES": ""}))


@pytest.mark.parametrize("key", ["rtx4090", "rtx3090", "a100-80", "t4"])
def test_a_card_described_by_its_driver_is_close_to_its_data_sheet(key):
    """As if it were not in the table, whose other cards lend what drivers do not say."""
    listed = TABLE[key]
    others = {name: gpu for name, gpu in TABLE.items() if gpu.name != listed.name or key == "t4"}  # the only one of 7.5
    own = gpu_of_driver(visible(listed.name).first_card(), others)
    assert (own.name, own.compute_capability, own.cores) == (listed.name, listed.compute_capability, listed.cores)
    assert own.memory_bytes == pytest.approx(listed.memory_bytes, rel=0.02)
    assert own.bandwidth_gb_per_second == pytest.approx(listed.bandwidth_gb_per_second, rel=0.02)
    assert own.bf16_tflops == pytest.approx(listed.bf16_tflops, rel=0.05)
    assert own.tf32_tflops == pytest.approx(listed.tf32_tflops, rel=0.05)


def test_a_card_that_is_not_listed_is_planned_for_as_its_driver_describes_it():
    gpu = gpu_of_device("NVIDIA GeForce RTX 4060", None, TABLE, visible("NVIDIA GeForce RTX 4060"))
    assert (gpu.key, gpu.cores, gpu.compute_capability) == ("here", 24, (8, 9))
    assert gpu.bandwidth_gb_per_second == pytest.approx(272, rel=0.01)  # of its data sheet
    assert gpu.bf16_tflops < TABLE["rtx4070"].bf16_tflops and "driver" in gpu.source
    assert gpu_of_device("NVIDIA GeForce RTX 4060", None, TABLE, visible("NVIDIA A100-SXM4-80GB")) is None


def test_all_is_the_whole_table():
    assert find_gpus(["all"], TABLE) == list(TABLE.values())

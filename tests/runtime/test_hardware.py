"""The GPU table: figures of the data sheets, names, files of the user's, and what the compiler is told."""

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.hardware import TABLE_FILE, find_gpus, gpu_here, gpu_of_device, load_table

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


class OneGpu:
    """NVML's answer on a machine with one card."""

    problem = ""

    def __init__(self, name):
        self.name = name

    def first_name_and_memory(self):
        return self.name, 24 * 2**30


def test_here_is_the_card_of_this_machine():
    assert gpu_here(TABLE, OneGpu("NVIDIA GeForce RTX 4090")).key == "rtx4090"
    with pytest.raises(UserError, match="NVIDIA Own is not in the table; --gpu_table=FILE adds it"):
        gpu_here(TABLE, OneGpu("NVIDIA Own"))
    with pytest.raises(UserError, match="--gpu=here: this machine shows no GPU"):
        gpu_here(TABLE, OneGpu(None))


def test_all_is_the_whole_table():
    assert find_gpus(["all"], TABLE) == list(TABLE.values())

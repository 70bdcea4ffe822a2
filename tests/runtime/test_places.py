"""Which process of a run this is, as different programs say that start processes."""

import pathlib
import re

import pytest
import yaml

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.places import find_place

JAX = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4"}
STEP = {"SLURM_JOB_ID": "5000", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "gpu[003,007-9]"}
TORCH = {"RANK": "9", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def place(environment):
    found = find_place(environment)
    return found.address, found.count, found.index


@pytest.mark.parametrize(
    "environment, expected",
    [
        (JAX | {"JAX_PROCESS_ID": "3"}, ("host:1", 4, 3)),
        (JAX | {"JOB_COMPLETION_INDEX": "2"}, ("host:1", 4, 2)),  # an indexed Job of Kubernetes
        (STEP, ("gpu003:62344", 4, 3)),  # 61440 + 5000 mod 4096
        (STEP | {"SLURM_STEP_NODELIST": "a1,b[2-3]", "JAX_COORDINATOR_PORT": "7"}, ("a1:7", 4, 3)),
        (TORCH, ("10.0.0.1:29501", 16, 9)),
        (STEP | TORCH, ("10.0.0.1:29501", 16, 9)),  # srun torchrun
        (STEP | TORCH | JAX | {"JAX_PROCESS_ID": "0"}, ("host:1", 4, 0)),  # what was said by hand
        (
            {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"},
            ("10.0.0.1:8476", 2, 1),
        ),
        (
            {"DSTACK_MASTER_NODE_IP": "fd00::1", "DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "0"},
            ("[fd00::1]:8476", 2, 0),
        ),
    ],
)
def test_a_place_is_read_from_what_started_the_process(environment, expected):
    assert place(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {name: STEP[name] for name in ("SLURM_NTASKS", "SLURM_PROCID")},  # a batch script itself
        STEP | {"SLURM_NTASKS": "1"},
        TORCH | {"WORLD_SIZE": "1", "RANK": "0"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"},
        {"DSTACK_MASTER_NODE_IP": "10.0.0.1", "DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0"},
    ],
)
def test_a_process_without_others_computes_alone(environment):
    assert find_place(environment) is None


@pytest.mark.parametrize(
    "wrong, message",
    [
        (JAX, "JAX_PROCESS_ID is not"),
        (JAX | {"JAX_PROCESS_ID": "4"}, "need HOST:PORT"),
        (JAX | {"JAX_PROCESS_ID": "x"}, "need HOST:PORT"),
        (JAX | {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": ""}, "need HOST:PORT"),
        (JAX | {"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "host"}, "need HOST:PORT"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS = many"),
        (TORCH | {"MASTER_PORT": "x"}, "MASTER_PORT = x"),
        (TORCH | {"RANK": "16"}, "need HOST:PORT"),
    ],
)
def test_a_variable_that_cannot_be_is_named(wrong, message):
    with pytest.raises(UserError, match=message):
        find_place(wrong)


def devices(environment, gpus):
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    return find_place(environment | seen).device_ids(environment | seen)


def test_tasks_of_a_node_share_the_gpus_that_they_see():
    alone = STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}
    assert devices(alone, 8) is None  # all of them
    four = STEP | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "3"}
    assert devices(four, 4) == [3] and devices(four, 8) == [6, 7]
    assert devices(four, 1) is None  # --gpus-per-task=1: its own, which it sees as number 0
    assert devices(four, 0) is None
    assert devices(four | {"JAX_LOCAL_DEVICE_IDS": "1,2"}, 8) == [1, 2]
    uneven = STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,1(x2)", "SLURM_LOCALID": "0"}
    assert devices(uneven | {"SLURM_NODEID": "0"}, 4) == [0, 1] and devices(uneven | {"SLURM_NODEID": "2"}, 4) is None
    assert devices(TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, 8) == [1]
    with pytest.raises(UserError, match="4 processes on this machine and 3 GPUs"):
        devices(four, 3)


def test_process_0_listens_at_the_address_given_and_everywhere_for_a_name():
    def bind(address, **more):
        return find_place(JAX | {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": "0", **more}).bind_address

    for given in ("127.0.0.1:5", "[::1]:5", "localhost:5", "10.0.0.1:5"):
        assert bind(given) == given
    assert bind("node1:5") == "[::]:5"  # others may know it by another address than this machine does
    assert bind("node1:5", JAX_COORDINATOR_BIND_ADDRESS="10.0.0.1:5") == "10.0.0.1:5"


GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "many_devices.md"


def manifests():
    """Returns the manifests in the guide by their kind."""
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return {one["kind"]: one for block in blocks for one in yaml.safe_load_all(block)}


@pytest.mark.parametrize("kind, host", [("Job", "{name}-0.{service}"), ("JobSet", "{name}-{job}-0-0.{name}")])
def test_pods_of_the_manifests_in_the_guide_find_their_place(kind, host):
    manifest = manifests()[kind]
    name, job, spec = manifest["metadata"]["name"], "", manifest["spec"]
    if kind == "JobSet":
        replicated = spec["replicatedJobs"][0]
        job, spec = replicated["name"], replicated["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    variables = {one["name"]: one.get("value", "secret") for one in pod["containers"][0]["env"]}
    last = find_place(variables | {"JOB_COMPLETION_INDEX": str(spec["completions"] - 1)})
    assert (last.count, last.index) == (spec["completions"], spec["completions"] - 1)
    assert last.host == host.format(name=name, job=job, service=pod.get("subdomain"))

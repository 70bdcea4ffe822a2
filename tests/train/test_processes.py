"""Several processes compute one run."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import json, sys
from jepa_jax.base.console import Console
from jepa_jax.train.run import train
from tests.tiny import tiny_config
summary = train(tiny_config(profile__enabled=False), sys.argv[1], console=Console())
print(json.dumps(summary))
"""


@pytest.mark.slow
def test_two_processes_train_and_evaluate_a_model_with_batch_norm(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
            cwd=ROOT, env=environment | {"JAX_PROCESS_ID": str(index)}, stdout=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    one, two = (json.loads(output.splitlines()[-1]) for output in outputs)
    same = ("status", "params_sha256", "probe_accuracy", "knn_accuracy", "effective_rank")
    assert [one[name] for name in same] == [two[name] for name in same] and one["status"] == "finished"

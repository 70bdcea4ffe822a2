"""Compilers for tests of the planner, whose memory is known: a straight line in the batch, or one with a limit."""

import dataclasses

import jax

from jepa_jax.compiled.kernels import CONVOLUTION, Kernel
from jepa_jax.data.contract import abstract_batch, element_bytes, image_spec
from jepa_jax.data.facts import DataFacts, data_facts
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.step_compiler import Request, StepFacts, program_for, trace_step
from jepa_jax.runtime.hardware import load_table

GIB = 2**30
TABLE = load_table()
CIFAR = DataFacts(50_000, 10, image_spec(32))


class LineCompiler:
    """Programs of a given state and bytes per image: fewer with remat and small elements, twice as many in float32."""

    def __init__(self, per_image=4 * 2**20, state=GIB // 2, data=CIFAR):
        self.per_image, self.state, self.data, self.asked = per_image, state, data, []

    def all_facts(self, requests):
        self.asked += requests
        return [self._facts(request) for request in requests]

    def _facts(self, request):
        config, devices = request.config, request.devices
        batch = config.data.batch_size
        images = batch / devices / config.train.accum_steps
        each = self.per_image * {"none": 1, "light": 0.7, "full": 0.3}[config.train.remat]
        each *= 2 if config.train.precision == "float32" else 1
        spec = (request.data or self.data).spec
        each *= element_bytes(request.elements or spec) / element_bytes(spec)
        state = self.state // config.mesh.fsdp
        peak = round(1.5 * state + each * images)
        return StepFacts(
            devices=devices, argument_bytes=state + 3072 * batch, alias_bytes=state, temp_bytes=peak - state,
            peak_bytes=peak, state_bytes=state, parameter_bytes=state // 2, optimizer_bytes=state // 2, target_bytes=0,
            batch_bytes=3072 * batch // devices, flops=10**10 * batch,
            kernels=[Kernel(CONVOLUTION, "bf16", 10**10 * batch // devices, 0, round(5 * each * images), "encoder")],
            collectives={}, largest_convolution_bytes=0, convolutions=1, encoder_float32_products=[], host_calls=[],
        )  # fmt: skip


class RecomputingCompiler(LineCompiler):
    """Stays within 76 % of the card by recomputing, up to a batch of MOST."""

    MOST = 8000

    def _facts(self, request):
        facts = super()._facts(request)
        limit = round(0.76 * request.gpu.memory_bytes)
        if request.unlimited or facts.peak_bytes <= limit:
            return facts
        peak = limit if request.config.data.batch_size <= self.MOST else facts.peak_bytes
        again = facts.kernels[0]._replace(recomputed=1, runs=1, bytes=10**6, flops=0)
        return dataclasses.replace(facts, peak_bytes=peak, kernels=[*facts.kernels, again])


def planned(config):
    """Returns the plan of a config on one GPU; its step is lowered without data, and compiled by a LineCompiler."""
    facts = data_facts(config.data, assume=True)
    program = program_for(config, facts, jax.devices()[:1])
    trace_step(program, abstract_batch(facts.spec, config.data.batch_size)).lower()
    return Planner(LineCompiler(data=facts), TABLE).plan(Request(config, TABLE["rtx4090"]))

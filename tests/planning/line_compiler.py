"""A compiler for tests of the planner, whose memory is a straight line in the batch."""

from jepa_jax.data.contract import element_bytes, image_spec
from jepa_jax.data.facts import DataFacts
from jepa_jax.planning.step_facts import StepFacts
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
        each = self.per_image * (0.3 if config.train.remat == "full" else 1)
        each *= 2 if config.train.precision == "float32" else 1
        each *= element_bytes(request.elements or self.data.spec) / element_bytes(self.data.spec)
        state = self.state // config.mesh.fsdp
        peak = round(1.5 * state + each * images)
        return StepFacts(
            devices=devices, argument_bytes=state + 3072 * batch, alias_bytes=state, temp_bytes=peak - state,
            peak_bytes=peak, state_bytes=state, parameter_bytes=state // 2, optimizer_bytes=state // 2, target_bytes=0,
            batch_bytes=3072 * batch // devices, flops=10**10 * batch, bytes_moved=round(5 * each * images),
            collectives={}, largest_convolution_bytes=0, convolutions=1, encoder_float32_products=[], host_calls=[],
        )  # fmt: skip

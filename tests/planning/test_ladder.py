"""Ladders of sizes, what saves memory, and sizes of elements, with a compiler whose memory is known."""

import sys

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config.recipe import LadderStep
from jepa_jax.data.contract import element_bytes
from jepa_jax.data.facts import bucket_facts, data_facts
from jepa_jax.planning import step_compiler
from jepa_jax.planning.estimate import FITS, NO
from jepa_jax.planning.ladder import ladder_steps, make_ladder, mean_samples_per_sec, size_labels
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.step_compiler import Request, StepCompiler
from jepa_jax.program.config import load_config
from tests.planning.line_compiler import GIB, TABLE, LineCompiler
from tests.tiny import tiny_config

SEQUENCES = {
    "method.name": "tests.sequence_methods:HistoryMethod",
    "data.source": "tests.sequences:PaddedSequences",
    "data.image_size": 16,
    "data.batch_size": 8,
    "data.num_train": 64,
    "data.num_test": 8,
    "data.frame_buckets": (6, 11),
}


def ladder_by(compiler, config, steps=(), sizes_of=""):
    request = Request(config, TABLE["rtx3090"])
    return make_ladder(Planner(compiler, TABLE), request, ladder_steps(request, steps, sizes_of), sizes_of)


def line_ladder(config, steps=(), per_image=4 * 2**20, state=GIB // 2, sizes_of=""):
    """Returns a ladder and its compiler."""
    line = LineCompiler(per_image, state, data_facts(config.data, assume=True))
    return ladder_by(line, config, steps, sizes_of), line


@pytest.fixture(scope="module")
def doubled():
    return line_ladder(load_config("rapid", {"data.batch_size": 1024}))[0]


def test_without_a_ladder_the_batch_is_doubled_until_it_does_not_fit(doubled):
    rows = [rung.estimate for rung in doubled.rungs]
    assert [row.batch_size for row in rows] == [1024, 2048, 4096, 8192]
    assert [row.fits for row in rows] == [True, True, True, False]
    assert not rows[0].changes and doubled.top is doubled.rungs[-1]


def test_the_doubled_batch_ends_at_the_data():
    ladder, _ = line_ladder(tiny_config(), per_image=1024)  # 96 images
    assert [rung.estimate.batch_size for rung in ladder.rungs] == [16, 32, 64]


def test_what_saves_memory_comes_in_the_order_in_which_to_try_it(doubled):
    labels = ["batch 4,096", "2 accumulation steps", "remat light", "remat full"]
    assert [row.label for row in doubled.retreat] == labels
    smaller, parts, light, remat = doubled.retreat
    assert all(row.verdict == FITS for row in (smaller, parts, remat)) and light.need.total > remat.need.total
    assert parts.batch_size == remat.batch_size == 8192 and smaller.batch_size == 4096
    # Changes are those of the config, not of the largest rung: as flags they give this very row.
    assert parts.changes == {"data.batch_size": 8192, "train.accum_steps": 2}


def test_changes_are_combined_if_none_is_enough():
    ladder, _ = line_ladder(load_config("rapid", {"data.batch_size": 4096}), per_image=400 * 2**20)
    assert [rung.estimate.verdict for rung in ladder.rungs] == [NO]
    assert ladder.retreat[1].label == "64 accumulation steps"
    ladder, _ = line_ladder(load_config("rapid", {"data.batch_size": 4096}), state=16 * GIB)
    assert [row.label for row in ladder.retreat][-1] == "remat full and 64 accumulation steps"


def test_float32_also_offers_the_other_precision():
    ladder, _ = line_ladder(tiny_config(), per_image=2**20)
    assert ladder.retreat[-1].label == "bfloat16"


LADDER = [
    LadderStep("small", {}, (2.7,)),
    LadderStep("large batch", {"data.batch_size": 64}, (6.0, 7.0)),
    LadderStep("wide", {"data.batch_size": 48, "model.widths": (8, 32)}),
]


def test_the_ladder_of_a_recipe_is_planned_as_it_stands():
    ladder, _ = line_ladder(tiny_config(), LADDER)
    assert [(rung.name, rung.estimate.batch_size, rung.claimed_gb) for rung in ladder.rungs] == [
        ("small", 16, (2.7,)),
        ("large batch", 64, (6.0, 7.0)),
        ("wide", 48, ()),
    ]
    assert ladder.rungs[2].estimate.request.config.model.widths == (8, 32)


def test_a_ladder_without_the_config_itself_begins_with_it():
    ladder, _ = line_ladder(tiny_config(), LADDER[1:])
    assert [rung.name for rung in ladder.rungs] == ["as configured", "large batch", "wide"]


class GrowingCompiler(LineCompiler):
    """A state that grows with the width of the model."""

    def _facts(self, request):
        self.state = request.config.model.widths[-1] * GIB // 16
        return super()._facts(request)


def test_the_last_resort_is_the_next_smaller_model_of_the_ladder_at_the_same_batch():
    steps = [*LADDER, LadderStep("wider", {"model.widths": (8, 64), "data.batch_size": 80})]
    ladder = ladder_by(GrowingCompiler(data=data_facts(tiny_config().data)), tiny_config(), steps)
    assert ladder.top.name == "wider"
    last = ladder.retreat[-1]
    assert (last.label, last.batch_size) == ("model of wide", 80)
    assert last.request.config.model.widths == (8, 32) and last.need.total < ladder.top.estimate.need.total


def test_a_step_that_changes_the_data_is_planned_with_its_elements():
    ladder, line = line_ladder(tiny_config(), [*LADDER, LadderStep("fine", {"data.image_size": 32})])
    other = [request for request in line.asked if request.data]
    assert [request.data.spec["image"].shape for request in other] == [(32, 32, 3)]
    assert [request.config.data.image_size for request in other] == [32]
    assert [rung.name for rung in ladder.rungs] == ["small", "large batch", "wide", "fine"]


def test_mistakes_are_answered_before_anything_is_compiled():
    with pytest.raises(UserError, match=r"LADDER, step 'odd': config.model.depht: unknown key"):
        line_ladder(tiny_config(), [LadderStep("odd", {"model.depht": 3})])


# --- elements of several sizes ---


def sequences(**changes):
    return load_config("quickstart", {**SEQUENCES, **changes})


def kept_ladder(folder, config):
    """Returns the ladder of one rung by the compiler that commands use, with its plans in a folder."""
    return ladder_by(StepCompiler(data_facts(config.data), folder), config, [LadderStep("small", {})])


def test_each_size_is_planned_for_the_first_and_the_largest_rung():
    steps = [LadderStep("small", {}), LadderStep("large", {"data.batch_size": 16}), LadderStep("mid", {"optim.lr": 1})]
    ladder, line = line_ladder(sequences(), steps)
    assert [(row.name, row.size) for row in ladder.sizes] == [
        (rung, size) for rung in ("small", "large") for size in ("6", "11", "20")
    ]
    needs = [row.estimate.need.total for row in ladder.sizes[3:]]
    assert needs == sorted(needs) and needs[-1] == ladder.top.estimate.need.total
    assert sum(row.share for row in ladder.sizes[:3]) == pytest.approx(1)
    frames = [request.elements["frames"].shape[0] for request in line.asked if request.elements]
    assert frames == [6, 11, 6, 11]  # the longest is the rung itself
    everything, _ = line_ladder(sequences(), steps, sizes_of="all")
    assert [row.name for row in everything.sizes] == 3 * ["small"] + 3 * ["large"] + 3 * ["mid"]
    some, _ = line_ladder(sequences(), steps, sizes_of="mid")
    assert [row.name for row in some.sizes] == 3 * ["mid"]
    with pytest.raises(UserError, match="--sizes_of=wide: no rung 'wide'; use all or some of small, large, mid"):
        line_ladder(sequences(), steps, sizes_of="wide")


def test_the_longest_size_of_the_data_is_compiled_if_the_config_allows_longer_ones():
    config = sequences(**{"data.max_frames": 60, "data.frame_buckets": (6, 11, 50)})
    ladder, line = line_ladder(config, [LadderStep("small", {})])
    assert [row.size for row in ladder.sizes] == ["6", "11", "50"]  # no sequence is longer
    assert ladder.sizes[-1].estimate.request.elements["frames"].shape[0] == 50
    assert ladder.sizes[-1].estimate.need.total < ladder.top.estimate.need.total
    assert [request.elements["frames"].shape[0] for request in line.asked if request.elements] == [6, 11, 50]


def test_the_mean_speed_is_that_of_the_mean_time():
    rows = line_ladder(sequences())[0].sizes[:3]
    seconds = sum(row.share / row.estimate.speed.images_per_sec for row in rows)
    assert mean_samples_per_sec(rows) == pytest.approx(1 / seconds)
    assert mean_samples_per_sec(rows) >= rows[-1].estimate.speed.images_per_sec


def test_data_of_one_size_has_no_table_of_sizes(doubled):
    assert doubled.sizes == []
    assert bucket_facts(sequences(**{"data.frame_buckets": ()}).data) == []
    assert bucket_facts(sequences(**{"data.pipeline": "device"}).data) == []  # which pads to the longest


def test_sizes_are_named_by_the_dimensions_that_differ():
    specs = [bucket.spec for bucket in bucket_facts(sequences().data)]
    assert size_labels(specs) == ["6", "11", "20"]
    assert size_labels([{"x": specs[0]["target"]}, {"x": specs[-1]["frames"]}][:1]) == []


def test_a_step_is_traced_with_the_shapes_of_each_bucket(tmp_path, monkeypatch):
    frames = []

    def compile_step(program, batch, traced, lowered):
        frames.append(batch["frames"].shape[1])
        return LineCompiler().all_facts([Request(sequences(), TABLE["rtx3090"])])[0]

    monkeypatch.setattr(step_compiler, "compile_step", compile_step)
    kept_ladder(tmp_path, sequences())
    assert frames[0] == 20 and sorted(frames[-2:]) == [6, 11]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the wheels of the compiler are for Linux")
def test_memory_really_follows_the_longest_element(tmp_path):
    ladder = kept_ladder(tmp_path, sequences(**{"data.batch_size": 64, "data.image_size": 64}))
    peaks = [row.estimate.facts.peak_bytes for row in ladder.sizes]
    moved = [row.estimate.facts.bytes_moved for row in ladder.sizes]
    assert peaks == sorted(set(peaks)) and moved == sorted(set(moved))
    spec = ladder.sizes[0].estimate.request.elements
    assert ladder.sizes[0].estimate.facts.batch_bytes == 64 * element_bytes(spec)

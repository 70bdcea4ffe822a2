"""Flags and overrides as they are typed."""

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.cli.flags import Parser, config_from, config_name, given_keys, planned_config_from
from jepa_jax.cli.throughput import SWEEP, add_sweep_flags, expand_study, lists_from


def parser_with(*, config=False):
    parser = Parser("jepa-jax test", "Tests.")
    if config:
        parser.add_config()
    parser.add_flag("count", "N", "a number", 3, least=1, most=9)
    parser.add_switch("fast", "a switch")
    parser.add_switch("loud", "a switch that is on", default=True)
    return parser


def test_values_have_the_type_of_their_default():
    parsed = parser_with().parse(["--count=5"])
    assert (parsed.count, parsed.fast, parsed.loud) == (5, False, True)
    assert parser_with().parse([]).count == 3
    for text in ("0", "10", "x", "1.5"):
        with pytest.raises(UserError, match="--count"):
            parser_with().parse([f"--count={text}"])


@pytest.mark.parametrize(
    "flag, value",
    [("--fast", True), ("--fast=true", True), ("--fast=false", False), ("--nofast", False), ("--no-fast", False)],
)
def test_switches_are_written_in_several_ways(flag, value):
    assert parser_with().parse(["--fast", flag]).fast is value


def test_overrides_are_collected_and_the_last_one_wins():
    parsed = parser_with(config=True).parse(
        [
            "--config=a/rapid.py:small",
            "--config.optim.lr=1",
            "--count",
            "4",
            "--config.optim.lr=2",
            "--config.a.b",
            "c=d",
        ]
    )
    assert given_keys(parsed) == {"optim.lr": "2", "a.b": "c=d"} and parsed.count == 4
    assert config_name(parsed) == "rapid"
    assert parsed.override_flags == ["--config.optim.lr=1", "--config.optim.lr=2", "--config.a.b=c=d"]
    assert parser_with(config=True).parse(["--config=rapid"]).override_flags == []


def config_of(*flags):
    return config_from(parser_with(config=True).parse(flags))


def test_overrides_take_the_type_of_their_key():
    config = config_of(
        "--config=quickstart", "--config.optim.lr=1e-3", "--config.data.batch_size=32", "--config.data.dir=3",
        "--config.log.tensorboard=false", "--config.data.augment.crop.scale=(0.5,1.0)",
    )  # fmt: skip
    assert (config.optim.lr, config.data.batch_size, config.log.tensorboard) == (1e-3, 32, False)
    assert (tuple(config.data.augment.crop.scale), config.data.dir) == ((0.5, 1.0), "3")
    with pytest.raises(UserError, match="batch_size.*abc"):
        config_of("--config=quickstart", "--config.data.batch_size=abc")
    with pytest.raises(UserError, match="batch_size"):
        config_of("--config=quickstart", "--config.data.batchsize=3")


def test_a_study_file_stands_for_its_flags_and_the_command_line_wins(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(
        'config = "quickstart"\nbatch_sizes = [32, 64]\nuse_dummy_data = true\nrepeats = 2\n"config.optim.lr" = 0.5\n'
    )
    parser = Parser("jepa-jax sweep")
    add_sweep_flags(parser)
    argv = ["--repeats=4", f"--study={study}", "--output_json=x.json", "--config.data.seed=1"]
    parsed = parser.parse(expand_study(parser, argv))
    assert (parsed.config, parsed.batch_sizes, parsed.use_dummy_data, parsed.repeats) == (
        "quickstart",
        "32,64",
        True,
        4,
    )
    assert given_keys(parsed) == {"optim.lr": "0.5", "data.seed": "1"}

    study.write_text("batch_size = 3\n")
    with pytest.raises(UserError, match="study.toml: batch_size is neither a flag"):
        expand_study(parser, [f"--study={study}"])
    with pytest.raises(UserError, match="none.toml: cannot be read"):
        expand_study(parser, [f"--study={tmp_path / 'none.toml'}"])


def test_a_sweep_is_written_with_commas_or_as_published():
    commas = ["--batch_sizes=768,896", "--precisions=bfloat16,float32", "--num_workers=4,6,8", "--grad_accum=1,2,3"]
    spaces = "--batch-sizes 768 896 --amp-options on off --num-workers 4 6 8 --grad-accum 1 2 3".split()
    one, other = (
        SWEEP.parse(["--config=rapid", *lists, "--output-json", "x.json", "--repeats=2"]) for lists in (commas, spaces)
    )
    assert lists_from(one) == lists_from(other)
    assert (other.output_json, other.repeats, other.batch_sizes) == ("x.json", 2, "768,896")
    with pytest.raises(UserError, match="--amp_options=maybe: 'maybe' is not one of on, off"):
        lists_from(SWEEP.parse(["--config=rapid", "--output_json=x", "--amp_options", "maybe"]))
    with pytest.raises(UserError, match="give one of them"):
        lists_from(SWEEP.parse(["--config=rapid", "--output_json=x", "--amp_options=on", "--precisions=float32"]))


def test_flags_are_read_from_a_file_and_those_of_jax_are_kept_apart(tmp_path):
    (tmp_path / "flags").write_text("--count=7\n--config=quickstart\n--config.optim.lr=0.5\n")
    parsed = parser_with(config=True).parse([f"--flagfile={tmp_path / 'flags'}", "--jax_debug_nans", "--nojax_x=1"])
    assert (parsed.count, parsed.config, given_keys(parsed)) == (7, "quickstart", {"optim.lr": "0.5"})
    assert parsed.jax_flags == {"jax_debug_nans": "True", "jax_x": "False"}


def test_a_choice_brings_its_keys_and_references_follow_overrides():
    config = config_of("--config=quickstart", "--config.method.loss=vicreg", "--config.method.cov_weight=3")
    assert (config.method.loss, config.method.cov_weight) == ("vicreg", 3.0)
    config = config_of("--config=quickstart", "--config.method.name=byol", "--config.optim.weight_decay=0.25")
    assert (config.method.name, config.optim.weight_decay_end) == ("byol", 0.25)
    config = config_of("--config=quickstart", "--config.data.num_workers=auto", "--config.method.projector=8,4")
    assert (config.data.num_workers, config.method.projector) == (-1, (8, 4))
    config = config_of("--config=quickstart", "--config.method.projector=8", "--config.method.projector=4")
    assert config.method.projector == (8, 4)  # repeated flags make a tuple, as everywhere with config_flags


def test_all_mistakes_are_said_in_one_answer():
    wrong = ("optim.learning_rate=1", "data.batch_size=0", "method.loss=none", "train.seed=x", "nothing.here=1")
    with pytest.raises(UserError) as error:
        config_of("--config=quickstart", *(f"--config.{one}" for one in wrong))
    assert len(str(error.value).splitlines()) == len(wrong)
    assert "did you mean config.optim.lr?" in str(error.value)
    with pytest.raises(UserError, match="^config.model.name = 'resnet19': not one of .*did you mean resnet18"):
        config_of("--config=quickstart", "--config.model.name=resnet19", "--config.model.width=8")
    with pytest.raises(UserError, match="^config.train.seed:int: unknown key; did you mean config.train.seed"):
        config_of("--config=quickstart", "--config.train.seed:int=3")  # config_flags has no such form either


def test_a_config_is_required_unless_there_is_a_default():
    with pytest.raises(UserError, match="--config"):
        parser_with(config=True).parse([])
    parser = Parser("python check.py")
    parser.add_config("quickstart")
    assert parser.parse(["--config.optim.lr=1"]).config == "quickstart"


def test_switches_stand_before_and_between_other_words():
    parser = Parser("test")
    parser.add_switch("json", "JSON")
    parser.add_flag("output", "FILE", "where")
    parser.add_words("runs", "folders", least=0, most=None)
    arguments = parser.parse(["--json", "a", "--output=x", "b"])
    assert (arguments.json, arguments.output, arguments.runs) == (True, "x", ["a", "b"])
    assert parser.parse(["--json=false", "a"]).json is False
    with pytest.raises(UserError, match="--json=maybe: Non-boolean argument"):
        parser.parse(["--json=maybe"])


def test_plans_are_of_what_a_recipe_sets_for_gpus():
    parsed = parser_with(config=True).parse(["--config=photos_ijepa", "--config.data.batch_size=64"])
    here, planned = config_from(parsed), planned_config_from(parsed)
    assert (here.model.name, planned.model.name) == ("vit_tiny", "vit_small")
    assert (here.train.precision, planned.train.precision) == ("float32", "bfloat16")
    assert here.data.batch_size == planned.data.batch_size == 64

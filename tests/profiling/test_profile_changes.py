"""Two profiles: a section that changed is found with its size, noise is called noise."""

import json
import math
import random

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.profiling.profile_changes import changes_json, compare_profiles, difference, read_profile
from jepa_jax.profiling.profiler import epochs_until
from jepa_jax.profiling.sections import EpochSection
from jepa_jax.reports.profile_section import changes_table


def profile(seed, epochs=8, drift=0.0, **step_seconds):
    """Blocks of 4 steps; every section has 2 % noise, and the machine drifts."""
    generator = random.Random(seed)
    base = {"forward_pass": 0.1, "backward_pass": 0.2, "data_wait": 0.01} | step_seconds
    rows, level = [], 1.0
    for epoch in range(epochs):
        blocks = []
        for _ in range(4):
            level = 0.9 * level + 0.1 + drift * generator.gauss(0, 1)
            sections = {name: base.get(name, 0.0) * level * generator.gauss(1, 0.02) for name in EpochSection}
            sections["checkpoint"] = 0.0
            blocks.append({"steps": 4, "batch_seconds": sum(sections.values()), "sections": sections})
        whole = {name: 4 * sum(block["sections"][name] for block in blocks) for name in EpochSection}
        whole |= {"checkpoint": generator.gauss(1, 0.02), "compile": 3.0 * (epoch == 0)}
        seconds = sum(whole.values())
        rows.append({"epoch": epoch + 1, "steps": 16, "seconds": seconds, "sections": whole, "blocks": blocks})
    return {"sections": list(EpochSection), "steps_per_epoch": 16, "epochs": rows}


def test_the_section_that_changed_is_the_one_that_is_named():
    changes = compare_profiles(profile(0), profile(1, data_wait=0.05))
    found = {change.section: change for change in changes if change.real}
    assert "data_wait" in found and "forward_pass" not in found and "checkpoint" not in found
    change = found["data_wait"]
    assert change.low <= 0.04 <= change.high and change.verdict() == "slower"
    assert change.high - change.low < 0.01
    assert any("data_wait" in line and "slower" in line for line in changes_table(changes))
    assert changes_json(changes)["sections"]["data_wait"]["per"] == "step"


def test_equal_runs_are_rarely_told_apart():
    wrong = sum(any(c.real for c in compare_profiles(profile(2 * i), profile(2 * i + 1))) for i in range(40))
    assert wrong <= 5


def test_a_drifting_machine_is_not_a_change():
    """Blocks follow each other, so 31 of them are worth far fewer."""
    pairs = [(profile(2 * i, drift=0.03), profile(2 * i + 1, drift=0.03)) for i in range(40)]
    wrong = sum(any(change.real for change in compare_profiles(*pair)) for pair in pairs)
    assert wrong <= 10


def test_one_value_is_too_few():
    change = difference("compile", [3.0], [4.0], 0.95)
    assert math.isinf(change.high) and not change.real and "too few" in change.verdict()


def test_a_folder_without_a_profile_is_named(tmp_path):
    with pytest.raises(UserError, match=r"profile.json: not found"):
        read_profile(tmp_path)
    (tmp_path / "profile.json").write_text('{"epochs": 3}')
    with pytest.raises(UserError, match="not a profile"):
        read_profile(tmp_path)


def test_a_damaged_profile_does_not_keep_a_run_from_going_on(tmp_path):
    whole = {"last_step": 6, "bottlenecks": [{"name": "host-bound"}]}
    damaged = [None, {}, {"last_step": "6", "bottlenecks": []}, {"last_step": 6, "bottlenecks": [3]}]
    (tmp_path / "profile.json").write_text(json.dumps({"epochs": [*damaged, whole, whole | {"last_step": 12}]}))
    assert epochs_until(tmp_path / "profile.json", 6) == [whole]

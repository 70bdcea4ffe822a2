"""Few-shot episodes: the interval in closed form, chance on noise, certainty on separate classes, small splits."""

import numpy as np
import pytest

from jepa_jax.evals.features import Split
from jepa_jax.evals.few_shot import draw_episodes, episode_accuracies, few_shot, mean_interval

RNG = np.random.default_rng(0)


def test_interval_is_the_normal_one():
    accuracies = np.array([0.2, 0.4, 0.6, 0.8])
    mean, half_width = mean_interval(accuracies)
    # Unbiased variance of 4 values 0.2 apart: 0.2 / 3.
    assert mean == pytest.approx(50)
    assert half_width == pytest.approx(100 * 1.959964 * np.sqrt(0.2 / 3) / 2)


def test_episodes_repeat_no_class_and_no_image():
    members = [np.arange(10 * c, 10 * c + 10) for c in range(6)]
    drawn = draw_episodes(np.random.default_rng(1), members, ways=5, images=8, episodes=20)
    assert drawn.shape == (20, 5, 8)
    classes = drawn // 10
    assert (classes == classes[:, :, :1]).all()
    assert all(len(set(episode[:, 0])) == 5 for episode in classes)
    assert all(len(set(way)) == 8 for episode in drawn for way in episode)


def test_nearest_centroid_by_hand():
    # Examples at 0 and 1; queries of class 0 at 0.1 and 0.9, of class 1 at 0.8 and 0.7: three of four are right.
    features = np.array([[[[0.0], [0.1], [0.9]], [[1.0], [0.8], [0.7]]]])
    assert episode_accuracies(features, shot=1) == pytest.approx([0.75])


def test_noise_gives_chance_and_separate_classes_certainty():
    labels = np.repeat(np.arange(8), 40)
    noise = few_shot(Split(RNG.normal(size=(320, 16)).astype(np.float32), labels))
    assert noise["ways"] == 5 and noise["episodes"] == 100
    for figures in noise["shots"].values():
        assert abs(figures["accuracy"] - 20) < 4 and 0 < figures["interval_95"] < 3
        assert figures["queries"] == 15
    clear = few_shot(Split(np.eye(8, dtype=np.float32)[labels] + 0.01, labels))
    assert {v["accuracy"] for v in clear["shots"].values()} == {100.0}


def test_more_shots_help():
    labels = np.repeat(np.arange(5), 60)
    features = RNG.normal(size=(5, 10))[labels] + 1.5 * RNG.normal(size=(300, 10))
    shots = few_shot(Split(features.astype(np.float32), labels))["shots"]
    assert shots["1"]["accuracy"] < shots["5"]["accuracy"] < shots["10"]["accuracy"]


def test_a_small_split_asks_less_and_says_so():
    labels = np.repeat(np.arange(3), 7)
    result = few_shot(Split(RNG.normal(size=(21, 4)).astype(np.float32), labels))
    assert result["ways"] == 3
    assert {shot: figures["queries"] for shot, figures in result["shots"].items()} == {"1": 6, "5": 2}

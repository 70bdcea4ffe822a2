"""Video methods as any other: devices, exact resume, evaluators, encoders and exports."""

import jax.export
import numpy as np
import pytest

import jepa_jax
from jepa_jax.data.sources import open_source
from jepa_jax.exports.export import export_encoder
from tests.program.test_devices import check_devices
from tests.projects.world_models.tiny import METHODS, video_config
from tests.runs import Killed, KillNine, Silent


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_eight_devices_give_the_loss_and_gradients_of_one(method):
    config = video_config(method)
    batch = open_source(config.data, "train").batch(np.arange(16))
    check_devices(config, batch, 0, 8, 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_judged_exported_and_resumed_exactly(method, tmp_path):
    config, console = video_config(method, mesh__data=1), Silent()
    summary = jepa_jax.train(config, tmp_path / "whole", console=console)
    assert summary["failed_evaluators"] == {} and summary["target_r2"] is not None
    if method == "video_jepa":
        assert summary["horizons"] == len(summary["detection_ap"]) == len(summary["copy_last_position_r2"]) == 4
        assert len(summary["untrained_detection_ap"]) == 4
        with np.load(tmp_path / "whole" / "exhibits" / "rollout.npz") as exhibits:
            assert exhibits["predicted"].shape == exhibits["frames"].shape == (6, 6, 16, 16, 1)
    encoder = jepa_jax.load_encoder(tmp_path / "whole")
    assert list(encoder.inputs) == ["frames"]
    frames = open_source(config.data, "test").batch(np.arange(3))["frames"]
    export_encoder(tmp_path / "whole", "stablehlo", tmp_path / "out")
    function = jax.export.deserialize(bytearray((tmp_path / "out" / "encoder.stablehlo").read_bytes()))
    np.testing.assert_allclose(function.call({"frames": frames}), encoder(frames), rtol=1e-4, atol=1e-5)

    quick = video_config(method, mesh__data=1, eval__untrained=False)
    with pytest.raises(KillNine):
        jepa_jax.train(quick, tmp_path / "killed", console=Killed(5))
    resumed = jepa_jax.train(quick, tmp_path / "killed", console=Silent())
    assert resumed["params_sha256"] == summary["params_sha256"]

"""Writes tests/golden/exported: tiny encoders exported with --format=hf, and what transformers computes with them.

Two steps, since transformers is no dependency of this project:

    python tests/exports/write_parity.py export           # here: the exported directories
    python tests/exports/write_parity.py transformers     # anywhere with torch, transformers and safetensors: io.npz

Recorded with transformers 5.23.0 and torch 2.13.0 (CPU), 2026-11-17. The tests read the files and run neither step.
"""

import pathlib
import sys
import tempfile

import numpy as np

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "exported"
RESNET = {
    "model.name": "resnet", "model.blocks": (1, 1), "model.widths": (4, 8), "model.width": 4, "model.stem": "imagenet",
}  # fmt: skip


def configs() -> dict:
    from jepa_jax.program.config import changed_config
    from tests.tiny import tiny_config, tiny_masked_config

    return {
        "vit": tiny_masked_config("mae"),
        "ijepa": tiny_masked_config("ijepa"),  # its positions are sines and cosines
        "dinov2": tiny_masked_config("mae", model__layer_scale=0.1),
        "resnet_basic": changed_config(tiny_config(), RESNET),
        "resnet_bottleneck": changed_config(tiny_config(), {**RESNET, "model.bottleneck": True}),
    }


def shaken(state):
    """Returns the state with random variables, so that none of them is a zero or a one that hides a mistake."""
    import dataclasses

    import jax

    rng = np.random.default_rng(0)

    def shake(leaf):
        return (leaf + 0.2 * rng.random(leaf.shape)).astype(leaf.dtype) if leaf.dtype == np.float32 else leaf

    parts = {name: jax.tree.map(shake, jax.device_get(getattr(state, name))) for name in ("params", "stats", "target")}
    return dataclasses.replace(state, **parts)


def export() -> None:
    from jepa_jax.exports.export import export_encoder
    from tests.evals.untrained_run import write_run

    for name, config in configs().items():
        with tempfile.TemporaryDirectory() as folder:
            write_run(config, pathlib.Path(folder) / "run", shaken)
            export_encoder(pathlib.Path(folder) / "run", "hf", GOLDEN / name)
        (GOLDEN / name / "README.md").unlink()


def transformers() -> None:
    import torch
    import transformers

    for folder in sorted(path for path in GOLDEN.iterdir() if path.is_dir()):
        model, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
        lacking = [name for name in report["missing_keys"] if not name.startswith("pooler.")]
        assert not lacking and not report["unexpected_keys"], (folder, report)
        pixels = torch.randn((2, 3, 16, 16), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            outputs = model.eval()(pixels).last_hidden_state
        np.savez(folder / "io.npz", pixel_values=pixels.numpy(), last_hidden_state=outputs.numpy())
        print(folder.name, type(model).__name__, tuple(outputs.shape))


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    {"export": export, "transformers": transformers}[sys.argv[1]]()

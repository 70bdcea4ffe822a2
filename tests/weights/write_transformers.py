"""Writes tiny models of transformers with random weights, and their outputs, which `test_load` compares with.

Needs an environment of its own (transformers 5.23, torch 2.13 on a CPU wrote what lies there):

    python -m venv venv && venv/bin/pip install torch transformers
    venv/bin/python tests/weights/write_transformers.py
"""

import pathlib

import numpy as np
import torch
import transformers

WEIGHTS = pathlib.Path(__file__).parents[1] / "golden" / "weights"
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
MODELS = {
    "hf_dinov2_registers": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**SIZES, mlp_ratio=2, num_register_tokens=4)
    ),
    "hf_dinov2_swiglu": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(**SIZES, mlp_ratio=3, use_swiglu_ffn=True)
    ),
    "hf_dinov3": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(
            **SIZES, intermediate_size=48, use_gated_mlp=True, hidden_act="silu", num_register_tokens=4
        )
    ),
    "hf_dinov3_plain": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**SIZES, intermediate_size=64, num_register_tokens=0)
    ),
}
RESIZED = {"hf_dinov2": transformers.Dinov2Model, "hf_vit": transformers.ViTModel}  # that lie there already
OTHER_SIZES = {"small": 24, "large": 56}  # pixels


def tokens(model, pixels, **options):
    with torch.no_grad():
        return model(torch.from_numpy(pixels), **options).last_hidden_state.numpy()


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    for name, make in MODELS.items():
        model = make().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.from_numpy(rng.normal(0.0, 0.2, parameter.shape).astype(np.float32)))
        model.save_pretrained(WEIGHTS / name)
        pixels = rng.standard_normal((2, 3, 32, 32), np.float32)
        other = {f"pixel_values_{key}": rng.standard_normal((1, 3, n, n), np.float32) for key, n in OTHER_SIZES.items()}
        states = {
            key.replace("pixel_values", "last_hidden_state"): tokens(model, x)
            for key, x in {"pixel_values": pixels, **other}.items()
        }
        np.savez_compressed(WEIGHTS / name / "io.npz", pixel_values=pixels, **other, **states)
    for name, kind in RESIZED.items():
        model = kind.from_pretrained(WEIGHTS / name, add_pooling_layer=False) if name == "hf_vit" else (
            kind.from_pretrained(WEIGHTS / name)
        )  # fmt: skip
        options = {"interpolate_pos_encoding": True} if name == "hf_vit" else {}
        stored = {}
        for key, side in OTHER_SIZES.items():
            grid = model.config.patch_size
            pixels = rng.standard_normal((1, 3, side // 8 * grid, side // 8 * grid), np.float32)
            stored |= {
                f"pixel_values_{key}": pixels,
                f"last_hidden_state_{key}": tokens(model.eval(), pixels, **options),
            }
        np.savez_compressed(WEIGHTS / name / "io_resized.npz", **stored)

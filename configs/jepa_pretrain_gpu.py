"""Image JEPA on CIFAR-10 for one 48 GB GPU: ResNet-18, batch 1024 in two parts, 8 loader processes, bfloat16.

    jepa-jax train --config=jepa_pretrain_gpu --workdir=runs/jepa_pretrain_gpu

The settings that a public throughput sweep recommends for an RTX A6000 with 8 processor cores (batch 1024, 8 workers,
2 accumulation steps, mixed precision, "under 44 GB"). What they need as compiled here: docs/results/gpu_plans.md, or

    jepa-jax plan --config=jepa_pretrain_gpu --gpu=a6000

A batch is all images of an update: the two parts have 512 each. Never trained here: no accuracy is claimed.
"""


def get_config() -> dict:
    return dict(
        base="image_jepa",
        data=dict(batch_size=1024, num_workers=8, pipeline="grain"),
        train=dict(accum_steps=2),
    )

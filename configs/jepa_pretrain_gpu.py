"""Image JEPA on CIFAR-10 for one 48 GB GPU: ResNet-18, two parts of 1024 per update, 8 workers, bfloat16.

    jepa-jax train --config=jepa_pretrain_gpu --workdir=runs/jepa_pretrain_gpu

The settings that a public throughput sweep recommends for an RTX A6000 with 8 processor cores (batch 1024, 8 workers,
2 accumulation steps, mixed precision, "under 44 GB"). What they need as compiled here: docs/results/gpu_plans.md, or

    jepa-jax plan --config=jepa_pretrain_gpu --gpu=a6000

data.batch_size counts all images of an update: 2048, in two parts of 1024. The rate is image_jepa's, for this batch.
Never trained here: no accuracy is claimed.
"""

import ml_collections

from jepa_jax.configs import image_jepa


def get_config() -> ml_collections.ConfigDict:
    config = image_jepa.get_config()
    config.data.pipeline = "grain"
    config.data.batch_size = 2048
    config.data.num_workers = 8
    config.optim.reference_batch = config.data.batch_size
    config.train.accum_steps = 2
    return config

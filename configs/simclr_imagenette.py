"""SimCLR on Imagenette as lightly's benchmark runs it: ResNet-18 at 128 pixels, 800 epochs, bfloat16.

    jepa-jax train --config=simclr_imagenette --workdir=runs/simclr_imagenette --config.data.dir=DIR

DIR holds the folders train and val of Imagenette (160 pixels). Encoder, projector, temperature, views, SGD with decay
on every parameter, a cosine without warm-up, batch 256 and length are those of lightly's Imagenette benchmark of 2022,
which publishes 85.8 % for k-NN (k 200, temperature .1) after 800 epochs on one V100. Unlike it: the projector has
batch norm between its layers, the width of the blur is ours, compute is in bfloat16, and the figure is that of the
last epoch, not the best on test images. Not reproduced here.
"""

import ml_collections

from jepa_jax.config import with_choices
from jepa_jax.configs import image_jepa


def get_config() -> ml_collections.ConfigDict:
    config = with_choices(image_jepa.get_config(), method__name="simclr", optim__name="sgd")
    config.method.projector = (512, 128)
    config.method.temperature = 0.5
    config.model.stem = "imagenet"
    config.data.source = "folder"
    config.data.dir = "data/imagenette2-160"
    config.data.pipeline = "grain"
    config.data.crops = "loader"
    config.data.image_size = 128
    config.data.num_workers = -1
    config.data.augment.crop.scale = (0.08, 1.0)
    config.data.augment.jitter.saturation = 0.4
    config.data.augment.blur.probability = 0.5
    config.data.augment.solarize.probability = 0.0
    config.data.augment.mean = (0.485, 0.456, 0.406)
    config.data.augment.std = (0.229, 0.224, 0.225)
    config.optim.lr = 0.06
    config.optim.weight_decay = 5e-4
    config.optim.decay_all = True
    config.optim.epochs = 800.0
    config.optim.warmup_epochs = 0.0
    config.eval.knn_k = 200
    config.eval.knn_temperature = 0.1
    config.eval.every_epochs = 10
    config.eval.knn_every_epochs = 50
    return config

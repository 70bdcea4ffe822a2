"""Times torchvision's crops under a PyTorch DataLoader; needs torch and torchvision and nothing of jepa_jax.

  python profiling/torchvision_loader.py FOLDER SIZE BATCH WORKERS BATCHES VARIANT

FOLDER holds JPEG files in class folders; every photograph is decoded once and cropped twice. VARIANT `standard` is
RandomResizedCrop, RandomHorizontalFlip, ToTensor (floats, as torchvision's references do); `lean` is RandomResizedCrop
and PILToTensor (uint8, not mirrored). Prints one JSON object.

The compiled operators of torchvision (nms and others) are not needed by transforms of PIL images; where their library
cannot be loaded, torchvision is imported without them.
"""

import json
import pathlib
import sys
import time
import types
from typing import Any

WARM_UP = 8  # batches that are not counted: workers start, and prefetch


def import_transforms() -> Any:
    try:
        from torchvision import transforms
    except RuntimeError:  # operator torchvision::nms does not exist
        name = "torchvision._meta_registrations"
        for module in [module for module in sys.modules if module.startswith("torchvision")]:
            del sys.modules[module]
        sys.modules[name] = types.ModuleType(name)
        from torchvision import transforms
    return transforms


class TwoCrops:
    """The images of a folder, each cropped twice."""

    def __init__(self, folder: str, transform: Any):
        self.files = sorted(str(file) for file in pathlib.Path(folder).rglob("*.jpg"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with open(self.files[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        return self.transform(image), self.transform(image), 0


def main(folder: str, size: int, batch: int, workers: int, batches: int, variant: str) -> dict[str, Any]:
    import torch
    import torch.utils.data

    transforms = import_transforms()
    crop = transforms.RandomResizedCrop(size, scale=(0.2, 1.0))
    if variant == "standard":
        transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    else:
        transform = transforms.Compose([crop, transforms.PILToTensor()])
    data: Any = TwoCrops(folder, transform)
    count = (batches + WARM_UP) * batch
    sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=count)
    loader = torch.utils.data.DataLoader(data, batch, sampler=sampler, num_workers=workers)
    views, start = 0, 0.0
    for number, (first, second, _) in enumerate(loader):
        if number == WARM_UP - 1:
            start = time.perf_counter()
        elif number >= WARM_UP:
            views += len(first) + len(second)
    seconds = time.perf_counter() - start
    import torchvision

    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    return {"views_per_sec": views / seconds, "seconds": seconds, **versions}


if __name__ == "__main__":
    folder, size, batch, workers, batches, variant = sys.argv[1:]
    print(json.dumps(main(folder, int(size), int(batch), int(workers), int(batches), variant)))

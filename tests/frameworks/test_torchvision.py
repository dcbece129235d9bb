"""torchvision: FakeData and transforms of the second version, which draw from the workers' generators."""

import torch
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

from parity.describe import describe

AUGMENT = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(16, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4, 0.4, 0.4),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.2] * 3),
    ]
)


def fake(transform):
    return datasets.FakeData(size=24, image_size=(3, 24, 24), num_classes=5, transform=transform)


class Boxed(torch.utils.data.Dataset):
    """Images with boxes, as detection has them: both are tensors of a class of torchvision's own."""

    def __init__(self):
        self.transform = v2.Compose([v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes(labels_getter=None)])

    def __len__(self):
        return 12

    def __getitem__(self, index):
        image = tv_tensors.Image(torch.full((3, 16, 16), index, dtype=torch.uint8))
        corners = torch.tensor([[0, 0, 4 + index % 8, 6]] * (1 + index % 3))
        boxes = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(16, 16))
        return self.transform(image, boxes)


def as_lists(samples):
    return tuple(zip(*samples, strict=True))


def test_augmented_images(compare):
    def program(way):
        loader = way.DataLoader(fake(AUGMENT), batch_size=5, shuffle=True, num_workers=2)
        return [describe(batch) for _ in range(2) for batch in loader]

    ours = compare(program)
    assert len(ours.made) == 2


def test_mixup_in_the_collate_function(compare):
    mix = v2.RandomChoice([v2.CutMix(num_classes=5), v2.MixUp(num_classes=5)])

    def collate(samples):
        return mix(*torch.utils.data.default_collate(samples))

    def program(way):
        loader = way.DataLoader(fake(AUGMENT), batch_size=6, num_workers=2, collate_fn=collate)
        return [describe(batch) for batch in loader]

    compare(program)


def test_images_with_boxes_keep_their_types(compare):
    def program(way):
        loader = way.DataLoader(Boxed(), batch_size=3, num_workers=2, collate_fn=as_lists)
        batches = list(loader)
        assert type(batches[0][1][0]) is tv_tensors.BoundingBoxes
        return [(describe(batch), [boxes.canvas_size for boxes in batch[1]]) for batch in batches]

    compare(program)

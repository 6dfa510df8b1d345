"""Jobs that train on pictures."""

import torch

from jobs import VOCABULARY, job, trains


def classify(model, device, size, prepare=lambda images: images):
    """A loop that trains a classifier of pictures."""

    def loss_of(generator):
        images = prepare(torch.rand(4, 3, size, size, generator=generator).to(device))
        labels = torch.randint(0, 10, (4,), generator=generator).to(device)
        return torch.nn.functional.cross_entropy(model(images), labels)

    return trains(model, device, loss_of)


@job("marked", "detected")
def diffusers_ddpm(device):
    """Noise that is drawn on the device, and a moving average of the parameters."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    model = UNet2DModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).to(device)
    scheduler, average = DDPMScheduler(100), EMAModel(model.parameters())
    average.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(5)).to(device)

    def iterate(index):
        batch = images[index % 4 :: 4]
        noise, steps = torch.randn_like(batch), torch.randint(0, 100, (len(batch),), device=device)
        loss = torch.nn.functional.mse_loss(model(scheduler.add_noise(batch, noise, steps), steps).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        # Its storage is as large as that of what it is the mean of.
        return loss.detach().clone()

    return iterate, [model]


@job("marked")
def timm_swin(device):
    import timm

    sizes = dict(img_size=112, embed_dim=48, depths=(2, 2, 2), num_heads=(2, 4, 8), num_classes=10)
    return classify(timm.models.SwinTransformer(**sizes, drop_path_rate=0.2), device, 112)


@job("marked", "detected")
def torchvision_augments(device):
    """Pictures are augmented on the device, in other ways every time."""
    from torchvision.models import regnet_y_400mf
    from torchvision.transforms import v2

    augment = v2.Compose(
        [
            v2.RandomResizedCrop(96, scale=(0.5, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.2, 0.2, 0.2, 0.05),
            v2.RandomErasing(0.5),
            v2.Normalize([0.5] * 3, [0.25] * 3),
        ]
    )
    return classify(regnet_y_400mf(weights=None, num_classes=10), device, 128, augment)


@job("marked")
def torchvision_detects(device):
    """As many boxes as there happen to be: no two iterations are alike."""
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    sizes = dict(num_classes=5, min_size=128, max_size=128, rpn_pre_nms_top_n_train=200, rpn_post_nms_top_n_train=100)
    model = FasterRCNN(backbone, **sizes)

    def target(generator):
        count = int(torch.randint(1, 4, (), generator=generator))
        corner = torch.rand(count, 2, generator=generator) * 60
        boxes = torch.cat([corner, corner + 20 + torch.rand(count, 2, generator=generator) * 40], 1)
        labels = torch.randint(1, 5, (count,), generator=generator)
        return dict(boxes=boxes.to(device), labels=labels.to(device))

    def loss_of(generator):
        images = [torch.rand(3, 128, 128, generator=generator).to(device) for _ in range(2)]
        return sum(model(images, [target(generator) for _ in images]).values())

    return trains(model, device, loss_of, torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9))


@job("marked")
def opacus_ghost_clipping(device):
    """Gradients of single samples: the backward pass runs twice, by hooks."""
    from opacus import PrivacyEngine

    layers = [torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.AvgPool2d(4), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32 * 64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model.to(device)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 10, (64,), generator=generator)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=16)
    model, optimizer, criterion, _ = PrivacyEngine(accountant="prv").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        data_loader=loader,
        criterion=torch.nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )

    def iterate(index):
        batch = slice(16 * (index % 4), 16 * (index % 4) + 16)
        optimizer.zero_grad()
        loss = criterion(model(images[batch].to(device)), labels[batch].to(device))
        loss.backward()
        optimizer.step()
        return torch.tensor(loss.item())

    return iterate, [model]


@job("marked")
def open_clip_pairs(device):
    """Pictures and texts, each of which is compared with all of the others, in mixed precision."""
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP

    pictures = dict(image_size=64, layers=3, width=128, patch_size=8, head_width=32)
    texts = dict(context_length=24, vocab_size=VOCABULARY, width=128, heads=4, layers=3)
    model, contrast = CLIP(128, pictures, texts), ClipLoss()

    def loss_of(generator):
        images = torch.rand(16, 3, 64, 64, generator=generator).to(device)
        captions = torch.randint(1, VOCABULARY, (16, 24), generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            return contrast(*model(images, captions))

    return trains(model, device, loss_of)


@job("marked")
def monai_segments(device):
    """Volumes; every sixth iteration looks at one through a window that slides."""
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = UNet(3, 1, 3, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
    dice = DiceCELoss(to_onehot_y=True, softmax=True)

    def volumes(generator):
        return torch.randn(2, 1, 32, 32, 32, generator=generator).to(device)

    def loss_of(generator):
        labels = torch.randint(0, 3, (2, 1, 32, 32, 32), generator=generator).to(device)
        return dice(model(volumes(generator)), labels)

    train, modules = trains(model, device, loss_of)
    others = torch.Generator().manual_seed(2)

    def iterate(index):
        if index % 6 < 5:
            return train(index)
        with torch.no_grad():
            return sliding_window_inference(volumes(others), (16, 16, 16), 4, model).mean()

    return iterate, modules

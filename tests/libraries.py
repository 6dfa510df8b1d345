"""Training jobs of other libraries, each left alone and within a budget: whether bits stay and the budget is held.

    python3 tests/libraries.py [--device cuda] [JOB ...]

Needs the packages of `libraries.txt` and plimsoll beside torch: see `make libraries`. Ends with 1 where a job failed.
"""

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time

import torch

# The share of the peak that a job is left; where that cannot be held, of what lies above what can.
SHARE = 0.7
ITERATIONS = 24
VOCABULARY = 500

jobs = {}


def job(*modes):
    """Registers a function of a device, which returns the modules that are trained, and a function that runs an iteration of a given
    index; or, where the library has the loop, one of no arguments that runs it all, whose iterations can only be detected."""

    def register(make):
        jobs[make.__name__] = (make, modes)
        return make

    return register


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **more))


def tokens(count, length=96):
    return torch.randint(5, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(3))


def rows(count):
    return [dict(input_ids=row, labels=row.clone()) for row in tokens(count)]


def train(model, device, manner, **data):
    """The loop of transformers."""
    from transformers import Trainer, TrainingArguments

    def run():
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=40,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=False,
            **manner,
        )
        trainer = Trainer(model, arguments, **data)
        trainer.train()
        return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])

    return run, [model]


def classify(model, device, size, prepare=lambda images: images):
    """A loop that trains a classifier of pictures."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)

    def iterate(_):
        images = prepare(torch.rand(4, 3, size, size, generator=generator).to(device))
        labels = torch.randint(0, 10, (4,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return iterate, [model]


@job("marked", "detected")
def transformers_gpt2(device):
    """Its cache of keys and values begins with empty tensors."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return speaks(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=128, n_layer=4, n_head=4)), device)


def speaks(model, device):
    """A language model that is trained on batches of one length."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = tokens(4 * ITERATIONS, 128).split(4)

    def iterate(index):
        batch = batches[index].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return iterate, [model]


@job("marked", "detected")
def transformers_bert_in_buckets(device):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256)
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(2)

    def iterate(_):
        length = 32 * int(torch.randint(2, 5, (), generator=generator))
        batch = torch.randint(0, VOCABULARY, (8, length), generator=generator).to(device)
        labels = torch.randint(0, 2, (8,), generator=generator).to(device)
        loss = model(input_ids=batch, attention_mask=torch.ones_like(batch), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return iterate, [model]


@job("marked", "detected")
def transformers_mixtral(device):
    """Mixtures of experts, each of which has as many tokens as are sent to it, in one grouped product."""
    return mixtral(device, "grouped_mm")


@job("marked", "detected")
def transformers_mixtral_in_a_loop(device):
    """… in products of their own: an expert that none are sent to runs nothing."""
    return mixtral(device, "eager")


def mixtral(device, experts):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    config = MixtralConfig(vocab_size=VOCABULARY, num_local_experts=8, experts_implementation=experts, **sizes)
    return speaks(MixtralForCausalLM(config), device)


@job("detected")
def transformers_trainer(device):
    """A trainer with adapters, which evaluates, and stacks its batches from rows that are there from the start."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
    model = get_peft_model(llama(), adapters)
    manner = dict(per_device_train_batch_size=4, eval_strategy="steps", eval_steps=15)
    return train(model, device, manner, train_dataset=rows(120), eval_dataset=rows(8))


@job("detected")
def transformers_pads(device):
    """A trainer whose batches are padded to their longest passage: of a hundred lengths, whichever that is."""
    return pads(device, {}, passages=320)


@job("detected")
def transformers_pads_and_accumulates(device):
    """The same, where gradients of four such batches add up in every step."""
    return pads(device, dict(gradient_accumulation_steps=4), passages=1280)


def pads(device, manner, passages):
    """A classifier of passages of any length, which a trainer trains in that manner."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

    words = {"[PAD]": 0}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "[PAD]")), pad_token="[PAD]")
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(16, 129, (passages,), generator=generator).tolist()
    passages = [torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    rows = [dict(input_ids=passage, labels=index % 2) for index, passage in enumerate(passages)]
    sizes = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256)
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes))
    return train(model, device, manner, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer))


@job("marked")
def accelerate_accumulates(device):
    """Gradients of two batches are added up, in mixed precision; other processes load the batches."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=device.type == "cpu")
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(tokens(4 * ITERATIONS)), batch_size=4, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = iter(loader)

    def iterate(_):
        (batch,) = next(batches)
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return iterate, [model]


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
    model = FasterRCNN(backbone, **sizes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    generator = torch.Generator().manual_seed(1)

    def target():
        count = int(torch.randint(1, 4, (), generator=generator))
        corner = torch.rand(count, 2, generator=generator) * 60
        boxes = torch.cat([corner, corner + 20 + torch.rand(count, 2, generator=generator) * 40], 1)
        labels = torch.randint(1, 5, (count,), generator=generator)
        return dict(boxes=boxes.to(device), labels=labels.to(device))

    def iterate(_):
        images = [torch.rand(3, 128, 128, generator=generator).to(device) for _ in range(2)]
        loss = sum(model(images, [target() for _ in images]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return iterate, [model]


@job("detected")
def lightning_validates(device):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = llama(), []

        def training_step(self, batch, _):
            loss = self.model(input_ids=batch, labels=batch).loss
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch, _):
            self.log("validation", self.model(input_ids=batch, labels=batch).loss)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Module()

    def run():
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            max_epochs=2,
            gradient_clip_val=1.0,
            val_check_interval=5,
            num_sanity_val_steps=0,
            default_root_dir=tempfile.mkdtemp(),
            **quiet,
        )
        load = torch.utils.data.DataLoader
        trainer.fit(module, load(tokens(80), batch_size=4, shuffle=True), load(tokens(8), batch_size=4))
        return torch.stack(module.losses)

    return run, [module]


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


def digest(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run(name, mode, device, budget_bytes):
    """What a job came to, within a budget or left alone."""
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    runtime = None
    if budget_bytes is not None:
        import plimsoll

        runtime = plimsoll.Runtime(budget_bytes, device=device)
    loop, modules = jobs[name][0](torch.device(device))
    losses = []
    started = time.perf_counter()

    is_own = not inspect.signature(loop).parameters
    nothing = contextlib.nullcontext
    with runtime.detect() if runtime and mode == "detected" else nothing():
        for index in [()] if is_own else zip(range(ITERATIONS)):
            with runtime.iteration() if runtime and mode == "marked" else nothing():
                losses.append(loop(*index))
    seconds = time.perf_counter() - started
    state = [tensor for module in modules for tensor in module.state_dict().values()]
    return dict(digest=digest(losses + state), seconds=seconds, report=runtime and runtime.report())


def call(name, mode, device, budget_bytes):
    """The same in a process of its own."""
    argv = [sys.executable, __file__, name, "--device", device, "--mode", mode]
    if budget_bytes is not None:
        argv += ["--budget", str(budget_bytes)]
    ran = subprocess.run(argv, capture_output=True, text=True)
    if ran.returncode == 0:
        return json.loads(ran.stdout.splitlines()[-1])
    return dict(complaint=(ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1])


def within_budget(name, mode, device, peak_bytes):
    """The job within some share of its peak that can be held: what is there between iterations, or at the end, may take more."""
    budget_bytes = int(SHARE * peak_bytes)
    while True:
        held = call(name, mode, device, budget_bytes)
        refused = re.search(r"least feasible budget found so far is (\d+) bytes", held.get("complaint", ""))
        over_bytes = held["report"]["over_budget_bytes"] if "report" in held else 0
        least_bytes = int(refused[1]) if refused else budget_bytes + over_bytes
        if least_bytes <= budget_bytes:
            return budget_bytes, held
        budget_bytes = least_bytes + int(0.4 * (peak_bytes - least_bytes))


def judge(name, mode, device):
    """Whether all is well with a job; prints what it came to."""
    alone = call(name, mode, device, None)
    if "complaint" in alone:
        print(f"{name:30} {mode:8} FAILED, left alone: {alone['complaint']}", flush=True)
        return False
    watched = call(name, mode, device, 1 << 40)
    complaint = watched.get("complaint")
    if not complaint:
        peak_bytes = watched["report"]["peak_bytes"]
        budget_bytes, held = within_budget(name, mode, device, peak_bytes)
        complaint = held.get("complaint")
    if complaint:
        print(f"{name:30} {mode:8} FAILED: {complaint}", flush=True)
        return False
    report = held["report"]
    known = sum(iteration["course"] not in ("reactive", "resumed") for iteration in report["latest"])
    faults = [what for what, digest in (("watched", watched["digest"]), ("held", held["digest"])) if digest != alone["digest"]]
    faults = [f"OTHER BITS where it is {what}" for what in faults]
    if report["peak_bytes"] > budget_bytes:
        faults.append("MORE THAN ITS BUDGET")
    print(
        f"{name:30} {mode:8} {budget_bytes / 2**20:6.1f} of {peak_bytes / 2**20:6.1f} MiB, known in {known:2} of "
        f"{report['iterations']:2} iterations, plans: {report['plans']}, {held['seconds'] / alone['seconds']:4.2f} of the time: "
        f"{', '.join(faults) or 'the same bits'}",
        flush=True,
    )
    return not faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="*", help="of " + ", ".join(jobs))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", help="runs one job in this process")
    parser.add_argument("--budget", type=int, help="bytes that it is left")
    asked = parser.parse_args()
    if asked.mode:
        print("\n" + json.dumps(run(asked.job[0], asked.mode, asked.device, asked.budget)))
        return
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    well = [judge(name, mode, asked.device) for name in asked.job or jobs for mode in jobs[name][1]]
    sys.exit(not all(well))


if __name__ == "__main__":
    main()

"""Jobs that train on text."""

import random
import tempfile

import torch

from jobs import ITERATIONS, VOCABULARY, job, tokens, trains


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **more))


def rows(count):
    return [dict(input_ids=row, labels=row.clone()) for row in tokens(count)]


def manner_of(device, **more):
    """What the trainers of transformers and TRL are told."""
    quiet = dict(logging_steps=5, report_to=[], disable_tqdm=True, dataloader_pin_memory=False)
    saved = dict(output_dir=tempfile.mkdtemp(), save_steps=15, save_total_limit=1)
    return dict(max_steps=40, use_cpu=device.type == "cpu", **quiet, **saved, **more)


def losses_of(trainer):
    """What such a trainer comes to."""
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def train(model, device, manner, **data):
    """The loop of transformers."""
    from transformers import Trainer, TrainingArguments

    return lambda: losses_of(Trainer(model, TrainingArguments(**manner_of(device, **manner)), **data)), [model]


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
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes))

    def loss_of(generator):
        length = 32 * int(torch.randint(2, 5, (), generator=generator))
        batch = torch.randint(0, VOCABULARY, (8, length), generator=generator).to(device)
        labels = torch.randint(0, 2, (8,), generator=generator).to(device)
        return model(input_ids=batch, attention_mask=torch.ones_like(batch), labels=labels).loss

    return trains(model, device, loss_of)


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


def tokenizer_of_words():
    """A tokenizer of the words w0, w1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = dict(pad_token="[PAD]", unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]")
    words = [*special.values(), *(f"w{index}" for index in range(VOCABULARY - len(special)))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, special["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


@job("detected")
def transformers_trainer(device):
    """A trainer with adapters, which evaluates, and stacks its batches from rows that are there from the start."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
    model = get_peft_model(llama(), adapters)
    manner = dict(per_device_train_batch_size=4, eval_strategy="steps", eval_steps=15)
    return train(model, device, manner, train_dataset=rows(120), eval_dataset=rows(8))


@job("throughout")
def transformers_trainer_of_much_state(device):
    """A trainer as it comes, with an optimizer that steps all parameters in one operator."""
    return train(llama(), device, dict(per_device_train_batch_size=1), train_dataset=rows(40))


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
    from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(16, 129, (passages,), generator=generator).tolist()
    passages = [torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    rows = [dict(input_ids=passage, labels=index % 2) for index, passage in enumerate(passages)]
    sizes = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256)
    model = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes))
    return train(model, device, manner, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer_of_words()))


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


def texts(drawn, count, longest):
    def text():
        return " ".join(f"w{drawn.randrange(VOCABULARY - 4)}" for _ in range(drawn.randrange(8, longest)))

    return [text() for _ in range(count)]


@job("marked", "detected")
def sentence_transformers_cached(device):
    """The gradients of large batches come from passes over pieces of them, each of which runs twice."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    sizes = dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256)
    folder = tempfile.mkdtemp()
    tokenizer_of_words().save_pretrained(folder)
    BertModel(BertConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(folder)
    model = SentenceTransformer(modules=[Transformer(folder), Pooling(128)], device=str(device))
    ranking, drawn = CachedMultipleNegativesRankingLoss(model, mini_batch_size=8), random.Random(1)

    def loss_of(_):
        pairs = [model.preprocess(texts(drawn, 32, 60)) for _ in range(2)]
        kept = [{key: value.to(device) for key, value in one.items() if torch.is_tensor(value)} for one in pairs]
        return ranking(kept, None)

    return trains(model, device, loss_of)


@job("detected")
def trl_generates(device):
    """Answers are generated, by as many steps as they have words, judged, and learned from (GRPO)."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = tempfile.mkdtemp()
    llama(pad_token_id=0, bos_token_id=2, eos_token_id=3).save_pretrained(folder)
    prompts = Dataset.from_list([dict(prompt=text) for text in texts(random.Random(1), 64, 12)])

    manner = manner_of(device, per_device_train_batch_size=8, num_generations=4, max_completion_length=16, beta=0.1, bf16=False)
    data = dict(train_dataset=prompts, processing_class=tokenizer_of_words())
    trainer = GRPOTrainer(folder, variety, args=GRPOConfig(**manner), **data)
    return lambda: losses_of(trainer), [trainer.model]


def variety(completions, **_):
    """How many different words each has."""
    return [float(len(set(completion.split()))) for completion in completions]


@job("marked")
def bitsandbytes_adapts(device):
    """Adapters beside weights of four bits, by an optimizer whose state has eight."""
    from bitsandbytes.nn import Linear4bit, Params4bit
    from bitsandbytes.optim import AdamW8bit
    from peft import LoraConfig, get_peft_model

    model = llama()
    for name, module in list(model.model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            small = Linear4bit(module.in_features, module.out_features, bias=False, compute_dtype=torch.float32)
            small.weight = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            model.model.set_submodule(name, small)
    model = get_peft_model(model.to(device), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batches = iter(tokens(4 * ITERATIONS, 128).split(4))

    def loss_of(_):
        batch = next(batches).to(device)
        return model(input_ids=batch, labels=batch).loss

    iterate, _ = trains(model, device, loss_of, AdamW8bit(adapters, lr=1e-3))
    return iterate, [torch.nn.ParameterList(adapters)]

"""Hugging Face Trainer, quick-start manner: a small random GPT-2 on made-up text, no downloads."""

import os
import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Text(Dataset):
    """Windows of this file."""

    def __init__(self):
        with open(__file__, "rb") as file:
            self.data = torch.tensor(list(file.read()))

    def __len__(self):
        return 96

    def __getitem__(self, index):
        window = self.data[index * 7 : index * 7 + 32]
        return {"input_ids": window, "labels": window}


class PrintLosses(TrainerCallback):
    """Print each logged loss exactly."""

    def on_log(self, args, state, control, logs=None, **more):
        if logs and "loss" in logs:
            print("loss", float(logs["loss"]).hex(), float(logs["grad_norm"]).hex(), flush=True)


if __name__ == "__main__":
    set_seed(0)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=os.environ.get("JOB_OUT", "."), per_device_train_batch_size=8, num_train_epochs=2, logging_steps=1,
        save_steps=10, report_to=[], use_cpu=True, seed=0, gradient_accumulation_steps=int([*sys.argv, "1"][1]),
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Text(), callbacks=[PrintLosses()]).train()

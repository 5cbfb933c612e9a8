"""Hugging Face Trainer: a small random GPT-2, two batches per step, an evaluation and a checkpoint per epoch."""

import os

import torch
from slow import SlowExamples
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(SlowExamples):
    """The slow examples as windows of token ids."""

    def __getitem__(self, index):
        x, _ = super().__getitem__(index)
        ids = (x.abs() * 40).long().clamp(max=127)
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    set_seed(0)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=os.environ.get("JOB_OUT", "out"), per_device_train_batch_size=16, per_device_eval_batch_size=16,
        num_train_epochs=2, gradient_accumulation_steps=2, logging_steps=1, eval_strategy="epoch",
        save_strategy="epoch", report_to=[], use_cpu=True, seed=0, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(20, 0.01), eval_dataset=Tokens(15, 0.03))
    trainer.train()
    for entry in trainer.state.log_history:
        print("loss", *(float(entry[key]).hex() for key in ("loss", "grad_norm", "eval_loss") if key in entry))

"""sentence-transformers: its Trainer with an evaluator, over a small random BERT and a made-up vocabulary."""

import os
import random

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)  # fmt: skip
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from transformers import BertConfig, BertModel, BertTokenizer, set_seed

WORDS = [f"word{number}" for number in range(100)]


def tiny_bert(folder):
    """Write a random BERT with its tokenizer into `folder`."""
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/vocab.txt", "w") as file:
        file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizer(f"{folder}/vocab.txt").save_pretrained(folder)
    BertModel(
        BertConfig(vocab_size=105, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    ).save_pretrained(folder)
    return folder


def pairs(count, seed):
    """Return `count` pairs of sentences with a score."""
    rng = random.Random(seed)
    sentences = [" ".join(rng.choices(WORDS, k=8)) for _ in range(2 * count)]
    return {"sentence1": sentences[::2], "sentence2": sentences[1::2], "score": [rng.random() for _ in range(count)]}


if __name__ == "__main__":
    set_seed(0)
    torch.set_num_threads(1)
    out = os.environ.get("JOB_OUT", "out")
    word = models.Transformer(tiny_bert(f"{out}/bert"), max_seq_length=16)
    model = SentenceTransformer(modules=[word, models.Pooling(32)], device="cpu")
    check = pairs(320, 1)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=f"{out}/run", num_train_epochs=2, per_device_train_batch_size=16, logging_steps=1,
        save_strategy="no", eval_strategy="epoch", report_to=[], use_cpu=True, seed=0, disable_tqdm=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(pairs(320, 0)),
        eval_dataset=Dataset.from_dict(pairs(64, 2)), loss=losses.CosineSimilarityLoss(model),
        evaluator=EmbeddingSimilarityEvaluator(check["sentence1"], check["sentence2"], check["score"]),
    )  # fmt: skip
    trainer.train()
    for entry in trainer.state.log_history:
        print("loss", *(float(entry[key]).hex() for key in ("loss", "grad_norm", "eval_loss") if key in entry))

"""Train a tiny, randomly initialized Llama on 4 local processes with transformers' Trainer as it is, with faults.

The Trainer makes the ``Accelerator`` itself; the configuration file turns recovery on. Needs
``pip install '.[transformers]'``.

    accelerate launch --config_file examples/accelerate_hsdp.yaml \
        --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer \
        examples/train_transformers.py --fault backward@3:3 --fault boundary@5 --verify
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass

import drill
import torch
from accelerate.utils import gather_object
from decoder import CHARACTERS, HEAD_WIDTH, StandardLibrary
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from lightning_accelpact import FaultPlan
from lightning_accelpact.recovery.digest import state_digest


@dataclass
class Outcome:
    """What every rank holds at the end of training, and whether one of its faults has never struck."""

    digests: tuple[str, ...]
    faults_left: tuple[bool, ...]
    speaks: bool


class Pieces(Dataset):
    """Pieces of text as the Trainer wants them."""

    def __init__(self, texts: StandardLibrary) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def fit(args: argparse.Namespace, faults: FaultPlan | None) -> Outcome:
    """Train, from the same start every time."""
    os.environ["ACCELPACT_FAULTS"] = ",".join(map(str, faults.faults if faults else ()))
    set_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CHARACTERS,
            hidden_size=args.width,
            intermediate_size=4 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.width // HEAD_WIDTH,
            num_key_value_heads=args.width // HEAD_WIDTH,
            max_position_embeddings=args.context + 1,
            attention_dropout=0.1,
            tie_word_embeddings=False,
        )
    )
    size = args.updates * args.accumulate * args.batch_size * drill.PROCESSES
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=tempfile.gettempdir(),
            max_steps=args.updates,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=args.seed,
        ),
        train_dataset=Pieces(StandardLibrary(size=size, context=args.context)),
    )
    trainer.train()
    accelerator = trainer.accelerator
    digest = state_digest(trainer.model_wrapped, [trainer.optimizer.optimizer])
    left = bool(accelerator.accelpact.pending_faults)
    digests, faults_left = zip(*gather_object([(digest, left)]), strict=True)
    accelerator.end_training()
    accelerator.free_memory()
    return Outcome(digests, faults_left, speaks=accelerator.is_main_process)


if __name__ == "__main__":
    drill.main(fit, __doc__)

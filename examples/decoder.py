"""What the examples train: a small character-level language model, on the source of Python's standard library."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

HEAD_WIDTH = 16
CHARACTERS = 128  # ASCII
CORPUS_SIZE = 1_000_000


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each around a residual connection."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each: batch, head, position, HEAD_WIDTH
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """A GPT-like causal language model over ASCII characters. Nothing in it knows about sharding or recovery.

    Takes pieces of ``context + 1`` characters and gives the loss: how badly each is predicted from those before it.
    """

    def __init__(self, *, layers: int, width: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        given, following = text[:, :-1], text[:, 1:]
        x = self.characters(given) + self.positions.weight[: given.shape[1]]
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def warm_up_then_cosine(update: int, updates: int) -> float:
    """The learning rate's factor in an update."""
    return min((update + 1) / 5, (1 + math.cos(math.pi * update / updates)) / 2)


class StandardLibrary(Dataset[Tensor]):
    """``size`` pieces of ``context + 1`` characters from the source of Python's standard library."""

    def __init__(self, *, size: int, context: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_text("ascii", errors="ignore").encode() for file in files)[:CORPUS_SIZE]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = context + 1
        generator = torch.Generator().manual_seed(0)
        self.starts = torch.randint(len(self.text) - self.length, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return self.text[self.starts[index] :][: self.length].long()

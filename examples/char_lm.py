"""A small character-level transformer with AdamW on a text file, with Horovod, plainly or with SSD-SGD.

    horovodrun --gloo -np 2 python examples/char_lm.py --text book.txt --csv log.csv

The last tenth of the text is kept for validation. AdamW divides by a second moment, which is only
settled after some steps, so that SSD-SGD begins with a warm-up of at least one synchronous step.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import common
import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


def parse_arguments() -> argparse.Namespace:
    parser = common.parser_for("A character-level transformer.", epochs=10, batch_size=32, lr=1e-3)
    parser.set_defaults(warmup_epochs=1)
    parser.add_argument("--text", type=Path, required=True, help="a text file in UTF-8")
    parser.add_argument("--context", type=int, default=128, help="characters that the model looks at")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    return parser.parse_args()


# -- data ----------------------------------------------------------------------------------------


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of ``context`` characters, each with the characters that follow them."""

    def __init__(self, codes: Tensor, context: int) -> None:
        self.codes = codes
        self.context = context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self.context
        piece = self.codes[begin : begin + self.context + 1]
        return piece[:-1], piece[1:]


def load_text(path: Path, context: int) -> tuple[Windows, Windows, int]:
    """Windows to train and to validate with, and the number of different characters."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise common.Refusal(
            f"{path} cannot be read ({error}). Pass any text file in UTF-8 as --text."
        ) from error
    alphabet = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    end = len(codes) * 9 // 10
    train, val = Windows(codes[:end], context), Windows(codes[end:], context)
    if not len(train) or not len(val):
        raise common.Refusal(
            f"{path} has {len(text)} characters; with --context {context} at least {10 * (context + 1)} are "
            "needed. Pass a longer text as --text, or lower --context."
        )
    return train, val, len(alphabet)


# -- model ---------------------------------------------------------------------------------------


class CharTransformer(nn.Module):
    mask: Tensor

    def __init__(self, characters: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )

    def forward(self, codes: Tensor) -> Tensor:
        x = self.character(codes) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


# -- training ------------------------------------------------------------------------------------


def main() -> None:
    arguments = parse_arguments()
    train, val, characters = load_text(arguments.text, arguments.context)
    device = common.start(arguments.seed)
    sampler = common.sampler_for(train, arguments.seed)
    batches = DataLoader(train, arguments.batch_size, sampler=sampler, drop_last=True)
    val_batches = DataLoader(common.share_of(val), arguments.batch_size)
    steps = common.steps_per_epoch(arguments, len(batches))
    warmup, total = common.warmup_steps(arguments, steps), arguments.epochs * steps

    model = CharTransformer(
        characters, arguments.context, arguments.width, arguments.layers, arguments.heads
    ).to(device)
    # Adam's step does not shrink with the gradient's noise as SGD's: the square root is the usual rule.
    scale = math.sqrt(hvd.size())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.lr * scale, weight_decay=arguments.weight_decay
    )
    optimizer = common.distributed(optimizer, model, arguments, steps, max_grad_norm=arguments.max_grad_norm)

    def decay(step: int) -> float:
        """A cosine after the warm-up, down to a tenth."""
        done = min(1.0, max(0, step - warmup) / max(1, total - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    scheduler = common.schedule(optimizer, warmup, scale, decay)

    def loss_of(codes: Tensor, following: Tensor, reduction: str = "mean") -> Tensor:
        scores = model(codes.to(device))
        return functional.cross_entropy(
            scores.flatten(0, 1), following.to(device).flatten(), reduction=reduction
        )

    def optimizer_step() -> None:
        if arguments.optimizer == "horovod":
            # What is clipped is the mean over all ranks; SSD-SGD does so by itself (max_grad_norm=).
            optimizer.synchronize()  # type: ignore[attr-defined]
            nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
            with optimizer.skip_synchronize():  # type: ignore[attr-defined]
                optimizer.step()
        else:
            optimizer.step()

    def train_epoch(epoch: int) -> float:
        model.train()
        sampler.set_epoch(epoch)
        losses = 0.0
        for codes, following in common.progress(arguments, batches, epoch, steps):
            optimizer.zero_grad()
            loss = loss_of(codes, following)
            loss.backward()
            optimizer_step()
            scheduler.step()
            losses += loss.item()
        return losses / steps

    def evaluate() -> dict[str, float]:
        model.eval()
        sums = torch.zeros(1)
        for codes, following in val_batches:
            sums += loss_of(codes, following, reduction="sum").cpu()
        (loss,) = common.means_over_ranks(sums, len(val) * arguments.context)
        return {"val_loss": loss, "val_bits_per_character": loss / math.log(2)}

    checkpoint = common.Checkpoint(arguments, model, optimizer, scheduler=scheduler)
    common.fit(arguments, checkpoint, train_epoch, evaluate)


if __name__ == "__main__":
    main()

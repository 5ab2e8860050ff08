"""The cards of the loops in ``loops/``, as they are stored in ``golden/`` and shown on the page ``docs/cards.md``.

A loop is a file with a function ``make``. After a change that is meant: ``python scripts/cards.py``, and read the diff.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest_trainloop

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "cards.md"

CHECKS = ("evaluation_is_pure", "resume_equivalence", "data_order", "activations_alive")
"""Those whose findings are lines of the card."""

LIBRARIES = {"lightning_gan": ("lightning",), "lora": ("transformers", "peft")}
"""What a loop needs beside torch. Line numbers in files of these libraries change with their version."""

SHOWN = {
    "gpt": "GPT",
    "cnn": "CNN",
    "lora": "LoRA with the HF Trainer",
    "lightning_gan": "GAN with Lightning",
    "diffusion": "Diffusion with an average of the weights",
    "dqn": "DQN",
    "ppo": "PPO",
    "contrastive": "Contrastive learning",
    "seq2seq": "Sequence to sequence",
    "finetune": "Fine-tuning with a frozen trunk",
}
"""The headings of the page, in its order, by loop."""

_PART = re.compile(r"(?P<begin><!-- begin: cards -->\n).*(?P<end><!-- end: cards -->)", re.S)


def loops() -> list[str]:
    """The names of all loops."""
    return sorted(file.stem for file in (FOLDER / "loops").glob("*.py"))


def golden(name: str) -> Path:
    """The file of the stored card."""
    return FOLDER / "golden" / f"{name}.card.txt"


def card_of(name: str) -> pytest_trainloop.Card:
    """The card of a loop as it is now. The working directory is to be that of the repository."""
    make = importlib.import_module(f"tests.card.loops.{name}").make
    return pytest_trainloop.card(make, checks=CHECKS)


def page() -> str:
    """The page with the stored cards."""
    shown = "\n".join(_shown(name, heading) for name, heading in SHOWN.items())
    return _PART.sub(lambda part: f"{part['begin']}{shown}{part['end']}", PAGE.read_text(encoding="utf-8"))


def _shown(name: str, heading: str) -> str:
    """The part of the page about one loop: what it is, by its docstring, and its card."""
    file = FOLDER / "loops" / f"{name}.py"
    what = re.match(r'"""(.*?)"""', file.read_text(encoding="utf-8"), re.S)
    about = " ".join(what[1].split()) if what else ""
    path = file.relative_to(ROOT).as_posix()
    card = golden(name).read_text(encoding="utf-8").replace(f"{path}:", f"{name}.py:")
    return f"## {heading}\n\n{about} [Source](../{path})\n\n```text\n{card.rstrip()}\n```\n"

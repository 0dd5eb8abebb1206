"""Settings for every test: two threads at most, no network, quiet libraries, a user cache of its own."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest


@pytest.fixture(autouse=True, scope="session")
def quiet_libraries() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(min(2, torch.get_num_threads()))
    logging.disable_progress_bar()
    logging.set_verbosity_error()

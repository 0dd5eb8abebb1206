"""A standalone draft: a small language model distilled from the target by TRL's GKD trainer (arXiv 2306.13649).

A share ``lmbda`` of the batches is answered by the draft itself (on-policy): the target then says what it would have
given, at every place of the draft's own text. The others are the target's answers. trl marks this trainer as
experimental, so that the version is pinned; everything that knows of trl is in this file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import StandaloneConfig, TargetConfig
from jetspec_train.decoding.standalone import different_tokens, token_difference
from jetspec_train.targets.chat import ChatTokenizer
from jetspec_train.targets.loading import load_tokenizer, pick_device, pick_dtype, resolve

if TYPE_CHECKING:
    from jetspec_train.data.samples import SampleStore

IGNORED = -100  # a label that takes no loss
_LAYER = re.compile(r"^(.*\.(?:layers|h)\.)(\d+)(\..*)$")


def check_start(settings: StandaloneConfig, target: TargetConfig) -> None:
    """Raise UserError, before any weights are read, unless there is one start model and it has the target's tokens."""
    if (settings.model is None) == (settings.prune_layers is None):
        raise UserError(
            f"draft=standalone needs one start: standalone.model={settings.model} (a hub id or folder) or "
            f"standalone.prune_layers={settings.prune_layers} (so many of the target's own layers)."
        )
    if settings.model is None:
        return
    own, small = load_tokenizer(target), load_tokenizer(_start_config(settings))
    problem = token_difference(small.tokenizer, own.tokenizer)
    if problem is None and small.vocab_size != own.vocab_size:
        problem = f"its output has {small.vocab_size} entries, the target's has {own.vocab_size}"
    if problem is not None:
        raise UserError(different_tokens(settings.model, target.name, problem))


def load_plain(config: TargetConfig, dtype: str) -> Any:
    """The model as transformers loads it: our own attention and caches are for frozen targets only."""
    from transformers import AutoModelForCausalLM

    source = resolve(config)
    return AutoModelForCausalLM.from_pretrained(
        source.location, revision=source.revision, dtype=getattr(torch, dtype), trust_remote_code=False
    )


def start_model(settings: StandaloneConfig, target: TargetConfig, chat: ChatTokenizer) -> Any:
    """The model that training starts from, in float32, told where the target's answers end."""
    if settings.prune_layers is not None:
        model = prune_layers(load_plain(target, "float32"), settings.prune_layers)
    else:
        model = load_plain(_start_config(settings), "float32")
    model.generation_config.eos_token_id = list(chat.eos_ids)
    model.generation_config.pad_token_id = chat.pad_id
    return model


def _start_config(settings: StandaloneConfig) -> TargetConfig:
    return TargetConfig(name=str(settings.model), revision=settings.revision, template="plain")


def kept_layers(total: int, count: int) -> list[int]:
    """``count`` of ``total`` layers, the first and the last among them, evenly spread."""
    if not 1 <= count <= total:
        raise UserError(f"standalone.prune_layers={count}: the target has {total} layers; 1 to {total} are possible.")
    return [0] if count == 1 else [round(place * (total - 1) / (count - 1)) for place in range(count)]


def prune_layers(model: Any, count: int) -> Any:
    """A new model of the same family made of some of this one's layers; embedding, norm and head are copied.

    Raises UserError for more layers than there are, and for a model whose layers cannot be told by their names.
    """
    from transformers import AutoModelForCausalLM

    facts = model.config.to_dict()
    kept = kept_layers(model.config.num_hidden_layers, count)
    facts |= {"num_hidden_layers": count}
    for key, value in facts.items():
        # what is listed per layer (kinds of attention) is kept for the kept ones
        if isinstance(value, list) and key.startswith("layer") and len(value) == model.config.num_hidden_layers:
            facts[key] = [value[layer] for layer in kept]
    small = AutoModelForCausalLM.from_config(type(model.config).from_dict(facts), dtype=torch.float32)
    places = {old: new for new, old in enumerate(kept)}
    state = {}
    for name, value in model.state_dict().items():
        found = _LAYER.match(name)
        if found is None:
            state[name] = value
        elif int(found[2]) in places:
            state[f"{found[1]}{places[int(found[2])]}{found[3]}"] = value
    try:
        small.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"standalone.prune_layers={count}: {type(model).__name__} cannot be cut: {reason} Give standalone.model."
        ) from error
    small.tie_weights()
    return small


def training_rows(store: SampleStore, sequence_length: int) -> tuple[list[dict[str, list[int]]], int]:
    """Prompt and answer tokens of every sample that has room for an answer, and how many have none."""
    rows = []
    for start, length, prompt in zip(store.starts[:-1], store.lengths, store.prompt_lengths):
        if prompt < sequence_length and length > prompt:
            tokens = store.tokens[start : start + min(int(length), sequence_length)].tolist()
            rows.append({"question": tokens[: int(prompt)], "reply": tokens[int(prompt) :]})
    return rows, len(store) - len(rows)


def collate(rows: Sequence[Mapping[str, list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """A batch as GKD wants it: whole samples padded on the right, prompts alone on the left (to be continued)."""
    width = max(len(row["question"]) + len(row["reply"]) for row in rows)
    longest = max(len(row["question"]) for row in rows)
    shape = (len(rows), width)
    batch = {
        "input_ids": torch.full(shape, pad),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, IGNORED),
        "prompts": torch.full((len(rows), longest), pad),
        "prompt_attention_mask": torch.zeros((len(rows), longest), dtype=torch.long),
    }
    for number, row in enumerate(rows):
        question, reply = torch.tensor(row["question"]), torch.tensor(row["reply"])
        end = len(question) + len(reply)
        batch["input_ids"][number, :end] = torch.cat((question, reply))
        batch["attention_mask"][number, :end] = 1
        batch["labels"][number, len(question) : end] = reply
        batch["prompts"][number, longest - len(question) :] = question
        batch["prompt_attention_mask"][number, longest - len(question) :] = 1
    return batch


def distil(
    settings: StandaloneConfig,
    target: TargetConfig,
    chat: ChatTokenizer,
    rows: list[dict[str, list[int]]],
    folder: Path,
    *,
    seed: int,
    log_every: int,
    on_record: Callable[[int, dict[str, Any]], None],
    should_stop: Callable[[], bool],
) -> tuple[Any, int]:
    """Train with GKD, going on from the last checkpoint in ``folder``; returns the model (adapters merged) and the step
    reached, which is less than ``settings.steps`` only if ``should_stop`` became true (a checkpoint is then saved).

    ``on_record(step, numbers)`` is given loss and learning rate every ``log_every`` steps.
    """
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    device = pick_device(target)
    student = start_model(settings, target, chat)
    teacher = load_plain(target, pick_dtype(target, device))
    teacher.register_forward_hook(_float_logits)  # the divergence is computed in the student's float32
    arguments = GKDConfig(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(settings.warmup * settings.steps),
        lmbda=settings.lmbda,
        beta=settings.beta,
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
        max_length=settings.sequence_length,
        save_steps=settings.save_every,
        save_total_limit=1,
        logging_steps=log_every,
        seed=seed,
        bf16=device.startswith("cuda") and torch.cuda.is_bf16_supported(),
        use_cpu=device == "cpu",
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=not sys.stderr.isatty(),
        dataloader_pin_memory=device.startswith("cuda"),
    )
    trainer = GKDTrainer(
        model=student,
        teacher_model=teacher,
        args=arguments,
        data_collator=lambda batch: collate(batch, chat.pad_id),
        train_dataset=Dataset.from_list(rows),
        processing_class=chat.tokenizer,
        callbacks=[_listener(on_record, should_stop)],
        peft_config=_lora(settings),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    model = trainer.accelerator.unwrap_model(trainer.model)
    if settings.lora_rank:
        model = model.merge_and_unload()
    return model, int(trainer.state.global_step)


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint of the trainer that is complete: its state is what it writes last."""
    found = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]))) if found else None


def save_model(model: Any, chat: ChatTokenizer, folder: Path) -> None:
    """A plain model folder with the target's tokenizer; the template stays inside a JSON file, as bundles want it."""
    model.save_pretrained(folder, max_shard_size="500GB")
    chat.tokenizer.save_pretrained(folder, save_jinja_files=False)


def sample_facts(rows: Sequence[Mapping[str, list[int]]], dropped: int) -> dict[str, int]:
    """Counts of what is trained on."""
    return {
        "samples": len(rows) + dropped,
        "too_long_prompts": dropped,
        "supervised_tokens": int(np.sum([len(row["reply"]) for row in rows])),
    }


def _float_logits(module: Any, arguments: Any, output: Any) -> Any:
    output.logits = output.logits.float()
    return output


def _lora(settings: StandaloneConfig) -> Any:
    if not settings.lora_rank:
        return None
    from peft import LoraConfig

    scale: dict[str, Any] = {"lora_alpha": settings.lora_alpha}  # a fraction is allowed; peft's annotation says int
    return LoraConfig(r=settings.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM", **scale)


def _listener(on_record: Callable[[int, dict[str, Any]], None], should_stop: Callable[[], bool]) -> Any:
    """Hands the trainer's records on, and asks it to save and stop at the next step boundary."""
    from transformers import TrainerCallback

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if logs and "loss" in logs:
                names = ("loss", "learning_rate", "grad_norm")
                on_record(int(state.global_step), {name: float(logs[name]) for name in names if name in logs})

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if should_stop():
                control.should_save = control.should_training_stop = True

    return Listener()

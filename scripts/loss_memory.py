"""Peak memory of the draft loss, forward and backward, against anchors x vocabulary: ours and plain autograd.

    python scripts/loss_memory.py OUT [--anchors 32 128 512] [--vocabularies 32000 49152 151936] [--limit-gb 6]

Writes OUT/loss_memory.json and OUT/loss_memory.png. Every measurement is a process of its own: its peak resident
memory above what inputs and weights took (on CUDA: the allocator's peak). Plain autograd is left out where it is bound
to need more than --limit-gb. Gradients: of the slots' states and of the parent term's two factors.

Shapes: N slots, d width, V vocabulary, r rank of the parent term.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
from pathlib import Path
from typing import Any

SLOTS_PER_ANCHOR = 8
WIDTH, RANK = 576, 64  # SmolLM2-135M, and our default
PLAIN_COPIES = 6  # full [N, V] fp32 tensors that plain autograd holds at its peak, at least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--anchors", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[32_000, 49_152, 151_936])
    parser.add_argument("--limit-gb", type=float, default=6.0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for vocabulary in options.vocabularies:
        for anchors in options.anchors:
            for kind in ("chunked", "plain"):
                slots = anchors * SLOTS_PER_ANCHOR
                if kind == "plain" and 4 * PLAIN_COPIES * slots * vocabulary > options.limit_gb * 1e9:
                    continue
                peak = in_a_process(kind, slots, vocabulary, options.device)
                found.append({"kind": kind, "anchors": anchors, "vocabulary": vocabulary, "peak_mb": peak / 1e6})
                print(f"{kind:>8}  {anchors:5} anchors x {vocabulary:7,} tokens: {peak / 1e6:8.0f} MB", flush=True)
                (options.out / "loss_memory.json").write_text(json.dumps(found, indent=2) + "\n")
    draw(found, options.out / "loss_memory.png")


def in_a_process(kind: str, slots: int, vocabulary: int, device: str) -> float:
    """Bytes above the inputs at the peak. Raises RuntimeError if the process died (out of memory)."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(kind, slots, vocabulary, device, sender))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    except EOFError:
        raise RuntimeError(f"{kind} with {slots} slots and {vocabulary} tokens died") from None
    finally:
        process.join()


def measure(kind: str, slots: int, vocabulary: int, device: str, sender: Any) -> None:
    import torch

    torch.manual_seed(0)
    made = {
        "hidden": torch.randn(slots, WIDTH, device=device, requires_grad=True),
        "state": torch.randn(slots, RANK, device=device, requires_grad=True),
        "w2": torch.randn(vocabulary, RANK, device=device, requires_grad=True),
    }
    head = torch.randn(vocabulary, WIDTH, device=device) / WIDTH**0.5
    target = torch.randn(slots, WIDTH, device=device)
    labels = torch.randint(vocabulary, (slots,), device=device)
    run = {"chunked": chunked, "plain": plain}[kind]
    run({name: x[:8] if name != "w2" else x for name, x in made.items()}, head, target[:8], labels[:8])  # libraries
    for tensor in made.values():
        tensor.grad = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(made, head, target, labels)
        sender.send(torch.cuda.max_memory_allocated() - before)
    else:
        before = resident()
        run(made, head, target, labels)
        sender.send(max(0, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def resident() -> int:
    """Bytes of memory that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def chunked(made: dict[str, Any], head: Any, target: Any, labels: Any) -> None:
    import torch

    from jetspec_train.objectives.draft_loss import draft_loss

    slots = len(labels)

    def blocks(x: Any) -> Any:
        return x.reshape(1, slots // SLOTS_PER_ANCHOR, SLOTS_PER_ANCHOR, *x.shape[1:])

    weights = torch.ones(blocks(labels).shape, device=labels.device)
    result = draft_loss(
        blocks(made["hidden"]),
        labels_BAK=blocks(labels),
        weights_BAK=weights,
        clean_BA=None,
        target_hidden_BTD=target[None],
        sources_BAK=blocks(torch.arange(slots, device=labels.device)),
        draft_logits=lambda x: x @ head.t(),
        target_logits=lambda x: x @ head.t(),
        total_weight=float(slots),
        parent_state_BAKr=blocks(made["state"]),
        parent_weight_Vr=made["w2"],
    )
    result.loss.backward()


def plain(made: dict[str, Any], head: Any, target: Any, labels: Any) -> None:
    """METHODS 3 as written, by autograd over full tensors."""
    log_p = (made["hidden"] @ head.t() + made["state"] @ made["w2"].t()).log_softmax(-1)
    q = (target @ head.t()).softmax(-1)
    ce = -log_p.gather(-1, labels[:, None]).squeeze(-1)
    (0.1 * ce + 0.9 * (log_p.exp() - q).abs().sum(-1)).mean().backward()


def draw(found: list[dict[str, Any]], path: Path) -> None:
    from jetspec_train.evaluation.figures import MARKERS, PALETTE, render

    def paint(axes: Any, ink: str) -> None:
        for number, vocabulary in enumerate(sorted({row["vocabulary"] for row in found})):
            for kind, style in (("plain", "--"), ("chunked", "-")):
                rows = [row for row in found if row["kind"] == kind and row["vocabulary"] == vocabulary]
                label = f"{'ours' if kind == 'chunked' else 'plain autograd'}, {vocabulary:,} tokens"
                places = [row["anchors"] for row in rows], [row["peak_mb"] for row in rows]
                look = {"color": PALETTE[number], "marker": MARKERS[number], "linestyle": style}
                axes.plot(*places, label=label, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(f"anchors ({SLOTS_PER_ANCHOR} slots each)")
        axes.set_ylabel("peak memory of the loss, MB")
        axes.legend(fontsize=8)

    png, _ = render(paint, height=4.2)
    path.write_bytes(png)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main()

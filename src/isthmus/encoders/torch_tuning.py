"""Fine-tuning of a transformer with torch. A program for another Python: `python torch_tuning.py FOLDER`.

It imports nothing of Isthmus and Isthmus imports nothing of it: `tuning.py` writes the folder, has an
interpreter with torch, transformers and safetensors run this file, and builds the ONNX graph afterwards.

    job.json          in: settings, label texts, training and validation texts with their labels
    checkpoint.pt     after every epoch, and every minute: the same command continues from there
    best.pt           the weights of the best epoch so far
    model/            out, when all is done: config.json, model.safetensors; probe.json, vectors to compare

The loss is NT-Xent over a batch: with unit vectors, temperature τ, and P(a) the items that share a label
with a,
    −mean over a of mean over p ∈ P(a) of log(exp(a·p/τ) / Σ_b exp(a·b/τ)),
for texts against labels and labels against texts, halved, and for texts against the other texts. Progress is
reported as lines of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel

CHECKPOINT, BEST, MODEL = "checkpoint.pt", "best.pt", "model"
WINDOW = 8
"""Number of batches among which texts are sorted by length, so that there is little padding."""
PROBES = 8
MOST_HIDDEN = 2 << 30
"""Maximum bytes of frozen layers' output vectors that are kept in memory."""


def say(**facts: Any) -> None:
    """Print one line of progress for the calling process."""
    print(json.dumps(facts), flush=True)


def write(value: Any, path: Path) -> None:
    """Write a file by torch, atomically."""
    part = path.with_name(f".{path.name}.part")
    torch.save(value, part)
    with open(part, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(part, path)


class Texts:
    """Tokenised texts, padded to the longest of those that are read together.

    `hidden` has the texts' token vectors after the frozen layers, once they are computed.
    """

    def __init__(self, texts: list[str], tokenizer: Tokenizer, limit: int, padding: int) -> None:
        tokenizer.enable_truncation(limit)
        tokenizer.no_padding()
        self.ids = [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
        self.padding = padding
        self.hidden: list[Tensor] = []

    def inputs(self, rows: list[int]) -> dict[str, Tensor]:
        """Inputs for a model: token numbers, or their vectors if `hidden` is set, and the attention mask."""
        lengths = torch.tensor([len(self.ids[row]) for row in rows])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        if self.hidden:
            vectors = pad_sequence([self.hidden[row] for row in rows], batch_first=True)
            return {"inputs_embeds": vectors, "attention_mask": mask}
        ids = pad_sequence([self.ids[row] for row in rows], batch_first=True, padding_value=self.padding)
        return {"input_ids": ids, "attention_mask": mask}

    @torch.no_grad()
    def read(self, model: torch.nn.Module) -> None:
        """Store the token vectors from a model that has only the frozen lower layers."""
        hidden: dict[int, Tensor] = {}
        for rows in self.by_length():
            states = model(**self.inputs(rows)).last_hidden_state
            hidden |= {row: states[at, : len(self.ids[row])].clone() for at, row in enumerate(rows)}
        self.hidden = [hidden[row] for row in range(len(self.ids))]

    def by_length(self, size: int = 64) -> list[list[int]]:
        order = sorted(range(len(self.ids)), key=lambda row: len(self.ids[row]))
        return [order[at : at + size] for at in range(0, len(order), size)]

    def batches(self, size: int, seed: int) -> list[list[int]]:
        """All rows once, in an order that depends on the seed; texts of a batch have similar lengths."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.ids), generator=generator).tolist()
        batches: list[list[int]] = []
        for start in range(0, len(order), size * WINDOW):
            window = sorted(order[start : start + size * WINDOW], key=lambda row: len(self.ids[row]))
            batches += [window[at : at + size] for at in range(0, len(window), size)]
        mixed = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[at] for at in mixed]


def contrast(logits: Tensor, same: Tensor, apart: Tensor | None = None) -> Tensor:
    """NT-Xent of rows against columns; `same` marks positive pairs, `apart` pairs that are left out."""
    if apart is not None:
        logits, same = logits.masked_fill(apart, -1e9), same & ~apart
    logarithms = torch.log_softmax(logits, dim=1)
    count = same.sum(dim=1)
    each = -(logarithms * same).sum(dim=1) / count.clamp(min=1)
    return each[count > 0].mean() if bool((count > 0).any()) else logits.sum() * 0


class Passed(torch.nn.Module):
    """A replacement for the embedding layer that passes precomputed vectors through."""

    def forward(self, *, inputs_embeds: Tensor, **_: Any) -> Tensor:
        return inputs_embeds


class Tuning:
    """A model, its optimiser and the progress of its tuning; `run` continues until it is done."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owner = folder, os.getppid()
        job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        self.digest, self.settings = job["digest"], job["settings"]
        self.base = base = Path(job["base"])
        torch.manual_seed(self.settings["seed"])
        self.model = self.load()
        config = self.model.config
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        padding = config.pad_token_id or 0
        self.limit = limit = min(self.settings["max_tokens"], self.settings["limit"])
        self.labels = Texts(job["labels"], tokenizer, limit, padding)
        self.parts = {
            name: Texts(job[name]["texts"], tokenizer, limit, padding) for name in ("train", "validation")
        }
        self.right = {name: self.relevance(job[name]["labels"], len(job["labels"])) for name in self.parts}
        self.probes = job["validation"]["texts"][:PROBES]
        self.below = 0
        if 0 < self.settings["layers"] < config.num_hidden_layers:
            self.freeze(config.num_hidden_layers - self.settings["layers"])
        batches = len(self.parts["train"].batches(self.settings["batch"], 0))
        self.steps = batches * self.settings["epochs"]
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.settings["rate"],
            weight_decay=self.settings["decay"],
            amsgrad=True,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda step: max(0.0, 1 - step / self.steps)
        )
        self.epoch, self.batch, self.loss = 0, 0, 0.0
        self.history: list[dict[str, float]] = []
        self.seconds = 0.0

    def load(self) -> Any:
        return AutoModel.from_pretrained(self.base, local_files_only=True, dtype=torch.float32)

    def freeze(self, below: int) -> None:
        """Freeze the layers up to this one; their output for all texts is computed once, if it fits in
        memory."""
        began, everything = time.monotonic(), (self.labels, *self.parts.values())
        tokens = sum(len(ids) for texts in everything for ids in texts.ids)
        if 4 * tokens * self.model.config.hidden_size > MOST_HIDDEN:
            for module in (self.model.embeddings, *self.model.encoder.layer[:below]):
                module.requires_grad_(False)
            return
        bottom = self.load().eval()
        bottom.encoder.layer = bottom.encoder.layer[:below]
        for texts in everything:
            texts.read(bottom)
        self.below = below
        self.model.embeddings = Passed()
        self.model.encoder.layer = self.model.encoder.layer[below:]
        say(frozen=below, seconds=time.monotonic() - began)

    @staticmethod
    def relevance(labels: list[list[int]], count: int) -> Tensor:
        right = torch.zeros(len(labels), count, dtype=torch.bool)
        for row, columns in enumerate(labels):
            right[row, columns] = True
        return right

    def vectors(self, texts: Texts, rows: list[int]) -> Tensor:
        inputs = texts.inputs(rows)
        hidden = self.model(**inputs).last_hidden_state
        if self.settings["pooling"] == "cls":
            return normalize(hidden[:, 0], dim=1)
        weights = inputs["attention_mask"].unsqueeze(-1).float()
        return normalize((hidden * weights).sum(dim=1) / weights.sum(dim=1), dim=1)

    def step_loss(self, rows: list[int]) -> Tensor:
        """NT-Xent of a batch: texts against their labels, and texts against one another."""
        right = self.right["train"][rows]
        columns = torch.nonzero(right.any(dim=0)).flatten().tolist()
        texts, labels = self.vectors(self.parts["train"], rows), self.vectors(self.labels, columns)
        temperature, right = self.settings["temperature"], right[:, columns]
        logits = texts @ labels.T / temperature
        loss = (contrast(logits, right) + contrast(logits.T, right.T)) / 2
        if self.settings["texts"] > 0 and len(rows) > 1:
            same = (right.float() @ right.float().T) > 0
            own = torch.eye(len(rows), dtype=torch.bool)
            loss = loss + self.settings["texts"] * contrast(texts @ texts.T / temperature, same, own)
        return loss

    @torch.no_grad()
    def encode(self, texts: Texts) -> Tensor:
        self.model.eval()
        batches = texts.by_length()
        back = torch.argsort(torch.tensor([row for rows in batches for row in rows]))
        return torch.cat([self.vectors(texts, rows) for rows in batches])[back]

    def validate(self) -> dict[str, float]:
        """Mean reciprocal rank of the first correct label, and the share of texts with a correct label on
        rank 1."""
        scores = self.encode(self.parts["validation"]) @ self.encode(self.labels).T
        right = self.right["validation"]
        ranks = torch.argsort(scores, dim=1, descending=True, stable=True)
        hits = torch.gather(right, 1, ranks)
        places = hits.float().argmax(dim=1) + 1
        judged = hits.any(dim=1)
        reciprocal = (1 / places.double())[judged]
        return {"MRR": reciprocal.mean().item(), "P@1": hits[judged][:, 0].double().mean().item()}

    def save(self) -> None:
        state = {
            "digest": self.digest,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
            "at": [self.epoch, self.batch, self.loss, self.seconds],
            "history": self.history,
        }
        write(state, self.folder / CHECKPOINT)

    def resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        if state["digest"] != self.digest:
            raise SystemExit("the checkpoint is of another tuning")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        self.epoch, self.batch, self.loss, self.seconds = state["at"]
        self.history = state["history"]
        say(resumed=True, epoch=self.epoch + 1, batch=self.batch)

    @property
    def best(self) -> int:
        return max(range(len(self.history)), key=lambda at: self.history[at]["MRR"])

    @property
    def ended(self) -> bool:
        """Whether all epochs are done, or `patience` epochs have passed since the best one."""
        done = len(self.history)
        waited = done - 1 - self.best if done else 0
        return done >= self.settings["epochs"] or waited >= self.settings["patience"]

    def run(self) -> None:
        self.resume()
        while not self.ended:
            self.run_epoch()
        self.finish()

    def run_epoch(self) -> None:
        batches = self.parts["train"].batches(
            self.settings["batch"], 1000 * self.settings["seed"] + self.epoch
        )
        clock = saved = spoken = time.monotonic()
        while self.batch < len(batches):
            if os.getppid() != self.owner:  # the parent was killed: its successor resumes from the checkpoint
                raise SystemExit("whoever started this is gone")
            self.model.train()
            loss = self.step_loss(batches[self.batch])
            self.optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
            self.schedule.step()
            self.loss += loss.item()
            self.batch += 1
            now = time.monotonic()
            self.seconds, clock = self.seconds + now - clock, now
            if now - spoken > self.settings["report_seconds"]:
                spoken = now
                say(epoch=self.epoch + 1, batch=self.batch, batches=len(batches), loss=self.loss / self.batch)
            if now - saved > self.settings["save_seconds"]:
                self.save()
                saved = clock = time.monotonic()
        record = {"epoch": self.epoch + 1, "loss": self.loss / len(batches), **self.validate()}
        self.seconds += time.monotonic() - clock
        self.history.append({**record, "seconds": self.seconds})
        if self.best == len(self.history) - 1:
            write(self.model.state_dict(), self.folder / BEST)
        self.epoch, self.batch, self.loss = self.epoch + 1, 0, 0.0
        self.save()
        say(**self.history[-1], best=self.best + 1)

    @torch.no_grad()
    def finish(self) -> None:
        """Write the best weights in the format of transformers, and vectors of some texts in float32."""
        self.model.load_state_dict(torch.load(self.folder / BEST, weights_only=True))
        self.model.eval()
        rows = list(range(len(self.probes)))
        vectors = [self.vectors(self.parts["validation"], [row])[0].tolist() for row in rows]
        whole = self.load()
        if self.below:
            whole.encoder.layer[self.below :].load_state_dict(self.model.encoder.layer.state_dict())
        else:
            whole.load_state_dict(self.model.state_dict())
        target = self.folder / MODEL
        target.mkdir(exist_ok=True)
        whole.config.save_pretrained(target)
        weights = {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        probe = {"texts": self.probes, "vectors": vectors, "limit": self.limit}
        probe |= {"history": self.history, "best": self.best + 1}
        part = target / ".probe.json.part"
        part.write_text(json.dumps(probe), encoding="utf-8")
        os.replace(part, target / "probe.json")
        say(done=True, best=self.best + 1, seconds=self.seconds)


def main() -> None:
    """Run the tuning in the folder given as first argument, on one thread unless OMP_NUM_THREADS is set."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    Tuning(Path(sys.argv[1])).run()


if __name__ == "__main__":
    main()

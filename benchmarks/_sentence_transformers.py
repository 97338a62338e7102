"""The peer of `encoders`: sentence-transformers on torch, in an interpreter that has them.

The model is a BERT of a given number of layers with random weights, which do not affect its speed. The
program reads texts from a JSON file, encodes them on one thread several times, and prints the fewest
processor seconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer, models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast


def main() -> None:
    texts, tokenizer, layers, times = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = BertConfig(
            hidden_size=384, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=1536
        )
        BertModel(config).save_pretrained(folder)
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        PreTrainedTokenizerFast(tokenizer_file=tokenizer, **special).save_pretrained(folder)
        words = models.Transformer(folder, max_seq_length=512)
        model = SentenceTransformer(modules=[words, models.Pooling(384)], device="cpu")
    model.encode(texts[:4])
    spans = []
    for _ in range(times):
        began = time.process_time()
        model.encode(texts, batch_size=32)
        spans.append(time.process_time() - began)
    print(min(spans))


if __name__ == "__main__":
    main()

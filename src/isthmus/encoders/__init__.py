"""Encoders: texts to unit vectors whose dot product is a similarity.

    Lsa           TF-IDF and a truncated SVD, fitted on the texts at hand; needs no download
    Transformer   a BERT-like sentence encoder from a folder, all-MiniLM-L6-v2 by default
    Projected     another encoder behind a linear map learned from judged pairs
    Unmarked      another encoder that reads posts without their markup

An encoder has a `fingerprint` that changes whenever its vectors would, so `encode_cached` can keep
vectors on disk.
"""

from isthmus.encoders.kept import Remembered, Unmarked, encode_cached, unmarked
from isthmus.encoders.latent import Lsa, Projected
from isthmus.encoders.transformer import MINILM_SHA256, Transformer
from isthmus.encoders.vectors import Encoder, Vectors, unit

__all__ = [
    "MINILM_SHA256",
    "Encoder",
    "Lsa",
    "Projected",
    "Remembered",
    "Transformer",
    "Unmarked",
    "Vectors",
    "encode_cached",
    "unit",
    "unmarked",
]

"""Encoders: texts to unit vectors whose dot product is a similarity.

    Lsa           TF-IDF and a truncated SVD, fitted on the texts at hand; needs no download
    Transformer   a BERT-like sentence encoder from a folder, all-MiniLM-L6-v2 by default

An encoder has a `fingerprint` that changes whenever its vectors would, so `encode_cached` can keep
vectors on disk.
"""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)

"""Encoders: texts to unit vectors whose dot product is a similarity.

    Lsa              TF-IDF and a truncated SVD, fitted on the texts at hand; needs no download
    load_encoder     an encoder that was added by `isthmus encoder add`: ONNX files, or an endpoint
    load_cross_encoder   a cross-encoder, which scores pairs of a query and a document
    tune             a transformer fine-tuned on labelled texts, by torch in a Python of its own

An encoder has a `fingerprint` that changes whenever its vectors would. With it, `encode_cached` stores
vectors on disk, and silos can see whether their vectors are comparable.
"""

from isthmus.facade import contents

__getattr__, __dir__, __all__ = contents(__name__)

from isthmus.encoders.transformer import MINILM_SHA256 as MINILM_SHA256
from isthmus.encoders.transformer import Transformer as Transformer
from isthmus.encoders.vectors import Encoder as Encoder
from isthmus.encoders.vectors import Lsa as Lsa
from isthmus.encoders.vectors import Vectors as Vectors
from isthmus.encoders.vectors import encode_cached as encode_cached
from isthmus.encoders.vectors import unit as unit

from isthmus.engines.vectors import VectorIndex as VectorIndex
from isthmus.engines.vectors import VectorReader as VectorReader

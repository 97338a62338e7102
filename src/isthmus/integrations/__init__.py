"""A broker as a retriever of other libraries: LangChain, LlamaIndex, Haystack and PyTerrier."""

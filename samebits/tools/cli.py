"""The command line: ``samebits audit``, ``bench``, ``export``, ``info``, ``parity``, ``tune``, ``verify``.

This file parses the arguments. Every command calls the ``main`` of its tool, and turns the outcome into an
exit code.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from samebits._version import __version__
from samebits.tools.text import ToolError

_SOFTWARE, _CLOSED_PIPE = 70, 128 + 13  # as in sysexits.h, and as the shell reports SIGPIPE

app = typer.Typer(
    help="Batch-invariant operators for PyTorch, from matrix products to attention, with specified bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
)


class Dtype(StrEnum):
    loaded = "loaded"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Backend(StrEnum):
    cuda = "cuda"
    triton = "triton"


class Verified(StrEnum):
    products = "products"
    rows = "rows"
    attention = "attention"
    groups = "groups"
    layers = "layers"
    fp8 = "fp8"
    functions = "functions"


class InferenceEngine(StrEnum):
    sglang = "sglang"
    vllm = "vllm"


class ModelImpl(StrEnum):
    auto = "auto"
    vllm = "vllm"
    transformers = "transformers"


class Operands(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


ROWS = "1,8,16,32,64,128,256,512,1024,2048,4096,8192"

_SHAPE = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="KxN", help="Sizes of a linear layer's weight; may be given again."),
]
_MODEL = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME_OR_CONFIG",
        help="Linear layers of a Hugging Face config: a folder, or a name in its cache. No weights.",
    ),
]
_SHAPES = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What a run has met: from samebits.record_shapes.")
]
_ROWS = Annotated[
    str,
    typer.Option("--rows", metavar="M,...", help="Rows of --shape and --model; from 256 on with dX and dW."),
]
_DTYPE = Annotated[
    Operands | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="bfloat16, float16, float32; by default the model's, or bfloat16."
    ),
]
_DEVICE = Annotated[int, typer.Option("--device", metavar="INDEX", min=0, help="Of the CUDA device.")]
_HTML = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page to send to somebody, in one file.")
]


def _version(asked: bool) -> None:
    if asked:
        print(f"samebits {__version__}")
        raise typer.Exit


@app.callback()
def samebits(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Batch-invariant operators for PyTorch, from matrix products to attention, with specified bits."""


@app.command()
def audit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face folder, or the name of a model in its cache (nothing is downloaded);"
            " package.module:function, which returns (module, inputs); or demo: MiniLM, from the demo extra.",
        ),
    ],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to run the model on, instead of the one that comes along.")
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            "--dtype",  # typer 0.27 would derive --DTYPE from the metavar
            metavar="DTYPE",
            help="Cast the model: float32, bfloat16, float16, or loaded to leave it.",
        ),
    ] = Dtype.loaded,
    max_rows: Annotated[
        int | None,
        typer.Option(
            "--max-rows",
            metavar="N",
            min=2,
            help="Audit this many rows of each layer (96), or with --operators of the batch (4).",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=2, help="Use this much of the text.")
    ] = 4096,
    only: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Audit only the layers whose name matches.")
    ] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the full report there; - is stdout.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Move the model there: cpu, cuda or cuda:1; by default it runs where it is.",
        ),
    ] = None,
    operators: Annotated[
        bool, typer.Option("--operators", help="Audit every operator of the model in batches of sequences.")
    ] = False,
    backward: Annotated[
        bool, typer.Option("--backward", help="With --operators: those of the backward, too.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the drift of layers, or operators (SVG, PNG, PDF)."),
    ] = None,
    html: _HTML = None,
) -> None:
    """Which of a model's linear layers change their bits with the batch: PyTorch's, and samebits'.

    Runs the model on real text, catches what reaches each linear layer, and runs the layer again on those
    rows in other batch sizes, positions, paddings, neighbours and chunks. With --operators, runs the whole
    model in several batches, and compares every operator. Exit code: 0, samebits (or all operators) kept
    every bit; 1, not so; 2, the audit could not run on what it was given; 70, samebits itself failed.
    """
    with _errors("audit"):
        from samebits.tools.audit.command import main

        code = main(
            model,
            text=text,
            dtype=None if dtype is Dtype.loaded else dtype.value,
            max_rows=max_rows,
            max_tokens=max_tokens,
            only=only,
            json_to=json_to,
            device=device,
            operators=operators,
            backward=backward,
            plot=plot,
            html=html,
        )
    raise typer.Exit(code)


@app.command()
def info(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """What this machine has, which backends work, and for each that does not: why, and what to do."""
    with _errors("info"):
        from samebits.tools.info import main

        code = main(as_json=json_)
    raise typer.Exit(code)


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes: under a minute.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure batch_invariant_ops and sgemm-bi too, if installed.")
    ] = False,
    backend: Annotated[
        Backend | None, typer.Option("--backend", help="Measure this one, not the automatic choice.")
    ] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all times there; - is stdout.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw speed over rows (SVG, PNG, PDF).")
    ] = None,
    html: _HTML = None,
    device: _DEVICE = 0,
    shape: _SHAPE = None,
    model: _MODEL = None,
    shapes: _SHAPES = None,
    rows: _ROWS = ROWS,
    dtype: _DTYPE = None,
) -> None:
    """Speed on this GPU beside PyTorch: products and attention, forward and gradients.

    With --shape, --model or --shapes: of those products, and of nothing else.

    Exit code: 0, measured; 1, some results had other bits than specified, and have no time; 2, it cannot run
    here; 70, samebits itself failed.
    """
    with _errors("bench"):
        from samebits.tools.bench.command import main

        own = None
        if shape or model or shapes:
            from samebits.tools.shapes import asked

            own = asked(shape or (), model or (), shapes, rows, dtype)
        code = main(
            quick=quick,
            peers=peers,
            backend=backend,
            json_to=json_to,
            plot=plot,
            html=html,
            device=device,
            own=own,
        )
    raise typer.Exit(code)


@app.command()
def parity(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, or a name.")],
    engine: Annotated[InferenceEngine, typer.Option("--engine", help="What samples.")],
    sequences: Annotated[
        int, typer.Option("--sequences", metavar="N", min=1, help="Prompts of 1 to --prompt tokens.")
    ] = 16,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", min=1, help="The longest prompt.")] = 200,
    new: Annotated[int, typer.Option("--new", metavar="N", min=1, help="Tokens to sample after each.")] = 64,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the prompts.")] = 0,
    memory: Annotated[
        float, typer.Option("--memory", metavar="SHARE", min=0.05, max=0.95, help="The engine's share.")
    ] = 0.45,
    model_impl: Annotated[
        ModelImpl, typer.Option("--model-impl", help="As in vLLM; by default what is proven.")
    ] = ModelImpl.auto,
    segments: Annotated[
        int, typer.Option("--segments", metavar="N", min=1, max=64, help="Into how many chains sums are cut.")
    ] = 1,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", metavar="N", min=1, help="GPUs of the engine, with segments.")
    ] = 1,
) -> None:
    """Whether an inference engine's log-probs are the trainer's, bit for bit, on a model of yours.

    The engine samples tokens under samebits. transformers replays them under samebits. At a difference, the
    first module whose output differs is named (for vLLM).

    Exit code: 0, no token differs; 1, some do; 2, it cannot run; 70, samebits itself failed.
    """
    with _errors("parity"):
        from samebits.tools.parity import main

        code = main(
            model,
            engine=engine.value,
            sequences=sequences,
            prompt=prompt,
            new=new,
            seed=seed,
            memory=memory,
            model_impl=model_impl.value,
            segments=segments,
            tensor_parallel=tensor_parallel,
        )
    raise typer.Exit(code)


@app.command()
def tune(
    shape: _SHAPE = None,
    model: _MODEL = None,
    shapes: _SHAPES = None,
    rows: _ROWS = ROWS,
    dtype: _DTYPE = None,
    budget: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Begin no measurement after so many seconds.")
    ] = 600,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table there, not to where it is found by itself."),
    ] = None,
    merge: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A B", help="Measure nothing: write both tables to --out; B's entries replace A's."
        ),
    ] = None,
    device: _DEVICE = 0,
) -> None:
    """Measure which schedules are fastest on this GPU, and keep them in a table. No bit depends on it.

    Exit code: 0, measured; 1, a schedule gave other bits; 2, an argument is wrong, or it cannot run here; 70,
    samebits itself failed.
    """
    with _errors("tune"):
        from samebits.tools.tune.command import main

        code = main(
            shape=shape or (),
            models=model or (),
            shapes=shapes,
            rows=rows,
            dtype=dtype,
            budget=budget,
            out=out,
            merge=merge or (),
            device=device,
        )
    raise typer.Exit(code)


@app.command()
def verify(
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough", help="More combinations and large products, and Triton's kernels if installed."
        ),
    ] = False,
    backend: Annotated[
        Backend | None, typer.Option("--backend", help="Whose kernels; by default cuda's.")
    ] = None,
    only: Annotated[
        list[Verified] | None, typer.Option("--only", help="A part alone; may be given again.")
    ] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the full report there; - is stdout.")
    ] = None,
    report_to: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="Write a page to send: machine, digests, every result."
        ),
    ] = None,
    device: _DEVICE = 0,
) -> None:
    """Prove the kernels on this GPU: every kernel and schedule against the CPU reference, bit for bit.

    Exit code: 0, every value has the bits specified; 1, some have not, or a kernel failed; 2, no GPU was
    verified (the CPU reference's known answers were); 70, samebits itself failed.
    """
    with _errors("verify"):
        from samebits.tools.verify.command import main

        code = main(
            thorough=thorough,
            backend=backend,
            only=only or (),
            json_to=json_to,
            report_to=report_to,
            device=device,
        )
    raise typer.Exit(code)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write ARCH.samebits.")],
    arch: Annotated[
        list[str],
        typer.Option("--arch", metavar="ARCH", help="sm_90a, sm_80 and so on; may be given again."),
    ],
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", metavar="DTYPE", help="f32, bf16, f16; by default all.")
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op", metavar="OP", help="gemm, ragged, linear_logp, grouped_mm, attention; by default all."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="KxN",
            help="Of a weight that schedules are for, instead of some models'; any size works.",
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            metavar="SIZE",
            help="Size of attention's heads, or those of q and v, 192x128, instead of some models'.",
        ),
    ] = None,
) -> None:
    """Compile kernels, with the choice of their schedules, into an archive for libsamebits. Needs no GPU.

    It comes with samebits-native, a distribution of its own.

    Exit code: 0, written; 2, an argument is wrong, or nothing compiles here; 70, samebits itself failed.
    """
    with _errors("export"):
        try:
            from samebits_native.export.command import main
        except ModuleNotFoundError as error:
            if error.name != "samebits_native":
                raise
            raise ToolError(
                "it needs samebits-native: pip install './native[export]' in a clone of samebits"
            ) from error
        code = main(
            folder, archs=arch, dtypes=dtype or (), ops=op or (), shapes=shape or (), heads=head or ()
        )
    raise typer.Exit(code)


@contextmanager
def _errors(command: str) -> Iterator[None]:
    """Turn exceptions into exit codes other than 1, which means that bits changed.

    An error of the user gives one line on stderr and exit code 2. An error of samebits gives a traceback and
    exit code 70. If the reader closes the pipe, as `head` does, the command ends silently.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the encoding may lack an arrow
    try:
        yield
        sys.stdout.flush()  # at the interpreter's exit it would be too late
    except (typer.Exit, typer.Abort):
        raise
    except ToolError as error:
        print(f"samebits {command}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except BrokenPipeError:
        with suppress(OSError):  # the rest of the buffer has no reader
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_CLOSED_PIPE) from None
    except (Exception, SystemExit):
        traceback.print_exc()
        raise typer.Exit(_SOFTWARE) from None

